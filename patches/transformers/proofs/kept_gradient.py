"""An optimizer whose steps keep the gradient, and the comparison of a gradient with a multiple of another."""

from __future__ import annotations

from typing import Any

import torch


def multiple(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The factor by which a gradient is the wanted one (`times`), and its relative distance from that (`beside`)."""
    one = torch.cat([found[name].double().flatten() for name in wanted])
    other = torch.cat([wanted[name].flatten() for name in wanted])
    times = float(one @ other / (other @ other))
    return {"times": times, "beside": float((one - times * other).norm() / (times * other).norm())}


class Kept(torch.optim.SGD):
    """Its steps keep the gradient instead."""

    found: list[torch.Tensor]

    def step(self, closure: Any = None) -> None:
        self.found = [each.grad.clone() for each in self.param_groups[0]["params"] if each.grad is not None]
