"""TRL's Online DPO on a server whose completions are known, while it is watched: ``--out FOLDER``."""

from __future__ import annotations

import json
import os
from typing import Any

from rlhf_patches.patches.trl import _watched_online_dpo
from rlhf_patches.proving import states
from tests.harness import watched
from tests.patches.trl import online_dpo_ranks as engine

NAME, REPAIR = "trl-online-dpo-watch-rollouts", "trl-online-dpo-server"
CASES = {
    "as released": ("server", (NAME,)),
    "repaired": ("server", (NAME, REPAIR)),
    "not watched": ("server", (REPAIR,)),
    "colocate": ("awake", (NAME,)),
}


def observe(case: str) -> dict[str, Any]:
    mode, patches = CASES[case]
    return watched.observe(NAME, _watched_online_dpo.FIGURES, lambda: trained(mode), patches)


def trained(mode: str) -> dict[str, Any]:
    trainer, rows = engine.made(mode)
    return engine.served(trainer, rows) if mode == "server" else {"trained": bool(trainer.train())}


def main() -> None:
    options = states.parser().parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    found = {case: observe(case) for case in CASES}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
