"""TRL's own output heads: the logits of Granite, Falcon-H1, Inkling and others are scaled as their forwards do."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._model_logits"
_SFT = "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head"
_FUSED = "trl.trainer.utils:add_fused_lm_head"
_ASYNC = "trl.trainer.utils:patch_chunked_lm_head"
_DISTILLATION = "trl.trainer.distillation_trainer:DistillationTrainer._compute_loss"
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


def _of_distillation(default: str = "None") -> tuple[Rewrite, ...]:
    """The same two settings of student and teacher."""
    student, teacher = ((f"unwrapped_{one}", f"{one}_config") for one in ("student", "teacher"))
    scales = {one: f'getattr({one[1]}, "logit_scale", {default})' for one in (student, teacher)}
    caps = {one: f'getattr({one[1]}, "final_logit_softcapping", None)' for one in (student, teacher)}
    found = {
        scales[student]: ("scale_of_student", student),
        scales[teacher]: ("scale_of_teacher", (*teacher, *student)),
        caps[student]: ("cap_within", student),
        caps[teacher]: ("cap_within", teacher),
    }
    return tuple(
        Rewrite(
            _DISTILLATION,
            pattern,
            f"${function.upper()}({', '.join(arguments)})",
            alongside=tuple(other for other in found if other != pattern),
            uses={function.upper(): f"{_OURS}:{function}"},
        )
        for pattern, (function, arguments) in found.items()
    )


def _of_async(scaled: str, capped: str, default: str, function: str = "scale_or_one") -> tuple[Rewrite, ...]:
    """The head of asynchronous GRPO, whose forward reads the scale in each call and the cap once."""
    scale = f'getattr({scaled}, "logit_scale", {default})'
    cap = f'getattr({capped}, "final_logit_softcapping", None)'
    assigned = "model.forward = types.MethodType(_chunked_forward, model)"
    return (
        Rewrite(
            _ASYNC, scale, f'getattr({scaled}, "logit_scale", logit_scale_of_the_model)', alongside=(cap, assigned)
        ),
        Rewrite(_ASYNC, cap, f"$CAP(model, {capped})", alongside=(scale, assigned), uses={"CAP": f"{_OURS}:cap"}),
        Rewrite(
            _ASYNC,
            assigned,
            f"logit_scale_of_the_model = $SCALE(model, {capped}); {assigned}",
            alongside=(scale, cap),
            uses={"SCALE": f"{_OURS}:{function}"},
        ),
    )


_BEFORE_1_13 = _of_async("self.config", "model.config", "1.0")

PATCH = Patch(
    name="trl-logit-scaling",
    summary="the logits that TRL computes itself have the scale and the cap of the model's forward",
    harm="wrong gradient",
    bug="losses and log-probabilities come from logits without the model's own factor or cap",
    when=(
        "Granite, Falcon-H1, MiniCPM3 or HyperCLOVA X in SFT (loss_type chunked_nll, the default since 1.7.0), and"
        " with use_liger_kernel in 1.14; Inkling, RecurrentGemma and xLSTM in the same cases,"
        " and since 1.15.0 in all trainers; all of these in DistillationTrainer and, before 1.15.0, asynchronous GRPO"
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
(Llava with Gemma 2, Cohere2Vision); asynchronous GRPO before 1.4.0, and asynchronous distillation; Liger's own losses,
in DPO, KTO and GRPO before 1.14.0; the padding of Inkling's vocabulary, which its forward cuts off;
ModernBERT's decoder and the decoders of BERT's family, which have more layers between the backbone and the head. In SFT
before 1.15.0 use `loss_type="nll"` for these.""",
    changes_numbers="""\
From 1.7.0 to 1.14.2, SFT trained these models with a loss of logits that were too large by a factor of `logits_scaling`
or `1 / lm_head_multiplier`. Since 1.4.0, SFT did the same with `loss_type="chunked_nll"`. From 1.14.0 to 1.14.2, so did
DPO, KTO and GRPO with `use_liger_kernel`, from 1.10.0 on `DistillationTrainer`, for student and teacher, and from 1.4.0
on asynchronous GRPO. With the patch, losses and log-probabilities are those of the model's own forward, from the next
start on. Do not continue such a run: its weights have adapted to the missing factor. Start again from the base
model.""",
    references=("https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py",),
    variants=(
        Variant(
            Guard("trl", ">=1.4.0,<1.10.0"),
            (*_read(_SFT, "model", default="1.0", function="scale_or_one"), *_BEFORE_1_13),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=1.10.0,<1.11.0"),
            (
                *_read(_SFT, "model", default="1.0", function="scale_or_one"),
                *_BEFORE_1_13,
                *_of_distillation("1.0"),
            ),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=1.11.0,<1.13.0"),
            (*_read(_SFT, "model"), *_BEFORE_1_13, *_of_distillation()),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=1.13.0,<1.14.0"),
            (*_read(_SFT, "model"), *_of_async("text_config", "text_config", "1.0"), *_of_distillation()),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=1.14.0,<1.15.0"),
            (
                *_read(_SFT, "model"),
                *(each for one in _OF_TRAINERS for each in _read(one, "inner_model")),
                *_of_async("text_config", "text_config", "None", "scale"),
                *_of_distillation(),
            ),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=1.15.0,<=1.16.0"),
            (*_read(_FUSED, "model"), *_of_distillation()),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest trl in use reads these settings; 1.16.0, the newest, reads some of them",
    conditions=tuple(map(Condition, (_SFT, *_OF_TRAINERS, _FUSED, _ASYNC, _DISTILLATION))),
)
