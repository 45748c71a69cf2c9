"""accelerate before 0.34 with transformers 4.45 to 4.51, which calls `train()` of its optimizer: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

ADVICE = Advice(
    name="accelerate-optimizer-train",
    summary="transformers' Trainer, from 4.45 to 4.51, cannot train with accelerate 0.30 to 0.33",
    harm="crash",
    bug="transformers' Trainer, from 4.45 to 4.51, cannot train with accelerate 0.30 to 0.33",
    when="accelerate 0.30.0 to 0.33.0 with transformers 4.45.0 to 4.51.3, whose metadata allow it",
    symptom="""\
The first step of transformers' Trainer, and of every trainer built on it, raises `AttributeError: 'AdamW' object has
no attribute 'train'`, or the same for another optimizer.""",
    cause="""\
Since 4.45.0 the Trainer calls `train()` of an optimizer that has this method, for schedule-free optimizers. accelerate
wraps every optimizer in a class that has the method, which before 0.34.0 calls the wrapped optimizer's method without
checking that it exists.""",
    what_to_do="Use accelerate 0.34.0 or later (1.3.0 for transformers from 4.52 on), or pin `transformers<4.45`.",
    signatures=(
        Signature(
            "AttributeError",
            "object has no attribute 'train'",
            ("accelerate.optimizer:AcceleratedOptimizer.train",),
            specific=False,
        ),
    ),
    references=(
        "https://github.com/huggingface/transformers/pull/30079",
        "https://github.com/huggingface/accelerate/pull/2631",
    ),
    variants=(
        Variant(
            Guard("accelerate", ">=0.30.0rc0,<=0.33.0", co_installed=CoInstalled("transformers", ">=4.45.0,<4.52.0")),
            (
                Shape(
                    "accelerate.optimizer:AcceleratedOptimizer.train",
                    "return self.optimizer.train()",
                    unless=("hasattr($$$)",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest accelerate in use is 0.34.0",
)
