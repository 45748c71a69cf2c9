"""Generations of TRL's trainers on a colocated engine that sleeps, each against the policy: ``--out FOLDER CASE...``.

The engine is sleeping_engine.py's. With each generation: the largest difference of its weights from the policy's, and
of its log-probabilities from those of the policy itself, in float64.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from datasets import Dataset

from rlhf_patches.patches.trl import _engine_weights
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states
from tests.harness import sleeping_engine

NAME = "trl-vllm-sleep-weights"
MODULES = ("trl.generation.vllm_generation", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
CASES: dict[str, dict[str, Any]] = {
    "steps": {"max_steps": 3},
    "micro-batches": {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2, "max_steps": 2},
    "tools": {"max_steps": 2},
    "rollouts": {"max_steps": 2},
    "own rollouts": {"max_steps": 2},
    "RLOO": {"max_steps": 2},
    "RLOO micro-batches": {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 2},
    "awake": {"max_steps": 2, "vllm_enable_sleep_mode": False},
}


def some_words(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def use_the_engine() -> None:
    """In the modules that have a place for vLLM's classes."""
    vars(builtins)["SamplingParams"] = sleeping_engine.SamplingParams  # an annotation of openenv's until 0.29
    for name in (*MODULES, "trl.experimental.openenv.utils"):
        try:
            module: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "is_vllm_available"):
            module.is_vllm_available = lambda *_: True
            module.LLM, module.SamplingParams = sleeping_engine.LLM, sleeping_engine.SamplingParams
            module.vllm = SimpleNamespace(__version__="0.12.0")
            module.GuidedDecodingParams = module.StructuredOutputsParams = None


def turn(trainer: Any, loop: Any) -> Any:
    """In place of the loop of tools: the same prompts once more, as after a call. What it returns is the release's."""

    def again(prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, *_: Any) -> Any:
        given = prompts if "prompts" in trainer._generate_single_turn.__code__.co_varnames[:2] else prompt_ids
        trainer._generate_single_turn(*([given] if given is prompts else [given, None, {}]))
        mask = [[1] * len(each) for each in completion_ids]
        images = [None] * len(prompts)
        return (mask, completions, completion_ids, logprobs, 1, 0, images)[: 7 if "images" in loop else 6]

    return again


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A turn, and another one whose completions count."""
    utils = importlib.import_module("trl.experimental.openenv.utils")
    utils.generate_rollout_completions(trainer, prompts)
    found = utils.generate_rollout_completions(trainer, prompts)
    return {name: [each[name] for each in found] for name in ("prompt_ids", "completion_ids", "logprobs")}


ALONE: list[bool] = []
"""Of each generation that a user's own function asks the engine for, whether its rank is known to be on its own."""


def own_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same, of the engine itself: nothing keeps other ranks from asking it once, or three times."""
    given = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    for _ in range(2):
        ALONE.append(trainer.vllm_generation in _engine_weights._ON_ITS_OWN)
        prompt_ids, completion_ids, logprobs, _ = trainer.vllm_generation.generate(given, None, 1)
    first = [[each[0] for each in sequence] for sequence in logprobs]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": first}


def made(case: str, out: Path) -> Any:
    folder = tempfile.mkdtemp(dir=out)
    small.model().save_pretrained(folder)
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    kind = "RLOO" if case.startswith("RLOO") else "GRPO"
    more: dict[str, Any] = {}
    if case == "evaluated":
        more["eval_dataset"] = Dataset.from_list([{"prompt": prompt} for prompt in small.PROMPTS[:2]])
    if case == "rollouts":
        more["rollout_func"] = rollout
    if case == "own rollouts":
        more["rollout_func"] = own_rollout
    return small.rollouts(
        kind,
        Path(folder),
        [some_words],
        policy=policy,
        more=more,
        **{
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": True,
            "learning_rate": 0.05,
            "temperature": 1.0,
            **CASES[case],
        },
    )


class Generations:
    """What each generation of an engine has come from."""

    def __init__(self, engine: Any, policy: Any) -> None:
        self.found: list[dict[str, float]] = []
        generate = engine.generate

        def recorded(*args: Any, **kwargs: Any) -> Any:
            weights = engine.distance(policy)
            outputs = generate(*args, **kwargs)
            errors = []
            for output in outputs:
                (completion,) = output.outputs
                exact = sleeping_engine.logprobs(policy, output.prompt_token_ids, completion.token_ids)
                said = [next(iter(each.values())).logprob for each in completion.logprobs]
                errors.append((torch.tensor(said, dtype=torch.float64) - exact).abs().max())
            self.found.append({"weights": weights, "logprobs": float(torch.stack(errors).max())})
            return outputs

        engine.generate = recorded


def trained(case: str, out: Path) -> dict[str, Any]:
    trainer = made(case, out)
    engine = trainer.vllm_generation.llm if hasattr(trainer, "vllm_generation") else trainer.llm
    generations = Generations(engine, trainer.model)
    if case == "tools":
        trainer.tools = [some_words]
        trainer._tool_call_loop = turn(trainer, inspect.getsource(type(trainer)._generate))
    failed = None
    ALONE.clear()
    try:
        trainer.train()
    except (RuntimeError, ValueError) as error:  # of tokens whose weights are lost
        failed = f"{type(error).__name__}: {error}"
    weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    return {
        "generations": generations.found,
        "calls": engine.calls,
        "alone": list(ALONE),
        "differences": [
            each["sampling/sampling_logp_difference/mean"]
            for each in trainer.state.log_history
            if "sampling/sampling_logp_difference/mean" in each
        ],
        "trained": [float(value).hex() for value in weights[:: max(1, len(weights) // 40)]],
        "failed": failed,
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    use_the_engine()
    observed = iter([options.cases, options.cases, options.cases[:1]])  # reverted, the first tells it
    states.report(NAME, lambda: {case: trained(case, options.out) for case in next(observed)}, options.out)


if __name__ == "__main__":
    main()
