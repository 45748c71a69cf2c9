"""What TRL says of packages that it can do without, on one rank: ``--out FOLDER``.

Before apply() of trl-optional-packages, after it, and after revert(): the packages of which it is wrong, by Python's
own search for them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from rlhf_patches.proving import states

NAME = "trl-optional-packages"
PACKAGES = (
    *("deepspeed", "diffusers", "fastapi", "jmespath", "joblib", "llm_blender", "math_verify", "mergekit", "pydantic"),
    *("requests", "rich", "unsloth", "uvicorn", "vllm", "vllm_ascend", "weave"),
)


def observe() -> dict[str, Any]:
    """The packages that the release asks for, and of these the ones that it takes for installed, or for missing."""
    from trl import import_utils

    asked = [name for name in PACKAGES if hasattr(import_utils, f"is_{name}_available")]
    there = {name: importlib.util.find_spec(name) is not None for name in asked}
    said = {name: bool(getattr(import_utils, f"is_{name}_available")()) for name in asked}
    return {
        "asked": asked,
        "said to be there": [name for name in asked if said[name] and not there[name]],
        "said to be missing": [name for name in asked if there[name] and not said[name]],
    }


def main() -> None:
    options = states.parser().parse_args()
    states.report(NAME, observe, options.out)
