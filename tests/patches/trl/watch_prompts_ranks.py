"""TRL's own tool loop, on tool_loop.py's server, while `trl-watch-rollouts` looks at prompts: ``--out FOLDER``."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from rlhf_patches.patches.trl import _watched_rollouts
from rlhf_patches.patches.trl.proofs import tool_loop
from rlhf_patches.proving import states
from tests.harness import watched

NAME = "trl-watch-rollouts"
CONVERSATIONS = ("first w1", "both w2", "never w3", "twice w4")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "other turns": ((NAME,), CONVERSATIONS),
    "repaired": ((NAME, "trl-grpo-tool-turns"), CONVERSATIONS),
    "not watched": (("trl-grpo-tool-turns",), CONVERSATIONS),
    "no call": ((NAME,), ("never w1", "never w2")),
}


def main() -> None:
    options = states.parser().parse_args()
    tool_loop.install()
    trainer = tool_loop.trainer(options.out)

    def observe(patches: tuple[str, ...], prompts: tuple[str, ...]) -> dict[str, Any]:
        def generated() -> dict[str, Any]:
            return {"turns": tool_loop.turns(tool_loop.generated(trainer, prompts))}

        torch.manual_seed(0)
        return watched.observe(NAME, _watched_rollouts.FIGURES, generated, patches)

    found = {case: observe(*given) for case, given in CASES.items()}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
