"""One step of models whose labels begin with a token that counts, by ``Trainer``: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-first-token-count, after it, and after revert(): the gradient, and that of the
mean over the predicted tokens, in float64 and from the logits.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import Collator, rows
from rlhf_patches.patches.transformers.proofs.kept_gradient import multiple
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import made
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "transformers-first-token-count"
ROWS, VOCABULARY = 4, 32
Make = Callable[[], Any]


def gpt2(kind: Any = transformers.GPT2LMHeadModel, **more: Any) -> Any:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = kind(config)
    for name, value in more.items():
        setattr(model, name, value)
    return model


def data(kind: str) -> list[Any]:
    """Rows whose tokens all count, except the first if that is ``kind``."""
    found = rows(ROWS, kind)
    if kind in ("tokens", "not the first"):
        for number, row in enumerate(found):
            row["labels"] = row["input_ids"].clone()
            row["labels"][5 + number :] = -100
            if kind == "not the first":
                row["labels"][0] = -100
    return found


class Keep(TrainerCallback):
    """Records the gradients before the step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found = {
            name.removeprefix("_orig_mod."): each.grad.cpu().clone()
            for name, each in model.named_parameters()
            if each.grad is not None
        }


def by_definition(make: Make, kind: str) -> dict[str, torch.Tensor]:
    model = made(make).double()
    batch = Collator()(data(kind))
    logits = model(**{name: each for name, each in batch.items() if name != "labels"}).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def step(
    make: Make, *, kind: str = "tokens", causal: bool = True, wrap: Callable[[Any], Any] = lambda model: model,
    of: type[Trainer] = Trainer, own_loss: Any = None, change: Callable[[Any], Any] = lambda trainer: None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The results of a step, the factor on the gradient by definition, and the distance from that multiple.

    Args:
        make: creates the model.
        kind: the kind of rows.
        causal: whether it has that definition.
        wrap: wraps the model first.
        of: the trainer's class.
        own_loss: its ``compute_loss_func``.
        change: modifies the trainer after its construction.
        more: training arguments.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        model = wrap(made(make))
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            **{"per_device_train_batch_size": ROWS, **more},
            max_steps=1,
            max_grad_norm=0.0,
            save_strategy="no",
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
        )
        touched = ""
        given = {"model": model, "args": arguments, "train_dataset": data(kind), "compute_loss_func": own_loss}
        try:
            with untouched(model):
                trainer = of(**given, data_collator=Collator())
        except AssertionError as error:
            touched = str(error)
            trainer = of(**given, data_collator=Collator())
        change(trainer)
        trainer.add_callback(keep := Keep())
        loss = trainer.train().training_loss
    digest = hashlib.sha256()
    for name in sorted(keep.found):
        digest.update(name.encode() + keep.found[name].contiguous().numpy().tobytes())
    result = {"bits": digest.hexdigest(), "loss": loss, "touched": touched}
    if causal:
        result |= multiple(keep.found, by_definition(make, kind))
    return result


CASES: dict[str, Callable[[], dict[str, Any]]] = {"GPT-2": lambda: step(gpt2)}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    options = parser.parse_args()
    states.report_cases(NAME, lambda names: {name: cases[name]() for name in names}, options.cases, options.out)
