"""TRL's disable_dropout: also the dropout that a model's forward applies by a function."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "trl.trainer.utils:disable_dropout_in_model"
_OURS = f"{__package__}._functional_dropout"

PATCH = Patch(
    name="trl-functional-dropout",
    summary="disable_dropout also disables the dropout of attention and residuals that has no module",
    harm="wrong gradient",
    bug="disable_dropout leaves functional dropout on, so that policy and reference have different random masks",
    when=(
        "disable_dropout=True (the default of DPO, KTO, reward and Online DPO) and a model whose config has a dropout"
        " that its forward applies by a function: OPT, Seed-OSS, BioGPT, XGLM, BART; others with attention_dropout"
    ),
    excluded_by=("disable_dropout=false", "trl=sft"),
    symptom="""\
`DPOTrainer` with OPT, Seed-OSS or another model whose config has a `dropout`, `attention_dropout` or
`residual_dropout` above 0: the loss of the first step is not ln 2, although policy and reference are equal. Losses and
gradients change with the seed. No error. `disable_dropout=True`, the default, seems to have no effect.""",
    cause="""\
`disable_dropout_in_model` sets the probability of each `torch.nn.Dropout` to 0. Many models of transformers have no
such module: their forward calls `torch.nn.functional.dropout`, or hands a probability to attention, and reads it from
an attribute of the module.""",
    repair="""\
The patch also sets these attributes to 0, in modules whose class and `forward` are transformers' own: `dropout`,
`attention_dropout`, `activation_dropout`, `hidden_dropout`, `residual_dropout`, `embedding_dropout`, `resid_pdrop`,
`attn_dropout_p`, `attn_dropout` and `attn_pdrop` (GPTBigCode), where they are numbers above 0. The model's config stays
as it is. Models without such dropout, and trainers with `disable_dropout=False`, stay bit for bit identical. Your own
modules are never changed.

Not repaired: models that read a probability from their config at each call (Falcon, Persimmon, BLT, ProphetNet, and
GPT-Neo and GPT-J with FlashAttention). They stay as released, and reports do not count them. Also not repaired: layer
dropout (`layerdrop`), which leaves out layers.""",
    changes_numbers="""\
Since TRL 0.6.0, trainers with `disable_dropout=True` trained these models with the dropout of their config. With the
patch they train without it, as the setting says. Set `disable_dropout=False` to continue a run with dropout.""",
    references=("https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/utils.py",),
    variants=(
        Variant(
            Guard("trl", ">=0.6.0,<=1.16.0"),
            (
                Rewrite(
                    _TARGET,
                    "isinstance(module, torch.nn.Dropout)",
                    "isinstance($DISABLED(module), torch.nn.Dropout)",
                    alongside=("module.p = 0",),
                    unless=("setattr($$$)",),
                    uses={"DISABLED": f"{_OURS}:disabled"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use disables functional dropout; 1.16.0, the newest, does not",
    conditions=(Condition(_TARGET, f"{_OURS}:is_left_on"),),
)
