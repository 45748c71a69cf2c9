"""ms-swift's reference pass: in eval mode, and without side effects after it.

One repair, `reference_pass`, for every class that has had a ``null_ref_context``. Each class has its own patch, because
a patch has one range of releases; here is the one with Megatron.
"""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Variant, Wrap

DROPOUT = """\
With dropout above 0, the reference log-probabilities differ from one pass to the next on the same batch. The KL
divergence of a policy from itself is then not 0. DPO's, KTO's and GRPO's losses, rewards and gradients contain that
noise. No error is raised."""
ADAPTER = """\
With a reference adapter (`--ref_adapters`), a caught exception inside the context (out of memory, an interrupt, a bad
batch) leaves the reference adapter active: from then on it is trained, and the policy's adapter is not."""

OVERLAP = """\
Contexts of one model may be nested or overlap, also in several threads: all of this is restored when the last one is
left. If two contexts use different adapters, the adapter of the one that was entered last is active."""


def patch(name: str, places: str, command: str, texts: dict[str, Any], *variants: Variant) -> Patch:
    return Patch(
        name=name,
        summary=f"{places}: the reference pass runs in eval mode and leaves modes and adapters as they were",
        harm="wrong gradient",
        bug="the reference pass runs in training mode, with dropout, and may leave modes and adapters switched",
        when=f"{command} with LoRA; the reference is the policy without its adapter or with the reference adapter",
        references=("https://github.com/modelscope/ms-swift",),
        variants=variants,
        obsolete_when=(
            "when the oldest ms-swift in use restores what its null_ref_context changes; none released so far does"
        ),
        **texts,
    )


def around(trainer: str, implementation: str, fingerprints: dict[str, str]) -> Wrap:
    return Wrap(
        target=f"{trainer}.null_ref_context",
        implementation=f"{__package__}._reference_pass:{implementation}",
        fingerprints=fingerprints,
    )


_MEGATRON = {
    "symptom": f"""\
The bug affects Megatron training (`megatron rlhf`) with LoRA, if the reference model is the policy itself, without its
adapter or with the reference adapter.

{DROPOUT}

With full activation checkpointing (`--recompute_granularity full`), the reference pass runs checkpointed forwards
although nothing has to be recomputed. TransformerEngine was reported to raise "Input x is not allocated!" in such a
forward. This was not reproduced, because it needs a GPU; with the patch there is no such forward.

{ADAPTER}""",
    "cause": """\
`null_ref_context` switches adapters but not the mode: the policy is in training mode, so its reference pass also runs
in training mode. `set_adapter('ref_adapter')` is undone after the `yield`, outside a `finally`.""",
    "repair": f"""\
The patch runs ms-swift's own context inside another one. While it is open, every module of the reference models (each
pipeline chunk's) is in eval mode. When the context is left, normally or by an exception, even one raised while it is
entered, every module has its previous `training` flag. The patch does not call `train()` on the whole model, because
that would also switch frozen parts that were in eval mode. The same adapters are active and disabled as before, and
each of their parameters is as trainable as it was.

{OVERLAP}

Full fine-tuning has separate reference models, already in eval mode: nothing changes.

Not repaired: ms-swift 4.6 computes the *policy's* old log-probabilities in eval mode, and calls `train()` on the whole
model afterwards.""",
}

PATCH = patch(
    "swift-null-ref-context",
    "Megatron trainers",
    "megatron rlhf",
    _MEGATRON,
    Variant(
        Guard("ms-swift", ">=3.7.0,<3.9.0"),
        (
            around(
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
            around(
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
