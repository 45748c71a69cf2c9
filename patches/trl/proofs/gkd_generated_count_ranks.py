"""Gradients of GKD's trainer on generated completions, and the definition's in float64: ``--out FOLDER CASE...``.

Each case as released, with trl-gkd-generated-count, with trl-distillation-scale too, and after revert(). The last state
has the first case alone.
"""

from __future__ import annotations

import json
import os
from typing import Any

import datasets
import torch
from trl.experimental.gkd import GKDConfig, GKDTrainer

import rlhf_patches
from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.patches.trl.proofs import distilling, small
from rlhf_patches.proving import states

NAME, SCALE = "trl-gkd-generated-count", "trl-distillation-scale"
STATES = {"before": (), "after": (NAME,), "both": (NAME, SCALE), "reverted": ()}
SAMPLES = 8
FEW_WORDS = [0, *range(8, 99)]
"""Tokens that are not generated. One of the other seven ends the text, so that lengths differ."""


CASES: dict[str, tuple[type, int, dict[str, Any]]] = {
    "generated": (GKDTrainer, 1, {}),
    "generated, accumulated": (GKDTrainer, 4, {}),
    "mixed, accumulated": (GKDTrainer, 4, {"lmbda": 0.5}),
    "by the teacher": (GKDTrainer, 2, {"lmbda": 0.0, "seq_kd": True}),
    "each rank's own": (GKDTrainer, 2, {"average_tokens_across_devices": False}),
    "none generated": (GKDTrainer, 4, {"lmbda": 1e-9}),
    "of the data set": (GKDTrainer, 4, {"lmbda": 0.0}),
}
"""The trainer, its micro-batches per step, and its settings."""


def rows() -> datasets.Dataset:
    """Prompts of one to three words, and answers of five to twelve."""
    made = []
    for row in range(SAMPLES):
        prompt = " ".join(f"w{word}" for word in range(row, row + 1 + row % 3))
        answer = " ".join(f"w{word}" for word in range(3 * row, 3 * row + 5 + row))
        made.append([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
    return datasets.Dataset.from_list([{"messages": each} for each in made])


def made(case: str) -> Any:
    """The trainer of a case."""
    kind, steps, settings = CASES[case]
    words, model = small.tokenizer(), small.model()
    words.chat_template = distilling.TEMPLATE
    arguments = GKDConfig(
        states.folder(),
        per_device_train_batch_size=SAMPLES // steps // int(os.environ["WORLD_SIZE"]),
        per_device_eval_batch_size=SAMPLES,
        gradient_accumulation_steps=steps,
        max_steps=1,
        max_length=32,
        max_new_tokens=6,
        temperature=1.0,
        logging_steps=1,
        **small.STEPS,
        **{"lmbda": 1.0, **settings},
    )
    optimizer = Kept(model.parameters(), lr=0.1)
    trainer = kind(
        model=model,
        teacher_model=distilling.teacher(),
        args=arguments,
        train_dataset=rows(),
        eval_dataset=rows(),
        processing_class=words,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )
    trainer.generation_config.suppress_tokens = FEW_WORDS
    return trainer


def divergence(batches: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """By the definition: gradient, sum and number of the tokens with a label."""
    model = small.model().double()
    sums, tokens = distilling.divergences(model, batches)
    total = torch.stack(sums).sum()
    total.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]), total.detach(), sum(tokens)


def trained(case: str) -> dict[str, Any]:
    """How many times the mean over all trained tokens a step's gradient and logged loss are, and more."""
    trainer = made(case)
    evaluated = trainer.evaluate()["eval_loss"]
    got, mine, everywhere = distilling.recorded(trainer)
    if trainer.args.average_tokens_across_devices:
        gradient, total, tokens = divergence([batch for each in everywhere for batch in each])
        wanted, loss = gradient / tokens, total / tokens
    else:
        each_rank = [divergence(batches) for batches in everywhere]
        wanted = torch.stack([gradient / tokens for gradient, _, tokens in each_rank]).mean(0)
        loss = torch.stack([total / tokens for _, total, tokens in each_rank]).mean()
    logged = next(each["loss"] for each in trainer.state.log_history if "loss" in each)
    return {
        "factor": float(got @ wanted / (wanted @ wanted)),
        "error": float((got - wanted).norm() / wanted.norm()),
        "loss": logged / float(loss),
        "logged": logged,
        "gradient": [float(value).hex() for value in got[:: max(1, len(got) // 60)]],
        "evaluated": evaluated,
        "tokens": [int((batch["labels"][:, 1:] != -100).sum()) for batch in mine],
    }


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    for state, names in STATES.items():
        applied: Any = rlhf_patches.apply(only=names) if names else {}
        for name in names:
            report[name] = [applied[name].version, applied[name].status.value]
        cases = options.cases[:1] if state == "reverted" else options.cases
        report[state] = {case: trained(case) for case in cases}
        if state == "after":
            reached = rlhf_patches.report()[NAME].reached
            report["reached"] = reached and reached.to_dict()
        rlhf_patches.revert()
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
