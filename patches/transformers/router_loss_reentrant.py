"""transformers: under reentrant gradient checkpointing the router's auxiliary loss has no gradient."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_MODEL = "transformers.modeling_utils:PreTrainedModel"
_ENABLE = f"{_MODEL}.gradient_checkpointing_enable"
_ENABLE_5_23 = f"{_MODEL}._activation_checkpointing_enable"
_RECORDS = f"{_MODEL}.can_record_outputs"  # 4.53 does not record router logits


def _recorded(target: str, function: str, given: str) -> tuple[Rewrite, ...]:
    """The function that layers are checkpointed with."""
    pattern = f"functools.partial({function}, **{given})"
    uses: dict[str, Any] = {"RECORDED": f"{__package__}._router_logits:recorded"}
    return (Rewrite(target=target, pattern=pattern, replacement=f"$RECORDED(self, {pattern})", uses=uses),)


_BEFORE_5_17 = _recorded(_ENABLE, "checkpoint", "gradient_checkpointing_kwargs")

PATCH = Patch(
    name="transformers-router-loss-reentrant",
    summary="the router's auxiliary loss has a gradient under reentrant gradient checkpointing",
    harm="wrong gradient",
    bug="the router's auxiliary loss has no gradient under reentrant checkpointing",
    when="a mixture of experts with output_router_logits=True; gradient checkpointing with use_reentrant=True",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral|gemma|gemma2",),
    symptom="""\
A mixture of experts is trained with `output_router_logits=True` and gradient checkpointing with `use_reentrant=True`.
The router's auxiliary loss is part of the loss, but has no gradient: the router is not balanced. In tiny models the
router's gradient is off by 4 to 119 percent, and all weights before a router lack that loss's part. No error; a step's
loss is right.

`use_reentrant=True` is the default of `gradient_checkpointing=True` in 4.54 to 4.57. In 5.x the default is False; TRL
sets True for PEFT with ZeRO-3, and ms-swift sets True unless several ranks train without DeepSpeed and FSDP.""",
    cause="""\
Reentrant checkpointing runs a layer without a graph first. Only what the layer returns has a gradient. Since 4.54,
transformers records router logits while the layer runs, so it records logits without a graph: in Mixtral, Qwen3 MoE,
MiniMax and Ernie 4.5, in GPT-OSS, FlexOlmo, Qwen3-Next and Qwen3-VL MoE of later 4.x, and in all mixtures that record
router logits in 5.x.""",
    repair="""\
Recorded router logits become outputs of the checkpointed layer, as they were before transformers recorded them. The
gradient is then that without checkpointing. Checkpointing stays reentrant, as ZeRO-3 needs it.

Only mixtures that record router logits change, and only where `gradient_checkpointing_enable` makes torch's own
checkpointing with `use_reentrant=True` or without a value, which torch takes for True, and a call with gradients
records router logits. Reports count the bug where the loss has these logits, also with a coefficient of 0. Dense
models, training without checkpointing or with `use_reentrant=False`, evaluation and generation stay bit for bit what
they are. Hidden states and attentions that a call records stay as released.

Not repaired: checkpointing that was enabled before the patch was applied; a checkpointing function of somebody else, as
DeepSpeed's or Unsloth's; `offload=True`; torch's own `checkpoint_wrapper`; a model that was pickled with
checkpointing enabled, and was loaded.""",
    references=("https://docs.pytorch.org/docs/stable/checkpoint.html",),
    variants=(
        Variant(Guard("transformers", ">=4.54.0,<5.17.0"), _BEFORE_5_17, where_defined=(_RECORDS,)),
        Variant(
            Guard("transformers", ">=5.17.0,<5.23.0"),
            _recorded(_ENABLE, "checkpoint_func", "gradient_checkpointing_kwargs"),
            where_defined=(_RECORDS,),
        ),
        Variant(
            Guard("transformers", ">=5.23.0,<=5.24.0"),
            _recorded(_ENABLE_5_23, "checkpoint_func", "activation_checkpointing_kwargs"),
            where_defined=(_RECORDS,),
        ),
    ),
    obsolete_when="when the oldest transformers in use returns router logits from a layer; no release since 5.0 does",
    changes_numbers="""\
Since 4.54, a mixture that was trained with reentrant checkpointing and `output_router_logits=True` has been trained
without the router's auxiliary loss, whatever its coefficient was. With the patch, the router is balanced, and the
gradient norm differs: review `router_aux_loss_coef`, clipping and learning rate. Train again if few experts are
used.""",
    conditions=(Condition(_ENABLE), Condition(_ENABLE_5_23)),
)
