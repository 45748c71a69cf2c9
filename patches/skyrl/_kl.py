"""The estimate of KL that is part of SkyRL's loss."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from .._released import written_in

_MODULE = "skyrl.backends.skyrl_train.utils.ppo_utils"


def with_gradient(estimate: Any) -> Any:
    """SkyRL's own ``compute_approx_kl`` without its decorator, ``torch.no_grad()``; another function as it is."""
    # known: the function that torch's decorators return
    if not isinstance(estimate, FunctionType) or written_in(estimate) != "torch.utils._contextlib":
        return estimate
    inner = vars(estimate).get("__wrapped__")
    return inner if isinstance(inner, FunctionType) and written_in(inner) == _MODULE else estimate
