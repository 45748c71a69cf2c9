"""TRL's GRPO on an engine of which something is wrong, or nothing, while it is watched: ``--out FOLDER``.

The engine is sleeping_engine.py's. Each case says what the log said and what the report has; and what it has trained,
for the case that is trained without the watch too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.trl import _watched_rollouts
from rlhf_patches.proving import states
from tests.harness import sleeping_engine, watched
from tests.patches.trl import vllm_sleep_weights_ranks as sleeping
from tests.patches.trl.watch_rollouts_cases import CASES

NAME = "trl-watch-rollouts"


class OneSeed(sleeping_engine.LLM):
    """Every request begins with the same seed."""

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        self.sampler.manual_seed(0)
        return super()._sampled(given, wanted)


class Flat(sleeping_engine.LLM):
    """Of each completion the first token."""

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        made = super()._sampled(given, wanted)
        return SimpleNamespace(token_ids=made.token_ids[:1], logprobs=made.logprobs[:1], text="")


class Twice(sleeping_engine.LLM):
    """Goes on for as many tokens again."""

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        return super()._sampled(given, sleeping_engine.SamplingParams(max_tokens=2 * wanted.max_tokens))


class Certain(sleeping_engine.LLM):
    """Of a policy that has become certain: always the same word, of probability 1."""

    token = 7

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        tokens = [self.token] * (1 if self.token == 1 else wanted.max_tokens)
        return SimpleNamespace(
            token_ids=tokens, logprobs=[{each: SimpleNamespace(logprob=0.0, rank=1)} for each in tokens], text=""
        )


class Ends(Certain):
    """Ends each completion at once."""

    token = 1


ENGINES = {"one seed": OneSeed, "flat": Flat, "too long": Twice, "certain": Certain, "ends": Ends}


CASES_OF_THE_ENGINE = dict(sleeping.CASES)


def observe(case: str, out: Path) -> dict[str, Any]:
    of, settings, patches, limits = CASES[case]
    return watched.observe(NAME, _watched_rollouts.FIGURES, lambda: trained(case, of, settings, out), patches, limits)


def trained(case: str, of: str, settings: dict[str, Any], out: Path) -> dict[str, Any]:
    plain = sleeping_engine.LLM
    sleeping_engine.LLM = ENGINES.get(case, plain)  # type: ignore[misc]
    sleeping.CASES[of] = {**CASES_OF_THE_ENGINE[of], **settings}
    try:
        sleeping.use_the_engine()
        found = sleeping.trained(of, out)
    finally:
        sleeping_engine.LLM = plain  # type: ignore[misc]
    del found["generations"], found["calls"]
    return found


def main() -> None:
    options = states.parser().parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    found = {case: observe(case, options.out) for case in CASES}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
