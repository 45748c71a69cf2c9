"""The same with an answer that comes in parts.

Our own text, but for the lines by which a patch recognizes it.
"""

from slime.rollout.sglang_rollout import _prepare_prompt_ids


async def generate_streaming(args, sample, sampling_params):
    state = args.state
    prompt_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    assert sampling_params["max_new_tokens"] >= 0
    async for part in state.stream(prompt_ids, sampling_params):
        sample = part
    return sample
