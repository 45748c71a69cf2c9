"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def beside_another(self: Any, adapter_name: str) -> bool | None:
    """Of an adapter that is injected: whether another is trained where this one is not, or the other way round."""
    mode = self.peft_config[adapter_name].inference_mode
    if any(config.inference_mode != mode for config in self.peft_config.values()):
        return True
    return False if len(self.peft_config) == 1 else None  # parameters may have been frozen by hand
