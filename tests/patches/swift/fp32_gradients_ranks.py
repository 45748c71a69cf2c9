"""What gradients add up to in the buffers that ms-swift's Megatron trainers make.

``--out FOLDER`` on two gloo ranks, with a release of ms-swift on sys.path. Real are ms-swift's ``wrap_model``, its
arguments' defaults and what it makes of them, and megatron-core's DistributedDataParallel. Ours is the model, two
layers. The yardstick is the sum in float64 of what each micro-batch's gradients are.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import summed_gradients
from tests.patches.swift import null_ref_context_ranks

NAME = "swift-fp32-gradients"
CASES: dict[str, dict[str, Any]] = {
    "by default": {},
    "few": {"micro_batches": 4},
    "all-reduce": {"use_distributed_optimizer": False},
    "bfloat16 asked for": {"main_grads_dtype": "bf16"},
    "float16": {"bf16": False, "fp16": True, "micro_batches": 4},
    "float16, float32 asked for": {
        "bf16": False,
        "fp16": True,
        "accumulate_allreduce_grads_in_fp32": True,
        "micro_batches": 4,
    },
    "float32": {"bf16": False, "micro_batches": 4},
    "under the field's name": {"grad_reduce_in_fp32": False, "micro_batches": 4},
}


def arguments(**settings: Any) -> Any:
    """ms-swift's own, with its defaults, as far as its own code for mixed precision makes them."""
    found = importlib.import_module("swift.megatron.arguments.megatron_args").MegatronArguments
    args: Any = object.__new__(found)
    for field in dataclasses.fields(found):
        if field.default is not dataclasses.MISSING:
            setattr(args, field.name, field.default)
    # What its `__post_init__` takes from the model, or sets when it has initialized the ranks.
    vars(args).update({"bf16": True, "fp16": False, "use_cpu_initialization": True, "torch_dtype": None})
    args.overlap_param_gather_with_optimizer_step = args.data_parallel_random_init = False
    vars(args).update(settings)
    args._map_dtype()
    return args


def step(*, micro_batches: int = 64, **settings: Any) -> dict[str, Any]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = arguments(**settings)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, bf16=args.bf16, fp16=args.fp16)
    with summed_gradients.streams():
        wrap = importlib.import_module("swift.megatron.utils.megatron_lm_utils").wrap_model
        (model,) = wrap(args, [summed_gradients.Layers(config)])
    found = summed_gradients.added_up(model, micro_batches)
    return {**found, "asked for": bool(args.accumulate_allreduce_grads_in_fp32)}


def counted(**settings: Any) -> dict[str, Any]:
    """With whether the bug occurred: None where that is unknown."""
    before = states.counts(NAME)
    found = step(**settings)
    held, asked = (now - then for now, then in zip(states.counts(NAME), before, strict=True))
    return {**found, "occurred": bool(held) if asked else None}


def main() -> None:
    options = states.parser().parse_args()
    null_ref_context_ranks.load_megatron()
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    states.report_cases(NAME, lambda cases: {case: counted(**CASES[case]) for case in cases}, CASES, options.out)
