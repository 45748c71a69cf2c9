"""The gradient of eight samples by a trainer of TRL, at once and one by one: ``--out FOLDER``.

Together with it, in float64 and without a trainer, the mean over the samples of what the trainer's method defines.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import datasets
import torch
import torch.nn.functional as F
import transformers
from trl import SFTConfig, SFTTrainer

from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "transformers-accumulation-scale"
SAMPLES = 8
TOKENS = [{"input_ids": [3 + i, 40 - i, 5 + i, 6], "labels": [-100, i // 4, -100, i % 2]} for i in range(SAMPLES)]
# Of an answer two words, and what ends a text.
ANSWERS = [[6, 7, 9 + i, 20 - i, 1] for i in range(SAMPLES)]
ANSWERED = 3
TEMPLATE = "{% for each in messages %}{{ each['content'] + ' ' }}{% endfor %}"


def classifier() -> Any:
    torch.manual_seed(2)
    config = copy.deepcopy(small.model().config)
    config.num_labels, config.pad_token_id = 2, 0
    return transformers.Qwen2ForTokenClassification(config)


def teacher() -> Any:
    made = small.model()
    torch.manual_seed(3)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def of_steps(model: Any) -> torch.Tensor:
    """PRM: cross-entropy at the end of each step of reasoning."""
    logits = model(torch.tensor([each["input_ids"] for each in TOKENS])).logits
    return F.cross_entropy(logits.flatten(0, 1), torch.tensor([each["labels"] for each in TOKENS]).flatten())


def of_divergence(model: Any) -> torch.Tensor:
    """GKD: Jensen and Shannon's divergence with weight one half of the answers' words, by its definition."""
    ids = torch.tensor(ANSWERS)
    ours, other = (each(ids).logits[:, -ANSWERED - 1 : -1].softmax(-1) for each in (model, teacher().double()))
    middle = (ours + other) / 2
    return ((ours * (ours / middle).log() + other * (other / middle).log()) / 2).sum(-1).mean()


def gradient(model: Any, steps: int, kind: Any, config: Any, rows: list[dict[str, Any]], **more: Any) -> torch.Tensor:
    arguments = config(
        states.folder(),
        per_device_train_batch_size=SAMPLES // steps,
        gradient_accumulation_steps=steps,
        max_steps=1,
        **small.STEPS,
        **({"lmbda": 0.0, "temperature": 1.0, "beta": 0.5} if config.__name__ == "GKDConfig" else {}),
    )
    words = small.tokenizer()
    words.chat_template = TEMPLATE
    optimizer = Kept(model.parameters(), lr=0.1)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=words,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        **more,
    )
    trainer.train()
    return torch.cat([each.flatten() for each in optimizer.found]).double()


def messages() -> list[dict[str, Any]]:
    words = small.tokenizer()
    return [
        {
            "messages": [
                {"role": "user", "content": words.decode(each[:2])},
                {"role": "assistant", "content": words.decode(each[2:])},
            ]
        }
        for each in ANSWERS
    ]


class OwnSFT(SFTTrainer):
    """As many are: it looks at what SFTTrainer returns."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(*arguments, **options)


def observe_sft() -> dict[str, Any]:
    """SFT's gradient of eight samples one by one, bit for bit, and what is said of it."""
    found = {}
    with states.heard() as said:
        for kind in (SFTTrainer, OwnSFT):
            made = gradient(small.model(), SAMPLES, kind, SFTConfig, messages())
            found[kind.__name__] = [each.hex() for each in made.tolist()]
    return {**found, "said": [each for each in said if "left as released" in each]}


def observe() -> dict[str, Any]:
    """Of each trainer: sizes of the gradients over that of the reference, and how far off they are."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.experimental.prm import PRMConfig, PRMTrainer

    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor], tuple[Any, ...], dict[str, Any]]] = {
        "PRM": (classifier, of_steps, (PRMTrainer, PRMConfig, TOKENS), {}),
        "GKD": (small.model, of_divergence, (GKDTrainer, GKDConfig, messages()), {"teacher_model": teacher()}),
    }
    found: dict[str, Any] = {}
    for name, (make, loss, arguments, more) in cases.items():
        reference = make().double().eval()  # PRMTrainer takes dropout away
        loss(reference).backward()
        wanted = torch.cat([each.grad.flatten() for each in reference.parameters() if each.grad is not None])
        for steps in (1, SAMPLES):
            got = gradient(make(), steps, *arguments, **more)
            times = float(got.norm() / wanted.norm())
            found[f"{name} {steps}"] = {"times": times, "off": float((got - wanted).norm() / wanted.norm())}
    return found


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    parser = states.parser()
    parser.add_argument("--sft", action="store_true", help="SFTTrainer alone")
    options = parser.parse_args()
    states.report(NAME, observe_sft if options.sft else observe, options.out)
