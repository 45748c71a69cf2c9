"""transformers: ``Trainer`` smooths a wrapped causal model's labels without shifting them."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAMES = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()"
_IS_CAUSAL = f"model_name in {_NAMES}"

PATCH = Patch(
    name="transformers-smoothed-labels",
    summary="label smoothing shifts the labels of a causal model that is compiled or under FSDP2",
    harm="wrong gradient",
    bug="the model is trained to repeat its input: labels are not shifted",
    when="label_smoothing_factor, with torch_compile, FSDP2 or PEFT's prefix tuning, and a causal model",
    excluded_by=(
        "label_smoothing_factor=absent|0|0.0",
        "trl=grpo|rloo",
    ),
    symptom="""\
`Trainer` with `label_smoothing_factor` trains a causal language model to predict the token that it has just read: with
`torch_compile=True`, with a model that was compiled before, under FSDP2, or with PEFT's prefix tuning. The model
learns to repeat its input. No error.""",
    cause="""\
With label smoothing `Trainer.compute_loss` computes the loss itself, and shifts the labels if the name of the
model's class is among those of causal models. It reads the class of the wrapper instead: `OptimizedModule` for a
compiled model, `FSDPLlamaForCausalLM` for FSDP2. With prefix tuning it reads the class of the model's own `model`,
`LlamaModel`.""",
    repair="""\
If that name is not among the causal models', the patch also looks up the name of the class within the wrappers:
`torch.compile`, DDP, FSDP2 and PEFT, also nested. The patch only reads the wrappers, and unwraps nothing. The gradient
is then that of the model without the wrapper.

Without label smoothing the patch looks up nothing; if the name is a causal model's, nothing changes. Encoder-decoders
and classifiers stay bit for bit what they are, wrapped or not. The labels of your own class under another name, and of
vision-language models whose names are in another list (Qwen2.5-VL), are not shifted, as released. A `compute_loss` or a
`label_smoother` that is not transformers' or TRL's own may shift labels itself: then everything stays as released, and
rank 0 logs one line.""",
    references=(
        "https://github.com/huggingface/transformers/issues/17960",
        "https://github.com/huggingface/transformers/issues/27161",
    ),
    variants=(
        Variant(
            Guard("transformers", ">=4.45.2,<=5.24.0"),
            (
                Rewrite(
                    target="transformers.trainer:Trainer.compute_loss",
                    pattern=_IS_CAUSAL,
                    replacement=f"({_IS_CAUSAL} or $NAME(self, unwrapped_model) in {_NAMES})",
                    alongside=("unwrapped_model._get_name()",),
                    uses={"NAME": f"{__package__}._wrapped_names:name_for"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest transformers in use looks at the model within its wrappers; no release so far does",
    changes_numbers="""\
With `label_smoothing_factor` and `torch_compile`, FSDP2 or prefix tuning, a causal language model was trained to
repeat its input. With the patch it is trained to predict the next token. Discard such a run: start again from the
weights before it. Remove any shift of the labels from a collator that compensates for the bug.""",
    conditions=(Condition("transformers.trainer:Trainer.compute_loss", f"{__package__}._conditions:not_smoothed"),),
)
