"""transformers: reentrant gradient checkpointing loses the gradient of keys and values that later layers share."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "transformers.models.{}.modeling_{}:{}TextDecoderLayer.forward"
_GEMMA_3N = _TARGET.format("gemma3n", "gemma3n", "Gemma3n")
_GEMMA_4 = _TARGET.format("gemma4", "gemma4", "Gemma4")
_GEMMA_4_UNIFIED = _TARGET.format("gemma4_unified", "gemma4_unified", "Gemma4Unified")


def _kept(*targets: str) -> tuple[Rewrite, ...]:
    """The attention that the layer calls with the shared states."""
    return tuple(
        Rewrite(
            target=target,
            pattern="self.self_attn",
            replacement="$ATTENTION(self, shared_kv_states)",
            inside="self.self_attn($$$)",
            alongside=("self.self_attn($$$, shared_kv_states=shared_kv_states, $$$)",),
            uses={"ATTENTION": f"{__package__}._shared_states:attention_of"},
        )
        for target in targets
    )


PATCH = Patch(
    name="transformers-shared-kv-gradient",
    summary="keys and values that layers share get their whole gradient under reentrant checkpointing",
    harm="wrong gradient",
    bug="keys and values get no gradient from the layers that share them",
    when="Gemma 3n, Gemma 4 E2B or E4B; gradient checkpointing with use_reentrant=True",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral",),
    symptom="""\
Gemma 3n or Gemma 4 (E2B, E4B) is trained with gradient checkpointing and `use_reentrant=True`. The last layers
(`num_kv_shared_layers`) have no keys and values of their own and use those of two earlier layers. These keys and values
get a gradient only from the attention of the two layers themselves. In tiny models the gradient of `k_proj`, `v_proj`
and norms there is off by 60 to 70 percent, and that of all weights before them is off, too; with LoRA by 40 percent. No
error; a step's loss is right.

transformers' default is `use_reentrant=False`. TRL sets True for PEFT with ZeRO-3. ms-swift sets True unless several
ranks train without DeepSpeed and FSDP.""",
    cause="""\
A layer stores its keys and values in the dictionary `shared_kv_states`. Reentrant checkpointing runs the layer without
a graph first, so the later layers read keys and values that have none. Only a layer's positional arguments and its
result have gradients there, and the dictionary is neither.""",
    repair="""\
The patch stores keys and values that collect the gradients of the later layers. The layer that computed them runs again
in the backward pass, after all later layers, and the patch adds the collected gradients to its own. The gradient is
then that without checkpointing. Checkpointing stays reentrant, as ZeRO-3 needs it, and memory stays the same but for
one copy of the attention's output while such a layer runs again.

Only layers that store shared keys and values change, and only under reentrant checkpointing in training. Other
layers and models, training without checkpointing or with `use_reentrant=False`, evaluation and generation stay bit for
bit what they are.

Not repaired: your own attention in place of the release's; layers that torch's own `checkpoint_wrapper` wraps with
`CheckpointImpl.REENTRANT`; a model that accelerate distributes over several devices (`device_map`); a call with
`return_shared_kv_states=True`, which returns the dictionary.""",
    references=("https://docs.pytorch.org/docs/stable/checkpoint.html",),
    variants=(
        Variant(Guard("transformers", ">=5.5.2,<5.6.0"), _kept(_GEMMA_4)),
        Variant(Guard("transformers", ">=5.6.0,<5.10.0"), _kept(_GEMMA_4, _GEMMA_3N), independent=True),
        Variant(
            Guard("transformers", ">=5.10.0,<=5.24.0"), _kept(_GEMMA_4, _GEMMA_3N, _GEMMA_4_UNIFIED), independent=True
        ),
    ),
    obsolete_when="when the oldest transformers in use returns shared keys and values from a layer; no release does",
    changes_numbers="""\
Since 5.5.2 (Gemma 3n: 5.6.0), runs with reentrant checkpointing have trained on a gradient without the part that comes
through shared keys and values. It is missing in the last layer that stores them, and in all layers before. With the
patch, the gradient norm differs: review clipping and learning rate. Adapters that were trained so are usable, but train
again if results were worse than with `use_reentrant=False`.""",
    conditions=tuple(
        Condition(target, f"{__package__}._shared_states:computed_again")
        for target in (_GEMMA_4, _GEMMA_3N, _GEMMA_4_UNIFIED)
    ),
)
