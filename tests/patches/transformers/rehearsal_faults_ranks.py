"""Runs with a fault of a user's, whose step, rows, neighbors or checkpoint a rehearsal checks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers

from rlhf_patches.proving import states
from rlhf_patches.rehearsal.relation import Relation
from tests.patches.transformers import rehearsal_ranks as runs

Use = Callable[[Any], None]


class Before(transformers.TrainerCallback):
    """Does something to the model's gradients before the optimizer's step."""

    def __init__(self, does: Callable[[Any], Any]) -> None:
        self.does = does

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.does(model)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def on_one_rank(model: Any) -> None:
    if os.environ.get("RANK") == "1":
        clip(model)


def without_head(model: Any) -> None:
    model.lm_head.weight.grad = None


def before(does: Callable[[Any], Any], most: float = 0.0, **settings: Any) -> Callable[[Use], None]:
    """A Llama whose gradients are changed before the step."""

    def build(use: Use) -> None:
        def called_back(trainer: Any) -> None:
            trainer.args.max_grad_norm = most
            trainer.add_callback(Before(does))
            use(trainer)

        runs.build("transformers/llama", called_back, **settings)

    return build


def infinite(model: Any) -> None:
    model.lm_head.weight.grad.fill_(float("inf"))


def with_scaler(scale: float, fused: bool = True, does: Callable[[Any], Any] = lambda _: None) -> Callable[[Use], None]:
    """Float16 with a gradient scaler, which accelerate leaves out on a CPU."""

    def build(use: Use) -> None:
        def scaled(trainer: Any) -> None:
            trainer.args.max_grad_norm = 0.1
            trainer.args.optim = "adamw_torch_fused" if fused else "adamw_torch"
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            trainer.accelerator.state._mixed_precision = "fp16"  # clipping asks for it
            trainer.accelerator.native_amp = True
            unscale = trainer.accelerator.unscale_gradients
            trainer.accelerator.unscale_gradients = lambda *given: (does(trainer.model), unscale(*given))
            use(trainer)
            assert not trainer.accelerator.scaler._per_optimizer_states

        runs.build("transformers/llama", scaled)

    return build


CASES: dict[str, Callable[[Use], None]] = {
    "clipped": before(lambda _: None, most=0.1),
    "clipped by hand": before(clip),
    "cleared": before(lambda model: model.zero_grad(), most=0.1),
    "head cleared": before(without_head),
    "on one rank": before(on_one_rank, ranks=2),
    "scaled": with_scaler(256.0),
    "scaled, not fused": with_scaler(256.0, fused=False),
    "skipped": with_scaler(3e38),
    "infinite": with_scaler(256.0, does=infinite),
    "infinite, not fused": with_scaler(256.0, fused=False, does=infinite),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", choices=[*CASES])
    options = parser.parse_args()
    os.chdir(options.out)
    rank = os.environ.get("RANK", "0")
    runs.of_this_process()
    found: dict[str, Any] = {}
    for case in options.cases:
        relations: list[Relation] = []
        CASES[case](lambda trainer, into=relations: into.extend(runs.rehearsed(trainer)))  # type: ignore[misc]
        found[case] = {each.name: each.as_json() for each in relations}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
