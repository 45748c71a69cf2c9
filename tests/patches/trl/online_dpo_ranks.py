"""Online DPO's trainer with vLLM's server, or its engine, in its place: ``--out FOLDER CASE...``.

The server answers each prompt with two completions that it has been given, so the gradient has a definition (that of
online_dpo_accumulation_ranks.py, in float64); the engine is sleeping_engine.py's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import datasets
import torch
import transformers

import rlhf_patches
from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.patches.trl.proofs import online_dpo_accumulation_ranks as given
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states
from tests.harness import sleeping_engine

SERVER, PADDING = "trl-online-dpo-server", "trl-online-dpo-server-padding"
SLEEP, TOGETHER = "trl-online-dpo-sleep-weights", "trl-online-dpo-tensor-parallel"
STATES = {
    "before": (),
    "server": (SERVER,),
    "padding": (PADDING,),
    "after": (SERVER, PADDING, SLEEP, TOGETHER),
    "reverted": (),
}
ONE_LENGTH = [row for row, prompt in enumerate(given.PROMPTS) if len(prompt) == 2]
CASES: dict[str, dict[str, Any]] = {
    "server": {"vllm_mode": "server"},
    "server, one length": {"vllm_mode": "server"},
    "sleep": {"vllm_enable_sleep_mode": True, "gradient_accumulation_steps": 2},
    "awake": {"gradient_accumulation_steps": 2},
    "together": {"vllm_tensor_parallel_size": 2},
}
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MODULES = ("trl.experimental.online_dpo.online_dpo_trainer", "trl.trainer.online_dpo_trainer")


class Server:
    """In place of TRL's client: what `generate` has been asked for, and its answer, a flat list of completions."""

    asked: ClassVar[list[list[str]]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    init_communicator = update_named_param = reset_prefix_cache = close_communicator = weight_update = _nothing

    def generate(self, prompts: list[str], n: int, **_: Any) -> dict[str, Any]:
        assert n == 2
        self.asked.append(prompts)
        rows = [given.ROW_OF[prompt] for prompt in prompts]
        completions = [each[row] for row in rows for each in (given.FIRST, given.SECOND)]
        return {"completion_ids": completions, "logprobs": [[0.0] * len(each) for each in completions]}


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """By what a completion says, wherever in the batch it stands."""
    first = [given.text(given.FIRST[given.ROW_OF[prompt]][:-1]) for prompt in prompts]
    pairs = zip(prompts, completions, first, strict=True)
    return [given.REWARDS[given.ROW_OF[prompt]] if said == right else 0.5 for prompt, said, right in pairs]


def module() -> Any:
    """Of this release, with places for vLLM's classes filled."""
    for name in MODULES:
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        found.is_vllm_available = lambda *_: True
        found.VLLMClient, found.LLM, found.SamplingParams = Server, sleeping_engine.LLM, sleeping_engine.SamplingParams
        found.StructuredOutputsParams = found.GuidedDecodingParams = None
        return found
    raise ModuleNotFoundError(MODULES[0])


def made(case: str) -> Any:
    found = module()
    folder = states.folder()
    small.model().save_pretrained(folder)
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = ONE_LENGTH if "one length" in case else range(len(given.PROMPTS))
    settings = {"vllm_mode": "colocate", **CASES[case]}
    settings["per_device_train_batch_size"] = len(rows) // RANKS // (1 if settings["vllm_mode"] == "server" else 4)
    config = vars(importlib.import_module(found.__name__.replace("_trainer", "_config")))["OnlineDPOConfig"]
    arguments = config(
        folder,
        use_vllm=True,
        num_train_epochs=1,
        beta=given.BETA,
        max_new_tokens=8,
        max_length=32,
        missing_eos_penalty=None,
        logging_steps=1,
        **{**small.STEPS, **settings},
    )
    optimizer = Kept(policy.parameters(), lr=given.RATE)
    with a_device():
        trainer = found.OnlineDPOTrainer(
            model=policy,
            ref_model=given.reference(),
            reward_funcs=reward,
            args=arguments,
            train_dataset=datasets.Dataset.from_list([{"prompt": given.text(given.PROMPTS[row])} for row in rows]),
            processing_class=small.tokenizer(),
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        )
    return trainer, list(rows)


@contextlib.contextmanager
def a_device() -> Iterator[None]:
    """While a trainer is made, which asks for the one that a server's client communicates from."""
    asked, cuda = torch.accelerator.current_accelerator, torch.cuda.current_device
    torch.cuda.current_device = lambda: 0  # until 0.26 it asks for this one
    torch.accelerator.current_accelerator = lambda *_, **__: SimpleNamespace(type="cpu")
    try:
        yield
    finally:
        torch.accelerator.current_accelerator, torch.cuda.current_device = asked, cuda


def served(trainer: Any, rows: list[int]) -> dict[str, Any]:
    """The gradient of a step against its definition."""
    Server.asked.clear()
    trainer.train()
    got = torch.cat([each.double().flatten() for each in trainer.optimizer.optimizer.found])
    right, loss = given.by_definition(rows)
    return {
        "asked": [len(each) for each in Server.asked],
        "error": float((got - right).norm() / right.norm()),
        "gradient": [float(value).hex() for value in got[:: max(1, len(got) // 40)]],
        "logged": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "loss": loss,
    }


def colocated(trainer: Any) -> dict[str, Any]:
    """Of each generation how far the engine's weights are from the policy's, and whose prompts it was given.

    ``own`` says that what the trainer was handed has this rank's prompts, each with completions of its own.
    """
    engine, found, own = trainer.llm, [], []
    generate, vllm = engine.generate, trainer._generate_vllm

    def recorded(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        weights = engine.distance(trainer.accelerator.unwrap_model(trainer.model))
        outputs = generate(prompts, *args, **kwargs)
        said = {tuple(each.prompt_token_ids): [one.token_ids for one in each.outputs] for each in outputs}
        found.append({"weights": weights, "prompts": list(prompts)})
        engine.said = said
        return outputs

    def handed(prompts: list[str], *args: Any) -> Any:
        outputs = vllm(prompts, *args)
        ids, mask, completions = outputs[:3]
        asked = [tuple(sleeping_engine.tokens_of(prompt)) for prompt in prompts]
        got = [tuple(row[kept.bool()].tolist()) for row, kept in zip(ids, mask, strict=True)]
        expected = [engine.said[prompt][at] for at in range(2) for prompt in asked]
        starts = zip(completions.tolist(), expected, strict=True)
        own.append(got == asked * 2 and all(row[: len(said)] == said for row, said in starts))
        return outputs

    # The function that TRL has does the work, so it counts as TRL's.
    named = {**handed.__globals__, "__name__": type(trainer).__module__}
    engine.generate = recorded
    trainer._generate_vllm = FunctionType(handed.__code__, named, closure=handed.__closure__)
    trainer.train()
    weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    return {
        "generations": found,
        "own": own,
        "calls": engine.calls,
        "trained": [float(value).hex() for value in weights[:: max(1, len(weights) // 40)]],
    }


def trained(case: str) -> dict[str, Any]:
    torch.manual_seed(1)
    trainer, rows = made(case)
    if CASES[case].get("vllm_mode") != "server":
        return colocated(trainer)
    try:
        return served(trainer, rows)
    except (ValueError, RuntimeError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    report: dict[str, Any] = {}
    for state, names in STATES.items():
        cases = [case for case in options.cases if "server" in case or state in ("before", "after")]
        if not cases:
            continue
        module()
        rows: Any = rlhf_patches.apply(only=names) if names else {}
        for name in names:
            report[name] = [rows[name].version, rows[name].status.value]
        report[state] = {case: trained(case) for case in cases}
        reached = {name: rlhf_patches.report()[name].reached for name in names}
        report.setdefault("reached", {})[state] = {name: told.to_dict() for name, told in reached.items() if told}
        rlhf_patches.revert()
    (Path(options.out) / f"rank{RANK}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
