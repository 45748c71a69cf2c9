"""ms-swift's reference pass without Megatron: in eval mode, and without side effects after it."""

from __future__ import annotations

from rlhf_patches import Guard, Variant

from .null_ref_context import ADAPTER, DROPOUT, OVERLAP, around, patch

_TRANSFORMERS = {
    "symptom": f"""\
The bug affects training without Megatron (`swift rlhf`) with LoRA, if the reference model is the policy itself, without
its adapter or with the reference adapter.

The following needs `disable_dropout` false, which is the default for GRPO, but not for DPO and KTO. {DROPOUT}

{ADAPTER}""",
    "cause": """\
A separate reference model is put into eval mode when it is prepared. With an adapter, nothing does this: the policy is
in training mode, so its reference pass also runs in training mode. `set_adapter` is undone after the `yield`, outside a
`finally`.""",
    "repair": f"""\
The patch runs ms-swift's own context inside another one. While it is open, every module within the trainer's model
(PEFT's wrapper) is in eval mode. The wrapper's own flag, which affects no computation, does not change: GRPO's trainer
uses it in the context to choose between the batch size of training and that of evaluation. When the context is left,
normally or by an exception, even one raised while it is entered, every module has its previous `training` flag. The
same adapters are active and disabled as before, and each of their parameters is as trainable as it was.

{OVERLAP}

With `disable_dropout`, there was no noise without the patch, and results are unchanged.""",
}

_GRPO = around(
    "swift.rlhf_trainers.grpo_trainer:GRPOTrainer",
    "of_transformers",
    {"1e64c1a646b2e911": "4.0.0 to 4.3.2"},
)
_DPO = around(
    "swift.rlhf_trainers.dpo_trainer:DPOTrainer",
    "of_transformers",
    {"81bc3edcb7855a30": "4.0.3 to 4.3.2"},
)

PATCH = patch(
    "swift-null-ref-context-hf",
    "Trainers without Megatron",
    "swift rlhf",
    _TRANSFORMERS,
    Variant(
        Guard("ms-swift", ">=3.8.0,<4.0.0"),
        (
            around(
                "swift.trainers.rlhf_trainer.grpo_trainer:GRPOTrainer",
                "of_transformers",
                {"1e64c1a646b2e911": "3.8.0 to 3.12.6"},
            ),
        ),
    ),
    Variant(Guard("ms-swift", ">=4.0.0,<4.0.3"), (_GRPO,)),
    # Independent: GRPO's and DPO's trainers do not import each other, and a run imports one of them.
    Variant(Guard("ms-swift", ">=4.0.3,<4.4.0"), (_GRPO, _DPO), independent=True),
    Variant(
        Guard("ms-swift", ">=4.4.0,<=4.6.0"),
        (
            around(
                "swift.rlhf_trainers.rlhf_mixin:RLHFTrainerMixin",
                "of_transformers",
                {"1e64c1a646b2e911": "4.4.0 to 4.6.0"},
            ),
        ),
    ),
)
