"""One step with label smoothing by the real ``Trainer``, with wrapped models: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-smoothed-labels, after it, and after revert(): the distance of loss and
gradient from the definition, in float64 and from the logits of the model without wrappers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from rlhf_patches.patches.transformers import _known_loss
from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import SMOOTHING, Collator, rows, smoothed
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import dense, made
from rlhf_patches.proving import states

NAME = "transformers-smoothed-labels"
Make = Callable[[], Any]
Found = dict[str, torch.Tensor]
COMPILED: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}


def data(kind: str) -> list[Any]:
    found = rows(4, kind)
    return [{**row, "decoder_input_ids": row["input_ids"]} for row in found] if kind == "seq2seq" else found


def gradients(model: Any) -> Found:
    """The gradient of each parameter, whole, under its name in the model itself."""
    return {
        name.replace("_orig_mod.", "").replace("module.", ""): getattr(grad, "full_tensor", lambda grad=grad: grad)()
        for name, parameter in model.named_parameters()
        if (grad := parameter.grad) is not None
    }


class Keep(TrainerCallback):
    """Records the gradients before the step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found = {name: grad.cpu().clone() for name, grad in gradients(model).items()}


@contextlib.contextmanager
def trainer_of(model: Any, kind: str, **arguments: Any) -> Iterator[Trainer]:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(None),
        mock.patch.dict(os.environ),  # where 4.57 leaves torch_compile for the next one
    ):
        given = TrainingArguments(
            output_dir=folder,
            **{"label_smoothing_factor": SMOOTHING, **arguments},
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=4,
            max_steps=1,
            max_grad_norm=0.0,
            save_strategy="no",
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        yield Trainer(model=model, args=given, train_dataset=data(kind), data_collator=Collator())


def by_definition(make: Make) -> tuple[float, Found]:
    model = made(make).double()
    batch = Collator()(data("tokens"))
    loss = smoothed(model(**{name: each for name, each in batch.items() if name != "labels"}), batch["labels"])
    loss.backward()
    return float(loss), gradients(model)


def outcome(make: Make, loss: float, found: Found, asked: int, *, causal: bool) -> dict[str, Any]:
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name].contiguous().numpy().tobytes())
    result: dict[str, Any] = {"bits": digest.hexdigest(), "loss": loss, "asked": asked}
    if causal:
        wanted, gradient = by_definition(make)
        assert found.keys() == gradient.keys()
        far = sum(float((found[name].double() - gradient[name]).square().sum()) for name in found)
        result["loss off"] = abs(loss - wanted) / wanted
        result["gradient off"] = (far / sum(float(each.square().sum()) for each in gradient.values())) ** 0.5
    return result


def step(
    make: Make,
    *,
    kind: str = "tokens",
    causal: bool = True,
    before: Callable[[Any], Any] = lambda model: model,
    **more: Any,
) -> dict[str, Any]:
    """A step by train(), with a model that ``before`` may wrap, and that is ``causal`` for Trainer."""
    with (
        trainer_of(before(made(make)), kind, **more) as trainer,
        mock.patch.object(_known_loss, "unwrapped", wraps=_known_loss.unwrapped) as asked,
    ):
        trainer.add_callback(keep := Keep())
        loss = trainer.train().training_loss
        causal = causal and kind == "tokens" and more.get("label_smoothing_factor") != 0
        return outcome(make, loss, keep.found, asked.call_count, causal=causal)


CASES: dict[str, Callable[[], dict[str, Any]]] = {"compiled": lambda: step(dense, **COMPILED)}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    options = parser.parse_args()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    states.report_cases(NAME, lambda names: {name: cases[name]() for name in names}, options.cases, options.out)
