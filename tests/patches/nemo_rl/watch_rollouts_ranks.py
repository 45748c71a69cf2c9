"""NeMo-RL's own masking and logger of one tag over some steps, watched and not: ``--out FOLDER`` on one rank.

NeMo-RL's files are on sys.path, without those that need a cluster. The policy and its engine are two_policies.py's; a
step hands over what `grpo_train` does, in its order.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import typing
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions
from pydantic_core import core_schema

from rlhf_patches.patches.nemo_rl import _watched_rollouts
from tests.harness import slime_clone, watched
from tests.harness.two_policies import Trained
from tests.patches.nemo_rl.watch_rollouts_cases import CASES

slime_clone.install("nemo_rl", "torchdata", "mlflow", "swanlab", "wandb", "prometheus_client", "matplotlib")
# Its settings are classes of pydantic, with fields of classes that are names here; and it wants Python 3.12 for that.
typing.TypedDict = typing_extensions.TypedDict
slime_clone._Anything.__get_pydantic_core_schema__ = lambda *_: core_schema.any_schema()  # type: ignore[attr-defined]
vars(importlib.import_module("matplotlib"))["pyplot"] = SimpleNamespace(Figure=object)

NAME = "nemo-rl-watch-rollouts"
STEPS, ROWS, LENGTH = 3, 32, 20


def run(case: dict[str, Any]) -> dict[str, Any]:
    grpo: Any = importlib.import_module("nemo_rl.algorithms.grpo")
    logger_class: Any = importlib.import_module("nemo_rl.utils.logger").Logger
    logger = object.__new__(logger_class)
    logger.gpu_monitor = None
    kept: list[Any] = []
    logger.loggers = [type("Kept", (), {"log_metrics": lambda self, metrics, *rest: kept.append((metrics, rest))})()]
    trained = Trained()
    differences: list[float] = []
    for step in range(1, STEPS + 1):
        tokens, sampled = trained.sample(ROWS, LENGTH)
        nothing = torch.zeros(ROWS, 1)
        mask = torch.ones(ROWS, LENGTH)
        mask[:, LENGTH // 2 :] = torch.arange(ROWS)[:, None] % 2  # padding
        data = {
            "prev_logprobs": torch.cat([nothing, trained.log_probabilities(tokens)], 1),
            "generation_logprobs": torch.cat([nothing, sampled * mask], 1),
            "token_mask": torch.cat([nothing, mask], 1),
            "sample_mask": torch.ones(ROWS),
        }
        apart = (data["prev_logprobs"] - data["generation_logprobs"]).double().abs()[:, 1:]
        differences.append((apart * mask).sum().item() / mask.sum().item())
        data.pop(case.get("takes away", ""), None)
        metrics = {"loss": 0.5, **case.get("of a step", {})}
        with contextlib.suppress(KeyError):
            made = grpo.compute_and_apply_seq_logprob_error_masking(
                train_data=data, rewards=torch.ones(ROWS), seq_logprob_error_threshold=case.get("threshold")
            )
            metrics |= made if isinstance(made, dict) else {"max_seq_mult_prob_error": made[0]}
        logger.log_metrics({"some": 1.0}, step, prefix="validation")
        logger.log_metrics(metrics, step, prefix=case.get("prefix", "train"))
        kept.append({name: tensor.tolist() for name, tensor in data.items()})
        trained.update()
        if case.get("refit", True):
            trained.refit()
    return {"kept": json.loads(json.dumps(kept)), "differences": differences}


def main() -> None:
    watched.report(NAME, _watched_rollouts.FIGURES, run, CASES)


if __name__ == "__main__":
    main()
