"""Models that PEFT has wrapped."""

from __future__ import annotations

import sys
from typing import Any


def base_model(model: Any) -> Any:
    """The model in PEFT's own wrapper."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model
