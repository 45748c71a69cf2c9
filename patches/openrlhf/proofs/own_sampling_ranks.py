"""OpenRLHF's own `MultiTurnAgentExecutor` with the samples of a prompt: before, after, and reverted.

``--out FOLDER`` on one rank. The samples run concurrently on one event loop, with one object of sampling parameters, as
OpenRLHF's `generate_responses` starts them. The stand-in for vLLM yields to other samples, and returns four tokens.
"""

from __future__ import annotations

import asyncio
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states

NAME = "openrlhf-own-sampling"
LIMIT, NEW, ANSWER = 64, 8, 4

agent: Any = importlib.import_module("openrlhf.utils.agent")


class Engine:
    """Records the requests of each sample, which its tokens' letter identifies."""

    def __init__(self) -> None:
        self.asked: dict[str, list[dict[str, Any]]] = {}

    async def generate(self, tokens: list[int], params: Any, **more: Any) -> Any:
        asked = {"tokens": len(tokens), "max_tokens": params.max_tokens, "temperature": params.temperature}
        self.asked.setdefault(chr(tokens[0]), []).append(asked)
        await asyncio.sleep(0)
        answer = SimpleNamespace(token_ids=tokens[:1] * ANSWER, text="x" * ANSWER, finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[answer])


def tokenizer(text: str, **settings: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}


vars(tokenizer)["decode"] = lambda tokens, **settings: "".join(map(chr, tokens))


def run(lengths: list[int], colder: str = "", slow: str = "", new: int | None = NEW) -> dict[str, Any]:
    """Two turns of each sample; ``colder`` is the letter of the sample whose environment sets a temperature."""
    letters = iter("abcdefgh"[: len(lengths)])
    length_of = dict(zip("abcdefgh", lengths, strict=False))

    class Environment(agent.AgentInstanceBase):
        def __init__(self) -> None:
            self.letter, self.turns = next(letters), 0

        async def reset(self, states: dict[str, Any], **more: Any) -> dict[str, Any]:
            for _ in range(20 * (self.letter == slow)):
                await asyncio.sleep(0)
            return {"observation": self.letter * length_of[self.letter]}

        async def step(self, states: dict[str, Any], **more: Any) -> dict[str, Any]:
            self.turns += 1
            if self.letter == colder:
                states["sampling_params"].temperature = 0.1
            return {"rewards": torch.tensor(1.0), "environment_feedback": self.letter * 2, "done": self.turns == 2}

    engine, params = Engine(), SimpleNamespace(max_tokens=new, temperature=1.0, logprobs=None)
    executor = agent.MultiTurnAgentExecutor(Environment)

    async def all_samples() -> Any:
        tasks = [executor.execute("p", "l", params, LIMIT, tokenizer, engine) for _ in lengths]
        return await asyncio.gather(*tasks)

    answers = asyncio.run(all_samples())
    return {
        "asked": engine.asked,
        "tokens": [len(answer["observation_tokens"]) for answer in answers],
        "ranges": [answer["action_ranges"] for answer in answers],
        "theirs": vars(params),
    }


def observe() -> dict[str, Any]:
    return {
        "lengths": run([20, 40, 30]),
        "without max_new_tokens": run([20, 40, 30], new=None),
        "colder": run([20, 20, 20], colder="b"),
        "slow": run([20, 60], slow="b"),
        "alike": run([20, 20, 20]),
        "one": run([20]),
    }


def main() -> None:
    states.report(NAME, observe, states.parser().parse_args().out)
