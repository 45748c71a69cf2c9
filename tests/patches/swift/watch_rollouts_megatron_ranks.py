"""ms-swift's Megatron GRPO while it is watched, with a policy that its engine follows, or does not: ``--out FOLDER``.

Real are ``loss_func``, which makes the metrics of a micro-batch, ``_aggregated_metrics``, and ``on_log``. Ours are the
log-probabilities, of two_policies.py, and the trainer's set-up.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.swift import _watched_rollouts
from rlhf_patches.proving import states
from tests.harness import two_policies, watched
from tests.patches.swift.logits_ranks import start
from tests.patches.swift.megatron_grpo_mask_ranks import trainer_of
from tests.patches.swift.watch_rollouts_ranks import rollout_settings

NAME = "swift-watch-rollouts"
STEPS, MICRO_BATCHES, ROWS, TOKENS = 3, 2, 4, 16


def make_trainer() -> Any:
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=1, num_moe_experts=None), training=True)
    trainer = trainer_of(model, "grpo", packed=False, mode=None)
    trainer.log_rollout_offpolicy_metrics, trainer.config, trainer.callbacks = True, model.config, []
    trainer.advantage_reweight, trainer.sdar_loss_coef, trainer.beta = None, 0.0, 0.0
    trainer._has_teacher, trainer._flush_log_completions = False, lambda: None
    vars(trainer.args).update(rollout_settings(dsa_indexer_loss_coeff=None))
    rollouts = importlib.import_module("swift.megatron.trainers.rollout_mixin")
    trainer.request_config = rollouts.RequestConfig(temperature=0.9, top_p=1.0, top_k=-1, repetition_penalty=1.0)
    trainer.async_generate = trainer.enable_server_multi_turn = False
    trainer.multi_turn_scheduler = None
    trainer.state = SimpleNamespace(iteration=0)
    return trainer


def trained(lost: bool, prefix: str = "") -> dict[str, Any]:
    batch_class = importlib.import_module("swift.rl_core.data").GRPOBatch
    trainer, policies = make_trainer(), two_policies.Trained()
    found: dict[str, Any] = {"logged": [], "exact": []}
    for step in range(STEPS):
        total: dict[str, Any] = {}
        exact = []
        for _ in range(MICRO_BATCHES):
            tokens, known = policies.sample(ROWS, TOKENS)
            own = policies.log_probabilities(tokens)
            mask = torch.ones_like(known, dtype=torch.bool)
            batch = batch_class(
                completion_mask=mask,
                truncated_mask=torch.zeros(ROWS, dtype=torch.bool),
                seq_lengths=torch.full((ROWS,), TOKENS),
                old_per_token_logps=own,
                rollout_per_token_logps=known,
                advantages=torch.ones(ROWS, TOKENS),
            )
            trainer.micro_batch_size = ROWS
            _, metrics = trainer.loss_func(own.clone().requires_grad_(), {"grpo_batch": batch})
            trainer._aggregated_metrics([metrics], total)
            exact.append((own.double() - known.double()).abs().mean().item())
        trainer.state.iteration = step + 1
        trainer.on_log(total, prefix) if prefix else trainer.on_log(logs=total)
        found["logged"].append(total)
        found["exact"].append(sum(exact) / len(exact))
        policies.update()
        if not lost:
            policies.refit()
    return found


CASES = {"lost updates": (True, ""), "right": (False, ""), "evaluated": (True, "eval_")}


def main() -> None:
    out = states.parser().parse_args().out
    start(context=1)
    found: dict[str, Any] = {
        case: watched.observe(NAME, _watched_rollouts.FIGURES, functools.partial(trained, *of))
        for case, of in CASES.items()
    }
    found["not watched"] = watched.observe(NAME, _watched_rollouts.FIGURES, lambda: trained(*CASES["right"]), ())
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
