"""Learning rates that WarmupLR and related schedulers give three parameter groups: ``--out FOLDER``, on one rank.

Runs each schedule before apply() of deepspeed-group-learning-rates, after it, and after revert().
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime import lr_schedules

from rlhf_patches.proving import states

NAME = "deepspeed-group-learning-rates"
RATES, WARMUP, STEPS = (0.1, 0.004, 0.03), 4, 7
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("WarmupLR", {"warmup_type": "linear"}),
    "logarithmic": ("WarmupLR", {}),
    "from a minimum": ("WarmupLR", {"warmup_type": "linear", "warmup_min_lr": 0.001}),
    "one for all": ("WarmupLR", {"warmup_type": "linear", "warmup_max_lr": 0.02}),
    "a list": ("WarmupLR", {"warmup_type": "linear", "warmup_max_lr": [0.3, 0.2, 0.1]}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 10, "warmup_type": "linear"}),
}


def rates(schedule: str) -> list[list[float]]:
    """The learning rate of each group, at the start and after each step of the scheduler."""
    kind, options = SCHEDULES[schedule]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = getattr(lr_schedules, kind)(optimizer, warmup_num_steps=WARMUP, **options)
    found = []
    for _ in range(STEPS):
        scheduler.step()
        found.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == found[-1]
    return found


def main() -> None:
    states.report(NAME, lambda: {name: rates(name) for name in SCHEDULES}, states.parser().parse_args().out)
