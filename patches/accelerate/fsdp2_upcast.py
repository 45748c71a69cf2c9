"""FSDP2 with mixed precision: trainable parameters are float32, as accelerate's warning states."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_PREPARE = "accelerate.utils.fsdp_utils:fsdp2_prepare_model"


def upcast(accelerator: Any, model: Any) -> None:
    """Convert trainable parameters to float32, in place, if mixed precision computes in another type anyway.

    Call it before ``fully_shard``: afterwards a parameter cannot change its type. Each parameter keeps its identity,
    so tied ones stay tied. A model with 4-bit parameters is not changed, as in accelerate 1.14.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: a ``torch.nn.Module`` that is not sharded yet.
    """
    named = list(model.named_parameters())
    if accelerator.mixed_precision == "no" or has_4_bits(named):
        return
    cast = low_precision(named)
    for name, one in named:
        if name in cast:
            one.data = one.data.float()  # writes: this is the repair
    if cast and accelerator.is_main_process:
        warnings.warn(
            f"FSDP2 trains {len(cast)} low-precision parameters in float32, since mixed_precision is "
            f"{accelerator.mixed_precision!r}, and checkpoints contain them in float32: {cast}",
            stacklevel=2,
        )


def low_precision(named: Sequence[tuple[str, Any]]) -> list[str]:
    """The names of trainable parameters in less than 32 bits."""
    return [name for name, one in named if one.requires_grad and one.is_floating_point() and one.element_size() < 4]


def has_4_bits(named: Sequence[tuple[str, Any]]) -> bool:
    """Whether one of a model's parameters has 4 bits."""
    # known: accelerate 1.14 checks this name; if no parameter has it, `upcast` casts the same ones as that release
    return any(type(one).__name__ == "Params4bit" for _, one in named)


PATCH = Patch(
    name="accelerate-fsdp2-upcast",
    summary="FSDP2 with mixed precision trains float32 parameters, as its warning states",
    harm="wrong weights",
    bug="FSDP2 trains bfloat16 parameters although it warns that they are float32, and rounds small updates away",
    when="FSDP2 with mixed precision, and a model loaded in bfloat16 or float16",
    excluded_by=("fsdp_config.fsdp_version=1|absent",),
    symptom="""\
accelerate 1.13.0, FSDP2, `mixed_precision: bf16` (or fp16) and a model loaded in bfloat16: accelerate warns that low
precision parameters are upcast to fp32, but the parameters stay bfloat16, and so does the optimizer's state. Updates
smaller than about 1/256 of a parameter are rounded away: at the learning rates of RLHF the model hardly changes. No
error.""",
    cause="""\
`fsdp2_prepare_model` iterates over the parameters after `fully_shard` and assigns `param = param.to(torch.float32)`.
This rebinds the loop's variable, not the model's parameter. 1.12.0 called `model.to(torch.float32)`.""",
    repair="""\
The patch casts parameters that require a gradient before the model is sharded, as in 1.14.0, and before its state is
kept for `cpu_ram_efficient_loading`. Frozen and float64 parameters, and a model with 4-bit parameters, keep their
type. The loop after `fully_shard` then has nothing to cast, so the patch logs the warning. Parameters, gradients and
the optimizer's state take as much memory as in 1.12.0 and 1.14.0: twice that of bfloat16.

Modules in `ignored_modules` are cast too if they are trainable, as in 1.15.0. FSDP2 does not cast their inputs, so such
a module raises if it gets bfloat16. Freeze it before `prepare`, or cast its inputs to float32 in its forward.""",
    changes_numbers="""\
accelerate 1.13.0 trained bfloat16 parameters while every other release trains float32: most updates of a small
learning rate were lost. With the patch such a run learns more from the same number of steps, and needs twice the
memory for its trainable parameters. Reduce a learning rate that was raised to compensate. A checkpoint has lost only
those updates; you can continue to train it.""",
    references=(
        "https://github.com/huggingface/accelerate/issues/3979",
        "https://github.com/huggingface/accelerate/pull/3985",
    ),
    variants=(
        Variant(
            Guard("accelerate", "==1.13.0"),
            (
                Rewrite(
                    target=_PREPARE,
                    pattern="original_sd = model.state_dict()",
                    replacement="$UPCAST(accelerator, model); original_sd = model.state_dict()",
                    alongside=("param = param.to(torch.float32)", "fully_shard(model, **fsdp2_kwargs)"),
                    uses={"UPCAST": f"{__name__}:{upcast.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when accelerate 1.13.0 is no longer in use",
    conditions=(Condition(_PREPARE, f"{__package__}._conditions:keeps_low_precision"),),
)
