"""transformers: layers that share keys and values compute their own where there is no cache, as in training."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_MODULE = "transformers.models.{0}.modeling_{0}:{1}Text"
_GEMMA_3N = _MODULE.format("gemma3n", "Gemma3n")
_GEMMA_4 = _MODULE.format("gemma4", "Gemma4")
# The same code in Gemma 3n; between them Gemma 4 has the bug, too.
_BEFORE_5_5 = "transformers.models.gemma3n.modeling_gemma3n:Gemma3nRMSNorm.extra_repr"


def _shared(options: str, *families: str) -> tuple[Rewrite, ...]:
    """The model gives its layers a place for what they share, and a layer gives it to its attention.

    Args:
        options: the name of the model's keywords.
        families: the beginnings of targets.
    """
    made = []
    for family in families:
        start = family.partition(":")[2]
        layers = "self.layers[: self.config.num_hidden_layers]"
        given = f"self, {layers}, past_key_values, {options}, {start}DecoderLayer, {start}Attention"
        made += [
            Rewrite(
                target=f"{family}Model.forward",
                pattern=layers,
                replacement=f"$LAYERS({given})",
                alongside=(f"decoder_layer($$$, **{options})",),
                unless=("shared_kv_states",),
                uses={"LAYERS": f"{__package__}._states_without_cache:layers_of"},
            ),
            Rewrite(
                target=f"{family}DecoderLayer.forward",
                pattern="self.self_attn",
                replacement="$ATTENTION(self, kwargs)",
                inside="self.self_attn($$$)",
                alongside=("self.self_attn($$$, **kwargs)",),
                unless=("shared_kv_states",),
                uses={"ATTENTION": f"{__package__}._states_without_cache:attention_of"},
            ),
        ]
    return tuple(made)


PATCH = Patch(
    name="transformers-shared-kv-training",
    summary="layers share keys and values in training as they do in generation",
    harm="wrong gradient",
    bug="layers that share keys and values of earlier ones are trained with keys and values of their own",
    when="Gemma 3n before 5.6.0, Gemma 4 E2B or E4B before 5.5.2; without a cache, as in all training",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral",),
    symptom="""\
Gemma 3n or Gemma 4 (E2B, E4B) is trained. Its last layers (`num_kv_shared_layers`) are to use the keys and values of
earlier layers, and generation does so. Without a cache (`use_cache=False`, as trainers set it) they compute keys and
values of their own, with weights that pretraining never trained. The first loss is much too high (16 in place of 7 was
reported for Gemma 4 E2B), and training adapts the model to a computation that generation does not do. Log-probabilities
and evaluation without a cache are wrong, too. No error.""",
    cause="""\
`Gemma3nTextAttention` and `Gemma4TextAttention` find the earlier layers' keys and values in the cache. If there is
none, they take the branch of a layer that does not share.""",
    repair="""\
The patch hands the keys and values of the earlier layers to the later ones within a forward pass, as upstream does
since 5.5.2 (Gemma 4) and 5.6.0 (Gemma 3n). Loss and gradient are then those of a forward pass with a cache, also under
gradient checkpointing, reentrant or not.

The later layers' own `k_proj`, `v_proj`, `k_norm` and `v_norm` get no gradient any more. DistributedDataParallel then
raises in the second step. Set `find_unused_parameters=True` (`ddp_find_unused_parameters=True` in `TrainingArguments`),
or freeze these weights with `requires_grad_(False)` before training. Under reentrant checkpointing freeze them. The
patch is off unless asked for by name, because it cannot do this for you.

A call with a cache, such as generation, and models without shared layers stay bit for bit what they are. Without a
cache, your hooks on an attention see an object in its place that has no method of a cache but `update`. Your hooks on a
layer see a new keyword, `_rlhf_patches_shared_states`.

Not repaired, with a warning: a layer or an attention whose forward is your own; a model that accelerate distributes
over several devices (`device_map`). Not repaired, without a warning: a compiled model with gradient checkpointing.""",
    references=(
        "https://github.com/huggingface/transformers/issues/45242",
        "https://github.com/huggingface/transformers/pull/45312",
    ),
    variants=(
        Variant(Guard("transformers", ">=4.53.0,<4.54.0"), _shared("flash_attn_kwargs", _GEMMA_3N)),
        Variant(Guard("transformers", ">=4.54.0,<5.5.0"), _shared("kwargs", _GEMMA_3N), where_defined=(_BEFORE_5_5,)),
        Variant(Guard("transformers", ">=5.5.0,<5.5.2"), _shared("kwargs", _GEMMA_3N, _GEMMA_4), independent=True),
        Variant(Guard("transformers", ">=5.5.2,<5.6.0"), _shared("kwargs", _GEMMA_3N), unless_defined=(_BEFORE_5_5,)),
    ),
    obsolete_when="when the oldest transformers in use is 5.6.0",
    contested="upstream does it since 5.6.0, too, but DDP raises without find_unused_parameters=True or frozen weights",
    changes_numbers="""\
With the patch, the loss is that of the model as it generates, and the first loss of a pretrained model is far lower.
Since 4.53.0 (Gemma 3n) and in 5.5.0 and 5.5.1 (Gemma 4), models and adapters have been trained on another computation:
train them again. Adapters on `k_proj` and `v_proj` of the layers that share have no effect in generation.""",
    conditions=(Condition(f"{_GEMMA_3N}Model.forward"), Condition(f"{_GEMMA_4}Model.forward")),
)
