"""slime's own partial rollout of one tag: before, after, and reverted.

``--out FOLDER`` on one rank, with slime's files on sys.path. What is asked for goes to an engine that never ends by
itself and is aborted where a case says so; the rest, group and sample included, is slime's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
import types
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

from rlhf_patches.proving import states
from tests.harness import slime_clone

slime_clone.install()
for _name in ("sglang_router", "pybase64"):  # 0.3.0 imports them; nothing here uses them
    sys.modules.setdefault(_name, types.ModuleType(_name))

NAME = "slime-partial-rollout-budget"
PROMPT, LIMIT = [1, 2, 3], 20
STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"

rollout: Any = importlib.import_module("slime.rollout.sglang_rollout")
streaming: Any = importlib.import_module("slime.rollout.sglang_streaming_rollout")
Sample: Any = importlib.import_module("slime.utils.types").Sample


class Engine:
    """Answers with as many tokens as are asked for, or fewer where it is aborted; keeps what was asked."""

    def __init__(self, aborted_after: list[int]):
        self.aborted_after = iter(aborted_after)
        self.asked: list[tuple[int, int]] = []

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        asked = payload["sampling_params"]["max_new_tokens"]
        self.asked.append((len(payload["input_ids"]), asked))
        aborted_after = next(self.aborted_after, None)
        tokens = asked if aborted_after is None else aborted_after
        reason = "length" if aborted_after is None else "abort"
        return {
            "text": "x" * tokens,
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [(-0.5, 7, None)] * tokens,
                "prompt_tokens": len(payload["input_ids"]),
            },
        }

    async def post(self, url: str, payload: dict[str, Any], headers: Any = None) -> dict[str, Any]:
        return self.answer(payload)

    @contextlib.asynccontextmanager
    async def stream(self, method: str, url: str, *, json: dict[str, Any], headers: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(raise_for_status=lambda: None, aiter_lines=lambda: self.lines(json))

    async def lines(self, payload: dict[str, Any]) -> AsyncIterator[str]:
        yield f"data: {json.dumps(self.answer(payload))}"
        yield "data: [DONE]"


def arguments(**settings: Any) -> SimpleNamespace:
    found = SimpleNamespace(
        hf_checkpoint="",
        sglang_server_concurrency=8,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=LIMIT,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=True,
        n_samples_per_prompt=1,
        sglang_dp_size=1,
        sglang_router_ip="",
        sglang_router_port=0,
        sglang_speculative_algorithm=None,
        use_rollout_routing_replay=False,
        ci_test=False,
        group_rm=False,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=False,
        custom_generate_function_path=None,
    )
    vars(found).update(settings)
    return found


@contextlib.contextmanager
def engine(aborted_after: list[int]) -> Iterator[Engine]:
    made = Engine(aborted_after)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: list(PROMPT))
    rollout.SingletonMeta._instances.clear()
    rollout.load_tokenizer = lambda path, trust_remote_code: tokenizer
    rollout.load_processor = lambda path, trust_remote_code: None
    rollout.get_rollout_num_engines = lambda args: 1
    rollout.post, rollout.async_rm = made.post, reward
    if hasattr(rollout, "apply_rollout_sample_hooks"):
        rollout.apply_rollout_sample_hooks = no_hooks
    streaming.http_utils._http_client = made
    yield made


async def reward(args: Any, sample: Any) -> float:
    return 1.0


async def no_hooks(args: Any, sample: Any, **settings: Any) -> Any:
    return sample


def seen(sample: Any, engine: Engine) -> dict[str, Any]:
    return {
        "asked": engine.asked,
        "tokens": len(sample.tokens),
        "response": sample.response_length,
        "log-probabilities": len(sample.rollout_log_probs or ()),
        "mask": sample.loss_mask,
        "status": sample.status.value,
    }


def resumed(aborted_after: list[int], **settings: Any) -> dict[str, Any]:
    """A group of one, which slime gets again until it is not aborted, as its buffer does."""
    args = arguments(**settings)
    with engine(aborted_after) as made:

        async def all_parts() -> Any:
            group = [Sample(index=0, prompt="")]
            for _ in range(len(aborted_after) + 1):
                params = rollout.GenerateState(args).sampling_params.copy()
                group = await rollout.generate_and_rm_group(args, group, sampling_params=params)
            return group[0]

        return seen(asyncio.run(all_parts()), made)


def called(response: int, status: str, asked: int, twice: bool = False) -> dict[str, Any]:
    """A custom function's own call, or two of them with one dictionary."""
    args = arguments()
    with engine([]) as made:
        sample = Sample(index=0, prompt="", tokens=[*PROMPT, *[7] * response], response_length=response)
        sample.rollout_log_probs, sample.response = [-0.5] * response, "x" * response
        params = {"max_new_tokens": asked}
        for _ in range(1 + twice):
            sample.status = Sample.Status(status)
            asyncio.run(rollout.generate(args, sample, params))
        return {**seen(sample, made), "theirs": params}


def observe() -> dict[str, Any]:
    return {
        "once": resumed([6]),
        "twice": resumed([6, 5]),
        "streaming": resumed([6, 5], custom_generate_function_path=STREAMING),
        "masked": resumed([6], mask_offpolicy_in_partial_rollout=True),
        "before its first token": resumed([0]),
        "at the limit": resumed([LIMIT]),
        "never aborted": resumed([]),
        "never aborted, streaming": resumed([], custom_generate_function_path=STREAMING),
        "turns": called(6, "pending", LIMIT, twice=True),
        "a turn's own limit": called(6, "aborted", 4),
        "more than the limit": called(6, "aborted", 2 * LIMIT, twice=True),
        "longer already": called(LIMIT + 5, "aborted", LIMIT),
    }


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
