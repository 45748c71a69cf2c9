"""Answers compared on the main thread and in other threads, by Math-Verify, verl and TRL: ``--out FOLDER [alone]``.

Each case runs before apply() of math-verify-thread, after it, and after revert(); ``alone``: without verl and TRL.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import math_verify
import torch

from rlhf_patches.proving import states

NAME = "math-verify-thread"
ANSWERS = [
    (r"so it is \boxed{\frac{2}{4}}", "0.5"),
    (r"I get \boxed{x = 3}", "3"),
    (r"the set is \boxed{\{2, 1\}}", r"\{1,2\}"),
    (r"thus \boxed{\frac{1}{3}}", "0.5"),
    ("no idea", "4"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
]


def in_a_thread(function: Callable[[], Any]) -> Any:
    """The result in that thread, or the error's last line; and the log of an error."""
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(function).result()
        except BaseException as error:
            return {"error": repr(error), "log": traceback.format_exc()}


def compared() -> list[bool]:
    """Results of Math-Verify itself, with its own timeouts."""
    return [math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(answer)) for answer, gold in ANSWERS]


def by_verl() -> list[float]:
    from verl.utils.reward_score.math_verify import compute_score

    return [float(compute_score(answer, gold)) for answer, gold in ANSWERS]


def by_verl_s_reward_loop() -> list[float]:
    """Results of the manager that a Ray actor of 0.7.1 runs, with a user's reward function."""
    from tensordict import TensorDict
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.utils.reward_score.math_verify import compute_score

    class Tokenizer:
        def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids.tolist()))

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **more: Any) -> float:
        return float(compute_score(solution_str, ground_truth))

    manager = NaiveRewardManager(None, Tokenizer(), reward)
    found = []
    for answer, gold in ANSWERS:
        ids = torch.tensor([list(map(ord, answer))])
        item = DataProto.from_dict(
            tensors={"responses": ids, "attention_mask": torch.ones_like(ids)},
            non_tensors={"data_source": ["math"], "reward_model": [{"ground_truth": gold}], "extra_info": [{}]},
        )
        assert isinstance(item.batch, TensorDict)
        found.append(manager.loop.run_until_complete(manager.run_single(item))["reward_score"])
    return found


def by_trl() -> list[float]:
    from trl.rewards import accuracy_reward

    completions = [[{"role": "assistant", "content": answer}] for answer, _ in ANSWERS]
    rewards: list[float] = accuracy_reward(completions, [f"${gold}$" for _, gold in ANSWERS])
    return rewards


def observe() -> dict[str, Any]:
    users = {} if "alone" in sys.argv else {"verl": by_verl, "trl": by_trl}
    found: dict[str, Any] = {
        name: {"main": function(), "thread": in_a_thread(function)}
        for name, function in {"math-verify": compared, **users}.items()
    }
    if users:
        found["reward loop"] = by_verl_s_reward_loop()
    return found


def main(observe: Callable[[], dict[str, Any]] = observe) -> None:
    parser = states.parser()
    parser.add_argument("alone", nargs="?")
    states.report(NAME, observe, parser.parse_args().out)
