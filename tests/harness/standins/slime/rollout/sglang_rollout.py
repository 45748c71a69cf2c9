"""How slime asks an engine for a sample's tokens, with its defect.

Our own text, but for the lines by which a patch recognizes it.
"""


def _prepare_prompt_ids(sample, tokenizer, processor):
    return sample.tokens or tokenizer.encode(sample.prompt)


async def generate(args, sample, sampling_params):
    state = args.state
    prompt_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    assert sampling_params["max_new_tokens"] >= 0
    return await state.ask(prompt_ids, sampling_params)
