"""Gradients of GKD's and GOLD's trainers and the same by their definitions in float64: ``--out FOLDER CASE...``.

Each case before apply() of trl-distillation-scale, after it, and with transformers-accumulation-scale as well; the
first one after revert() too.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

import rlhf_patches
from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.patches.trl.proofs import distilling, small
from rlhf_patches.proving import states

NAME = "trl-distillation-scale"
BESIDE = "transformers-accumulation-scale"
SAMPLES = 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# A prompt of one to three letters, and answers of two to nine: what each micro-batch has differs. The longest answer is
# to the longest prompt, as until 1.6.0 the first tokens of another would be left out.
PROMPTS = [LETTERS[row : row + 1 + (row + 1) % 3] for row in range(SAMPLES)]
ANSWERS = [LETTERS[2 * row : 2 * row + 2 + row] for row in range(SAMPLES)]


class CountsItself(GKDTrainer):
    """Has repaired the number of tokens itself."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)
        return batches, items / self.accelerator.num_processes


class CountsDecorated(GKDTrainer):
    """The same under a decorator, which gives a function the module of the one that it stands for."""

    @functools.wraps(GKDTrainer.get_batch_samples)
    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)
        return batches, items / self.accelerator.num_processes


class Multiplies(GKDTrainer):
    """Has repaired the loss itself."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs or num_items_in_batch is None else loss * self.accelerator.num_processes


class Averages(GKDTrainer):
    """Has a loss of its own, a mean, which is right with one micro-batch."""

    @staticmethod
    def generalized_jsd_loss(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return GKDTrainer.generalized_jsd_loss(*args, **kwargs)


KINDS: dict[str, tuple[Any, Any]] = {
    "GKD": (GKDTrainer, GKDConfig),
    "Own": (CountsItself, GKDConfig),
    "Decorated": (CountsDecorated, GKDConfig),
    "Multiplies": (Multiplies, GKDConfig),
    "Averages": (Averages, GKDConfig),
    "GOLD": (GOLDTrainer, GOLDConfig),
    "ULD": (GOLDTrainer, GOLDConfig),
}
MORE: dict[str, dict[str, Any]] = {
    "alone": {"average_tokens_across_devices": False},
    "generated": {"lmbda": 1.0},
}


def letters() -> Any:
    """A tokenizer of bytes, as GOLD wants it, with fewer tokens than the model."""
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", *LETTERS, "Ġ"])}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = distilling.TEMPLATE
    return made


def rows() -> datasets.Dataset:
    pairs = zip(PROMPTS, ANSWERS, strict=True)
    turns = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}] for prompt, answer in pairs
    ]
    return datasets.Dataset.from_list([{"messages": each} for each in turns])


def made(case: str) -> Any:
    """The trainer of a case, such as ``GOLD 8``, ``GKD 1 alone`` or ``GOLD 2 generated``: micro-batches, and more."""
    name, steps, *more = case.split()
    kind, config = KINDS[name]
    words, model, folder = letters(), small.model(), states.folder()
    settings: dict[str, Any] = {"lmbda": 0.0, "temperature": 1.0, "beta": 0.5}
    settings |= {"max_new_tokens": 4} if config is GKDConfig else {"max_completion_length": 4}
    if name == "ULD":
        words.save_pretrained(folder)
        settings |= {"use_uld_loss": True, "use_extended_uld": False, "uld_use_hybrid_loss": False}
        settings |= {"teacher_tokenizer_name_or_path": folder}
    for each in more:
        settings |= MORE[each]
    arguments = config(
        folder,
        per_device_train_batch_size=SAMPLES // int(steps) // int(os.environ["WORLD_SIZE"]),
        per_device_eval_batch_size=SAMPLES,
        gradient_accumulation_steps=int(steps),
        max_steps=1,
        max_length=32,
        logging_steps=1,
        **small.STEPS,
        **settings,
    )
    optimizer = Kept(model.parameters(), lr=0.1)
    return kind(
        model=model,
        teacher_model=distilling.teacher(),
        args=arguments,
        train_dataset=rows(),
        eval_dataset=rows(),
        processing_class=words,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )


def divergence(model: Any, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """By the definition: the mean over all tokens that have a label, and that of the means."""
    sums, tokens = distilling.divergences(model, batches)
    means = [total / number for total, number in zip(sums, tokens, strict=True)]
    return torch.stack(sums).sum() / sum(tokens), torch.stack(means).mean()


def compared(got: torch.Tensor, batches: list[dict[str, Any]]) -> dict[str, float]:
    """How many times as large as by the definitions a gradient is, and how far off."""
    found: dict[str, float] = {}
    for place, name in enumerate(("tokens", "means")):
        model = small.model().double()  # no step has changed it
        divergence(model, batches)[place].backward()
        wanted = torch.cat([each.grad.flatten() for each in model.parameters()])
        found[f"factor of {name}"] = float(got @ wanted / (wanted @ wanted))
        found[f"error of {name}"] = float((got - wanted).norm() / wanted.norm())
    return found


def trained(case: str) -> dict[str, Any]:
    """Its gradient, the losses that it logs, and how the gradient compares with that of the definitions."""
    trainer = made(case)
    evaluated = trainer.evaluate()["eval_loss"]
    got, mine, everywhere = distilling.recorded(trainer)
    batches = [batch for each in everywhere for batch in each]
    with torch.no_grad():
        outside = float(trainer.compute_loss(trainer.model.train(), dict(mine[0])))
    return {
        "gradient": [float(value).hex() for value in got[:: max(1, len(got) // 60)]],
        "norm": float(got.norm()),
        "evaluated": evaluated,
        "logged": next(each["loss"] for each in trainer.state.log_history if "loss" in each),
        "outside train()": outside,
        "tokens": [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches],
        **({} if case.startswith("ULD") else compared(got, batches)),
    }


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"before": {case: trained(case) for case in arguments.cases}}
    row = rlhf_patches.apply(only=NAME)[NAME]
    found.update(version=row.version, status=row.status.value)
    found["after"] = {case: trained(case) for case in arguments.cases}
    reached = rlhf_patches.report()[NAME].reached
    found["reached"] = reached and reached.to_dict()
    rlhf_patches.apply(only=[NAME, BESIDE])
    found["beside"] = {case: trained(case) for case in arguments.cases[:1]}
    rlhf_patches.revert()
    found["reverted"] = {case: trained(case) for case in arguments.cases[:1]}
    (arguments.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
