"""Rehearsals of ms-swift's Megatron trainers, from their own set-up to their own training step: ``--out FOLDER``.

Real are ``wrap_model``, ``get_optimizer_and_scheduler``, ``setup_model_training`` and ``run_train_step``, with the
trainers' ``forward_step`` and loss, and megatron-core. Ours are the model, the rows, and the trainer's set-up, which
would load a model from disk.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import rehearsing, summed_gradients
from tests.patches.swift import null_ref_context_ranks
from tests.patches.swift.fp32_gradients_ranks import arguments
from tests.patches.swift.logits_ranks import IGNORED, VOCABULARY, megatron_model

MICRO_BATCHES, ROWS, LENGTH = 3, 2, 8
CASES = {
    "SFT": ("trainer:MegatronTrainer", None),
    "SFT that clears": ("trainer:MegatronTrainer", None),
    "DPO": ("dpo_trainer:MegatronDPOTrainer", "dpo"),
}


def trainer_of(case: str) -> Any:
    name, kind = CASES[case]
    module, _, name = name.partition(":")
    found = importlib.import_module(f"swift.megatron.trainers.{module}")
    ranks = torch.distributed.get_world_size()
    args = arguments(bf16=False, params_dtype=torch.float32, lr=1e-2, min_lr=0.0, train_iters=3)
    vars(args).update(start_weight_decay=0.1, end_weight_decay=0.1, seq_length=LENGTH, num_microbatches=MICRO_BATCHES)
    vars(args).update(micro_batch_size=ROWS, global_batch_size=MICRO_BATCHES * ROWS * ranks, data_parallel_size=ranks)
    vars(args).update(tuner_type="full", task_type="causal_lm", rlhf_type=kind, beta=0.1, loss_type="sigmoid")
    vars(args).update(is_multimodal=False, padding_free=False, ref_adapters=[])
    torch.manual_seed(1)
    model = megatron_model()
    model.get_input_tensor = lambda: None  # mcore-bridge's model has it; one stage gets none
    model.config.calculate_per_token_loss = args.calculate_per_token_loss = kind is None
    trainer: Any = object.__new__(getattr(found, name))
    trainer.args, trainer.config, trainer.unwrapped_models = args, model.config, [model]
    trainer.state = importlib.import_module("swift.megatron.trainers.utils").TrainerState(max_steps=3)
    trainer.callbacks, trainer.enable_routing_replay = [], False
    trainer.wrapped_models = importlib.import_module("swift.megatron.utils.megatron_lm_utils").wrap_model(args, [model])
    trainer.optimizer, trainer.opt_param_scheduler = trainer.get_optimizer_and_scheduler()
    if kind:
        trainer.dummy_dpo_trainer = found.DummyDPOTrainer(SimpleNamespace(**{**vars(args), "reference_free": False}))
        torch.manual_seed(2)
        trainer.ref_models = [megatron_model().requires_grad_(False).eval()]
    trainer.setup_model_training()
    if "clears" in case:
        own = trainer.forward_step

        def forward_step(iterator: Any, wrapped: Any) -> Any:
            wrapped.zero_grad_buffer()
            return own(iterator, wrapped)

        trainer.forward_step = forward_step
    return trainer


def rows() -> Any:
    """What the collator makes, of this rank; the first half of a micro-batch is chosen, the other rejected."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    above = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    while True:
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels = tokens.where(torch.rand(ROWS, LENGTH, generator=generator) < 0.6, IGNORED)
        positions = torch.arange(LENGTH).expand_as(tokens)
        yield {"input_ids": tokens, "labels": labels, "position_ids": positions, "attention_mask": above}


def rehearsed(case: str, out: Any) -> Any:
    """The results that the command reads."""
    path = out / f"results{os.environ['RANK']}.json"
    with summed_gradients.streams():
        trainer = trainer_of(case)
        with rehearsing.armed(path), contextlib.suppress(SystemExit):
            trainer.run_train_step(rows(), None)
    return rehearsing.results(path)


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    null_ref_context_ranks.load_megatron()
    torch.compiler.set_stance("force_eager")
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    found = {
        case: rehearsed(case, options.out / case)
        for case in options.cases
        if not (options.out / case).mkdir(exist_ok=True)
    }
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
