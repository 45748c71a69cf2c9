"""GRPO's trainer beside a transformers without the dictionary of warnings, on one rank: ``--out FOLDER``.

Before apply() of trl-warnings-issued, after it, and after revert(): the gradient, and the same from the formula, both
in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_patches.patches.trl.proofs import grpo_liger_tools_ranks as grpo
from rlhf_patches.proving import states

NAME = "trl-warnings-issued"


def trained(out: Path) -> dict[str, Any]:
    """The trainer's gradient, or what its constructor raised."""
    try:
        return {"error": grpo.trained("no tools, without Liger", out)["error"]}
    except AttributeError as error:
        return {"failed": str(error)}


def main() -> None:
    options = states.parser().parse_args()
    grpo.without_optional_packages()
    states.report(NAME, lambda: trained(options.out), options.out)
