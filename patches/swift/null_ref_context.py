"""ms-swift's reference pass: in eval mode, and without a trace once it is over.

One repair, `reference_pass`, for every class that has had a ``null_ref_context``; a patch each, because a patch has
one range of releases.
"""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Variant, Wrap

_DROPOUT = """\
With dropout above 0 the reference log-probabilities differ from one pass to the next on the same batch. A policy has
a KL divergence from itself that is not 0; DPO's, KTO's and GRPO's losses and rewards carry that noise, and their
gradients do too. No error is shown."""
_ADAPTER = """\
With a reference adapter (`--ref_adapters`), an exception inside the context (out of memory, an interrupt, a bad
batch) that is caught leaves the reference adapter active: from then on it is trained, and the policy's adapter
is not."""

_OVERLAP = """\
Contexts of one model may be nested or overlap, in several threads too: all of this is put back when the last of them
is left. Of two that want different adapters, the one that was entered last has its own."""


def _patch(name: str, places: str, texts: dict[str, Any], *variants: Variant) -> Patch:
    return Patch(
        name=name,
        summary=f"{places}: the reference pass runs in eval mode and leaves modes and adapters as they were",
        harm="wrong gradient",
        bug="the reference pass runs in training mode, with dropout, and switches modes and adapters",
        when="LoRA, where the policy without its adapter, or with the reference adapter, is the reference",
        references=("https://github.com/modelscope/ms-swift",),
        variants=variants,
        obsolete_when=(
            "when the oldest ms-swift in use restores what its null_ref_context changes; none released so far does"
        ),
        **texts,
    )


def _around(trainer: str, implementation: str, fingerprints: dict[str, str]) -> Wrap:
    return Wrap(
        target=f"{trainer}.null_ref_context",
        implementation=f"{__package__}._reference_pass:{implementation}",
        fingerprints=fingerprints,
    )


_MEGATRON = {
    "symptom": f"""\
Megatron training with LoRA (`megatron rlhf`), where the policy itself without its adapter, or with the reference
adapter, is the reference model.

{_DROPOUT}

With full activation checkpointing (`--recompute_granularity full`), the reference pass runs checkpointed forwards
although nothing is to be recomputed. TransformerEngine was reported to stop in one with "Input x is not allocated!"
(not seen here, for want of a GPU; the patch leaves no such forward).

{_ADAPTER}""",
    "cause": """\
`null_ref_context` switches adapters and leaves the mode alone: the policy is in training mode, and so is its
reference pass. `set_adapter('ref_adapter')` is undone after the `yield`, outside a `finally`.""",
    "repair": f"""\
The release's own context runs inside ours. While it is open, every module of the reference models (each pipeline
chunk's) is in eval mode. When it is left, normally or by an exception, even one while it is entered, every module has
the `training` flag that it had (`train()` on the whole model would put frozen parts that were kept in eval mode into
training); the adapters that were active are active, those that were disabled disabled, and each of their parameters is
as trainable as it was.
{_OVERLAP}

Full fine-tuning has reference models of its own, in eval mode already: nothing changes.

Not repaired here: ms-swift 4.6 computes the *policy's* old log-probabilities in eval mode and calls `train()` on
the whole model afterwards.""",
}

_TRANSFORMERS = {
    "symptom": f"""\
Training without Megatron (`swift rlhf`), with LoRA, where the policy itself without its adapter, or with the
reference adapter, is the reference model.

With `disable_dropout` false (the default for GRPO, not for DPO and KTO): {_DROPOUT[0].lower()}{_DROPOUT[1:]}

{_ADAPTER}""",
    "cause": """\
A reference model of its own is put into eval mode when it is prepared. An adapter has no such moment: the policy is
in training mode, and so is its reference pass. `set_adapter` is undone after the `yield`, outside a `finally`.""",
    "repair": f"""\
The release's own context runs inside ours. While it is open, every module within the trainer's model (PEFT's wrapper)
is in eval mode. The wrapper's own flag, which computes nothing, stays: by it GRPO's trainer chooses, within the
context, between the batch size of training and that of evaluation. When the context is left, normally or by an
exception, even one while it is entered, every module has the `training` flag that it had; the adapters that were
active are active, those that were disabled disabled, and each of their parameters is as trainable as it was.
{_OVERLAP}

With `disable_dropout` there was no noise, and there is none.""",
}

PATCH = _patch(
    "swift-null-ref-context",
    "Megatron trainers",
    _MEGATRON,
    Variant(
        Guard("ms-swift", ">=3.7.0,<3.9.0"),
        (
            _around(
                "swift.megatron.trainers.dpo_trainer:MegatronDPOTrainer",
                "of_megatron_dpo",
                {
                    "365eeb34940d1d25": "3.7.0 to 3.7.3: no reference adapter",
                    "c35bfe0e4fd4c781": "3.8.0 to 3.8.2",
                    "c7dcae05c0a37e15": "3.8.3",
                },
            ),
        ),
    ),
    Variant(
        Guard("ms-swift", ">=3.9.0,<=4.6.0"),
        (
            _around(
                "swift.megatron.trainers.rlhf_mixin:MegatronRLHFTrainer",
                "of_megatron",
                {
                    "51d1f8ae75487ca4": "3.9.0 to 3.11.1",
                    "62bc1586a9aa20b9": "3.11.2 to 3.12.6: --ref_adapters",
                    "7f7aea00688c9237": "4.0.0 to 4.6.0: without Megatron-LM's get_args",
                },
            ),
        ),
    ),
)

_GRPO = _around(
    "swift.rlhf_trainers.grpo_trainer:GRPOTrainer",
    "of_transformers",
    {"1e64c1a646b2e911": "4.0.0 to 4.3.2"},
)
_DPO = _around(
    "swift.rlhf_trainers.dpo_trainer:DPOTrainer",
    "of_transformers",
    {"81bc3edcb7855a30": "4.0.3 to 4.3.2"},
)

PATCH_HF = _patch(
    "swift-null-ref-context-hf",
    "Trainers without Megatron",
    _TRANSFORMERS,
    Variant(
        Guard("ms-swift", ">=3.8.0,<4.0.0"),
        (
            _around(
                "swift.trainers.rlhf_trainer.grpo_trainer:GRPOTrainer",
                "of_transformers",
                {"1e64c1a646b2e911": "3.8.0 to 3.12.6"},
            ),
        ),
    ),
    Variant(Guard("ms-swift", ">=4.0.0,<4.0.3"), (_GRPO,)),
    # Independent: GRPO's trainer does not import DPO's, nor the other way round, and a run imports one of them.
    Variant(Guard("ms-swift", ">=4.0.3,<4.4.0"), (_GRPO, _DPO), independent=True),
    Variant(
        Guard("ms-swift", ">=4.4.0,<=4.6.0"),
        (
            _around(
                "swift.rlhf_trainers.rlhf_mixin:RLHFTrainerMixin",
                "of_transformers",
                {"1e64c1a646b2e911": "4.4.0 to 4.6.0"},
            ),
        ),
    ),
)
