"""FSDP2 with efficient loading: each tensor of rank 0 becomes the parameter of the same name on the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Signature, Variant

_LOAD = "accelerate.utils.fsdp_utils:fsdp2_load_full_state_dict"


def by_name(full: Mapping[str, Any], sharded: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], Any]]:
    """The pairs that rank 0 iterates over, in the order in which the other ranks expect the tensors.

    If a name has no tensor these are accelerate's own pairs, by position: the other ranks are at the first broadcast
    already, so this function must not raise.

    Args:
        full: names and whole tensors, on rank 0.
        sharded: names and DTensors of the sharded model, the same on all ranks.
    """
    if not all(name in full for name in sharded):
        return zip(full.items(), sharded.values(), strict=False)
    return (((name, full[name]), one) for name, one in sharded.items())


PATCH = Patch(
    name="accelerate-fsdp2-load-by-position",
    summary="FSDP2's efficient loading sends each parameter by name, also if the state dict has other entries",
    harm="hang",
    bug="FSDP2's efficient loading sends parameters by position: rank 0 fails, the others wait forever",
    when="FSDP2 with cpu_ram_efficient_loading, and a state dict with more entries than parameters (QLoRA)",
    excluded_by=("fsdp_config.fsdp_version=1|absent", "fsdp_config.fsdp_cpu_ram_efficient_loading=false"),
    symptom="""\
With FSDP2, `cpu_ram_efficient_loading` (the default) and QLoRA, `accelerator.prepare` fails on rank 0 with
``AttributeError: `weight` is not an nn.Module``, and the other ranks wait in a broadcast until NCCL's timeout. The bug
affects any model whose state dict has more entries than parameters once it is sharded, as with bitsandbytes' 4-bit
weights (`weight.absmax` and others).""",
    cause="""\
On rank 0 `fsdp2_load_full_state_dict` iterates with `zip` over the state dicts of the whole and of the sharded model.
The other ranks iterate over that of the sharded model. bitsandbytes writes its entries only for weights that are not
sharded, so from the first such entry on rank 0 broadcasts tensors that the others do not expect.""",
    repair="""\
Rank 0 iterates over the sharded model's names like the other ranks, and takes the tensor of that name, as in 1.14.0.
If a name has no tensor, rank 0 does what accelerate does.""",
    references=("https://github.com/huggingface/accelerate/pull/3982",),
    variants=(
        Variant(
            Guard("accelerate", ">=1.6.0,<1.14.0"),
            (
                Rewrite(
                    target=_LOAD,
                    pattern="zip(full_sd.items(), $SHARDED.values())",
                    replacement="$BY_NAME(full_sd, $SHARDED)",
                    uses={"BY_NAME": f"{__name__}:{by_name.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest accelerate in use is 1.14",
    signatures=(Signature("AttributeError", "`weight` is not an nn.Module", specific=False),),
)
