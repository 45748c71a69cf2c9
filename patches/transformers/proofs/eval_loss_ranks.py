"""Evaluations of small models by ``Trainer``, on each of one or two ranks: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-eval-loss, after it, and after revert(). The reference, in float64 and from
the logits, is the mean over samples of their batch's mean: for the batches of the ranks, and for those of one rank.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy, log_softmax
from transformers import Trainer, TrainingArguments

from rlhf_patches.patches.transformers import _batch_counts
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import dense, made
from rlhf_patches.proving import states

NAME = "transformers-eval-loss"
VOCABULARY, LENGTH, SMOOTHING = 32, 10, 0.1
Row = dict[str, Any]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


# ------------------------------------------------------------------------------------------------- models, data


def rows(number: int, kind: str) -> list[Row]:
    """Sequences with very different numbers of predicted tokens; the first token is never predicted."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for i in range(number):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: LENGTH - 1 - (4 * i) % (LENGTH - 1)] = -100
        if kind == "one has no labels" and i == 1:
            labels[:] = -100
        found.append(
            {
                "id": i,
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": torch.tensor(i % 3) if kind == "classes" else labels,
            }
        )
    return found


class Collator:
    """Records the samples of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, samples: list[Row]) -> Row:
        self.batches.append([sample["id"] for sample in samples])
        kept = [{name: one for name, one in sample.items() if name != "id"} for sample in samples]
        collated: Row = torch.utils.data.default_collate(kept)
        return collated


# ------------------------------------------------------------------------------------------------- the definition


def of_shifted(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def smoothed(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Szegedy et al., 2015: the targets' part, and that of the whole vocabulary."""
    kept = labels[:, 1:] != -100
    of_all = -log_softmax(outputs.logits[:, :-1], -1)[kept]
    nll = of_all.gather(1, labels[:, 1:][kept][:, None]).mean()
    return (1 - SMOOTHING) * nll + SMOOTHING * of_all.mean()


def wanted(
    make: Callable[[], Any], data: list[Row], loss: Loss, steps: Iterable[Iterable[list[int]]], size: int
) -> list[float]:
    """In float64, by sample, its batch's mean, without the samples that fill up the last step.

    Args:
        make: creates the model.
        data: all rows.
        loss: the loss of a batch.
        steps: for each step, the samples of each rank's batch.
        size: the size of a batch.
    """
    model = made(make).double().eval()
    found = []
    for batch in [batch for step in steps for batch in step]:
        given = Collator()([data[i] for i in batch])
        with torch.no_grad():
            found += [float(loss(model(**given), given["labels"]))] * size
    return found[: len(data)]


# ------------------------------------------------------------------------------------------------- evaluations


def bits(of: Any) -> str:
    return hashlib.sha256(b"".join(torch.as_tensor(one).contiguous().numpy().tobytes() for one in of)).hexdigest()


@contextlib.contextmanager
def trainer(
    make: Callable[[], Any], data: list[Row], size: int, of: type[Trainer] = Trainer, **more: Any
) -> Iterator[Any]:
    arguments = more.pop("arguments", {})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        yield of(
            model=made(make),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=not torch.cuda.is_available(),
                ddp_backend="gloo",
                per_device_eval_batch_size=size,
                per_device_train_batch_size=size,
                remove_unused_columns=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                **arguments,
            ),
            eval_dataset=data,
            train_dataset=data,
            data_collator=Collator(),
            **more,
        )


def of_all_ranks(mine: Any) -> list[Any]:
    if not torch.distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def one(
    make: Callable[[], Any], loss: Loss, number: int, size: int, kind: str = "tokens", **more: Any
) -> dict[str, Any]:
    """An evaluation, and its expected result: with the batches of the ranks, and with those of one rank."""
    data, seen = rows(number, kind), []

    def compute_metrics(found: Any) -> dict[str, float]:
        predictions = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        seen.append(bits([predictions, found.label_ids]))
        return {}

    with trainer(make, data, size, compute_metrics=compute_metrics, **more) as evaluating:
        evaluated = evaluating.evaluate()["eval_loss"]
        batches = list(evaluating.data_collator.batches)
        counts = getattr(evaluating, "counts", [])
    gc.collect()
    alone = [[list(range(i, min(i + size, number)))] for i in range(0, number, size)]
    return {
        "loss": evaluated,
        "metrics": seen,
        "counts": counts,
        "left": len(_batch_counts._own),
        "wanted": wanted(make, data, loss, zip(*of_all_ranks(batches), strict=True), size),
        "wanted of one rank": wanted(make, data, loss, alone, size),
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {"causal": lambda: one(dense, of_shifted, 3, 1)}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES, afterwards: Sequence[str] = ("causal",)) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    options = parser.parse_args()
    reverted = [case for case in afterwards if case in options.cases]
    states.report_cases(
        NAME, lambda names: {name: cases[name]() for name in names}, options.cases, options.out, reverted=reverted
    )
