"""PEFT: a DoRA adapter that is merged after another adapter gets the norm of the merged weight."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_VARIANTS = "peft.tuners.lora.variants"
_TARGETS = tuple(
    f"{_VARIANTS}:{variant}.{method}"
    for variant in ("DoraLinearVariant", "DoraEmbeddingVariant", "_DoraConvNdVariant")
    for method in ("merge_safe", "merge_unsafe")
)

PATCH = Patch(
    name="peft-dora-second-merge",
    summary="several adapters of which one is DoRA compute the same when merged as when not",
    harm="wrong weights",
    bug="a DoRA adapter that is merged after another adapter gets wrong factors, so the merged model is wrong",
    when="use_dora, and two or more adapters that are merged one after the other",
    excluded_by=("use_dora=false|absent", "use_peft=false|absent"),
    symptom="""\
Two adapters are active, and the second uses DoRA. `merge_and_unload()`, `merge_adapter()` or merging one after the
other gives a model with other outputs than before: 18 percent off in a layer of 16 by 16 here. No error. One adapter is
merged correctly, and so are adapters without DoRA.""",
    cause="""\
DoRA divides by the column norms of the base weight plus the adapter's product. In `forward` that is the base weight;
`merge` takes the weight into which the earlier adapters are merged already.""",
    repair="""\
For the norm, the patch computes the base weight from the present one by subtracting the merged adapters, last one
first, as `unmerge` does. The merged model then computes what `forward` does in evaluation mode, as in 0.21.0, and
`unmerge` restores the base weights. Linear layers (also `Conv1D`), embeddings and convolutions are repaired.

For the first adapter nothing changes, bit for bit, and for LoRA without DoRA neither. If an adapter of another kind
(aLoRA, MiCA, your own variant) was merged before, or the merged adapter was deleted, the norm stays as released. So it
does where a magnitude of 0 has removed a part of the base weight.

Not repaired: PEFT before 0.16.0, and quantized layers (bitsandbytes), whose code is their own.""",
    references=("https://github.com/huggingface/peft/issues/3608",),
    variants=(
        Variant(
            Guard("peft", ">=0.16.0,<0.21.0"),
            tuple(
                Rewrite(
                    target=target,
                    pattern="$LAYER.get_weight_norm(orig_weight, $PRODUCT, scaling=1).detach()",
                    replacement=(
                        "$LAYER.get_weight_norm($BASE(module, active_adapter, orig_weight), $PRODUCT, scaling=1)"
                        ".detach()"
                    ),
                    uses={"BASE": f"{__package__}._merged_dora:base_of"},
                )
                for target in _TARGETS
            ),
        ),
    ),
    obsolete_when="when the oldest PEFT in use is 0.21.0",
    changes_numbers="""\
A model into which several adapters were merged, a DoRA adapter not as the first, is not the one that was trained or
evaluated before. Merge the adapters again.""",
    conditions=tuple(Condition(target) for target in _TARGETS),
)
