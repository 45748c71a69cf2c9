"""What the patches did, beside the losses: `Report.to_dict` and `Report.to_flat_dict` for experiment trackers.

Copy what you need; neither tracker is a dependency of rlhf_patches. Call it on rank 0, when the frameworks are imported
(before that, patches are ``pending``), and again at the end if you like: a patch that other code has undone shows then.

    python examples/experiment_trackers.py mlflow     # or wandb, with WANDB_MODE=offline if you have no account
"""

from __future__ import annotations

import sys
from typing import Any

import rlhf_patches
from rlhf_patches import Report


def log_to_wandb(run: Any, report: Report) -> None:
    """Put the report into a Weights & Biases run, ``wandb.init()``'s result.

    The whole of it under ``config``, where runs are compared; each patch's status as a column of the table of runs.
    A resumed run has it already, with other values perhaps: hence ``allow_val_change``.
    """
    run.config.update({"rlhf_patches": report.to_dict()}, allow_val_change=True)
    run.summary.update(report.to_flat_dict())


def log_to_mlflow(mlflow: Any, report: Report) -> None:
    """Put the report into the active run of MLflow, given as the module, or as anything with its functions.

    The whole of it as an artifact; each patch's status as a tag, because a parameter of MLflow can never be changed,
    and ``pending`` may become ``applied``. Versions do not change, so they are parameters, where runs are compared.
    """
    mlflow.log_dict(report.to_dict(), "rlhf_patches.json")
    tags = list(report.to_flat_dict().items())
    for first in range(0, len(tags), 100):  # MLflow takes no more at once
        mlflow.set_tags(dict(tags[first : first + 100]))
    versions = {row.distribution: row.version for row in report if row.version is not None}
    if versions:
        mlflow.log_params({f"rlhf_patches/version/{name}": version for name, version in versions.items()})


def main() -> None:
    """Log this process's report to the tracker named on the command line."""
    report = rlhf_patches.apply()
    if sys.argv[1:] == ["wandb"]:
        import wandb

        with wandb.init(project="rlhf-patches-example") as run:
            log_to_wandb(run, report)
    elif sys.argv[1:] == ["mlflow"]:
        import mlflow

        with mlflow.start_run():
            log_to_mlflow(mlflow, report)
    else:
        sys.exit("expected wandb or mlflow")


if __name__ == "__main__":
    main()
