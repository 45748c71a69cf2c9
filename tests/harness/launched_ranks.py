"""What a training script does first, under a launcher: torch.distributed as the launcher's library starts it, and TRL.

Each rank writes what became of the patches. rlhf_patches comes in by the site hook, or with ``--apply``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
from pathlib import Path
from typing import Any

PATCH = "trl-chunked-nll-zero3"
#: Seconds after which a rank shows where each of its threads is, and ends: less than the tests wait for the launcher.
TOO_LONG = 240


def look_at_trl() -> dict[str, Any]:
    """The real function of real TRL, and what the report says of it."""
    from trl.trainer import sft_trainer

    return _report(PATCH, PATCH in sft_trainer._chunked_cross_entropy_loss.__code__.co_filename)


def look_at_deepspeed() -> dict[str, Any]:
    """The same of DeepSpeed, whose import takes a third of the time."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    names = DeepSpeedEngine._configure_optimizer.__code__.co_names
    return _report("deepspeed-empty-groups", "keep_for_schedulers" in names)


def _report(patch: str, ours: bool) -> dict[str, Any]:
    import rlhf_patches

    row = rlhf_patches.report()[patch]
    return {"status": row.status.value, "version": row.version, "ours": ours, "pid": os.getpid()}


def start(library: str) -> None:
    """Initialize the process group as this library does."""
    if library == "torch":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    elif library == "deepspeed":
        import deepspeed

        from rlhf_patches.patches.deepspeed.proofs.on_cpu import without_operator

        without_operator()
        deepspeed.init_distributed("gloo")
    else:
        from accelerate import PartialState

        PartialState(cpu=True, backend="gloo")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--library", choices=("torch", "deepspeed", "accelerate"), required=True)
    parser.add_argument("--look-at", choices=("trl", "deepspeed"), default="trl", help="whose function")
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("--disable-on", help="a rank where the patch is switched off")
    options, _ = parser.parse_known_args()  # DeepSpeed's launcher adds --local_rank
    faulthandler.dump_traceback_later(TOO_LONG, exit=True)
    rank = os.environ["RANK"]
    if options.disable_on == rank:
        os.environ["RLHF_PATCHES_DISABLE"] = PATCH
    if options.apply:
        import rlhf_patches

        rlhf_patches.apply()
    said: dict[str, Any] = {"rank": rank, "world": os.environ["WORLD_SIZE"], "error": None}
    try:
        start(options.library)
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
    if options.disable_on is None:
        said |= {"trl": look_at_trl, "deepspeed": look_at_deepspeed}[options.look_at]()
    (options.out / f"rank{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # torch's shutdown waits


if __name__ == "__main__":
    main()
