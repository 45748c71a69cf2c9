"""TRL's own output heads: the logits of Granite, Falcon-H1, Inkling and others are scaled as their forwards do."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._model_logits"
_SFT = "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head"
_FUSED = "trl.trainer.utils:add_fused_lm_head"
_OF_TRAINERS = (
    "trl.trainer.dpo_trainer:DPOTrainer._get_per_token_logps_and_entropies",
    "trl.trainer.kto_trainer:KTOTrainer._get_per_token_logps_and_entropies",
    "trl.trainer.grpo_trainer:GRPOTrainer._chunked_logps",
)


def _read(target: str, model: str, default: str = "None", function: str = "scale") -> tuple[Rewrite, Rewrite]:
    """The two settings, read of the model and not of its config alone."""
    scale = f'getattr(text_config, "logit_scale", {default})'
    cap = 'getattr(text_config, "final_logit_softcapping", None)'
    return (
        Rewrite(
            target, scale, f"$SCALE({model}, text_config)", alongside=(cap,), uses={"SCALE": f"{_OURS}:{function}"}
        ),
        Rewrite(target, cap, f"$CAP({model}, text_config)", alongside=(scale,), uses={"CAP": f"{_OURS}:cap"}),
    )


PATCH = Patch(
    name="trl-logit-scaling",
    summary="the logits that TRL computes itself have the scale and the cap of the model's forward",
    harm="wrong gradient",
    bug="losses and log-probabilities come from logits without the model's own factor or cap",
    when=(
        "Granite, Falcon-H1, MiniCPM3 or HyperCLOVA X in SFT (loss_type chunked_nll, the default since 1.7.0), and"
        " with use_liger_kernel in 1.14; Inkling, RecurrentGemma and xLSTM in the same cases,"
        " and since 1.15.0 in all trainers"
    ),
    excluded_by=(
        "trl=reward",
        "model_family=qwen2|qwen3|llama|mistral",
    ),
    symptom="""\
The loss of SFT starts far above what the model's own forward gives, or log-probabilities of a policy are far from those
of its rollouts. Granite 3 has `logits_scaling` 8 or more, so its logits are that many times too large: softmax is
nearly one-hot, and the loss is several times too large. Training then fits logits that the model does not use when it
generates. There is no error. `loss_type="nll"` is not affected before 1.15.0.""",
    cause="""\
To save memory, TRL multiplies the backbone's hidden states by the weight of the output head itself. It then applies
`logit_scale` (Cohere) and `final_logit_softcapping` (Gemma) of the model's config, and since 1.15.0 also
`lm_head_multiplier` and `logits_scaling`. Other models have other names: `logits_scaling` (Granite, MiniCPM3,
HyperCLOVA X) and `lm_head_multiplier` (Falcon-H1) before 1.15.0; `logits_mup_width_multiplier` (Inkling),
`logits_soft_cap` (RecurrentGemma) and `output_logit_soft_cap` (xLSTM) up to 1.16.0.""",
    repair="""\
Where TRL reads these two settings, the patch reads the settings of the model's class. It does so if the model's
`forward` is that of one of transformers' own classes. `logit_scale` and `final_logit_softcapping` of a config have
precedence, so a run in which you have set `logit_scale = 1 / logits_scaling` does not change. A model with your own
`forward`, or with code from the Hub, stays as released.

Not repaired: vision-language models whose text config has a factor or a cap that their own forward does not apply
(Llava with Gemma 2, Cohere2Vision); `DistillationTrainer`, asynchronous GRPO and asynchronous distillation; Liger's own
losses, in DPO, KTO and GRPO before 1.14.0; the padding of Inkling's vocabulary, which its forward cuts off;
ModernBERT's decoder and the decoders of BERT's family, which have more layers between the backbone and the head. In SFT
before 1.15.0 use `loss_type="nll"` for these.""",
    changes_numbers="""\
From 1.7.0 to 1.14.2, SFT trained these models with a loss of logits that were too large by a factor of `logits_scaling`
or `1 / lm_head_multiplier`. Since 1.4.0, SFT did the same with `loss_type="chunked_nll"`. From 1.14.0 to 1.14.2, so did
DPO, KTO and GRPO with `use_liger_kernel`. With the patch, losses and log-probabilities are those of the model's own
forward, from the next start on. Do not continue such a run: its weights have adapted to the missing factor. Start again
from the base model.""",
    references=("https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py",),
    variants=(
        Variant(Guard("trl", ">=1.4.0,<1.11.0"), _read(_SFT, "model", default="1.0", function="scale_or_one")),
        Variant(Guard("trl", ">=1.11.0,<1.14.0"), _read(_SFT, "model")),
        Variant(
            Guard("trl", ">=1.14.0,<1.15.0"),
            (*_read(_SFT, "model"), *(each for one in _OF_TRAINERS for each in _read(one, "inner_model"))),
            independent=True,
        ),
        Variant(Guard("trl", ">=1.15.0,<=1.16.0"), _read(_FUSED, "model")),
    ),
    obsolete_when="when the oldest trl in use reads these settings; 1.16.0, the newest, reads some of them",
    conditions=tuple(map(Condition, (_SFT, *_OF_TRAINERS, _FUSED))),
)
