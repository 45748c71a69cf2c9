"""The gradient of eight samples by Trainer, at once and one by one, in one release: ``--out FOLDER --first PATH``.

Each model before apply() of transformers-accumulation-scale, after it, and after revert(); beside it, in float64, what
a plain loop computes from the model's logits. A sample has as many labels as any other, so a mean over samples is one
over labels. One process, in which no transformers is imported before ``PATH`` is put first on sys.path.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.proving import states

NAME = "transformers-accumulation-scale"
SAMPLES, LENGTH, WORDS, CLASSES, SMOOTHING = 8, 7, 32, 3, 0.1

generator = torch.Generator().manual_seed(1)
IDS = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
OTHERS = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
KINDS = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
NUMBERS = torch.randn(SAMPLES, generator=generator)
STARTS = torch.randint(0, LENGTH, (SAMPLES,), generator=generator)
MASKED = torch.where(torch.arange(LENGTH) % 3 == 0, OTHERS, -100)
NEXT = torch.where(torch.arange(LENGTH) > 0, IDS, -100)  # nothing predicts the first; some releases count it


class Case(NamedTuple):
    """A model, what it is trained on, and its loss, from a copy of it in float64."""

    make: Callable[[], Any]
    data: dict[str, torch.Tensor]
    loss: Callable[[Any], torch.Tensor]
    smoothing: float = 0.0


SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}


def llama(head: str, **more: Any) -> Callable[[], Any]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0}
    return lambda: small("Llama", head, **SIZES, **heads, **more)


def bert(head: str, **more: Any) -> Callable[[], Any]:
    others = {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return lambda: small("Bert", head, **SIZES, **others, **more)


def t5() -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return small("T5", "ConditionalGeneration", **sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)


def small(name: str, head: str, **configuration: Any) -> Any:
    transformers = importlib.import_module("transformers")
    return getattr(transformers, f"{name}For{head}")(getattr(transformers, f"{name}Config")(**configuration))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)


def of_words(model: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(input_ids=IDS).logits, labels)


def of_the_next(model: Any, smoothing: float = 0.0) -> torch.Tensor:
    return cross_entropy(model(input_ids=IDS).logits[:, :-1], IDS[:, 1:], smoothing)


def of_kinds(model: Any) -> torch.Tensor:
    return cross_entropy(model(input_ids=IDS).logits, KINDS)


def of_t5(model: Any) -> torch.Tensor:
    before = torch.cat([torch.zeros_like(OTHERS[:, :1]), OTHERS[:, :-1]], 1)
    return cross_entropy(model(input_ids=IDS, decoder_input_ids=before).logits, OTHERS)


def of_spans(model: Any) -> torch.Tensor:
    found = model(input_ids=IDS)
    return (F.cross_entropy(found.start_logits, STARTS) + F.cross_entropy(found.end_logits, STARTS)) / 2


def labeled(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "labels": labels}


CASES = {
    "Llama, classes": Case(llama("SequenceClassification", num_labels=CLASSES), labeled(KINDS), of_kinds),
    "Llama, a number": Case(
        llama("SequenceClassification", num_labels=1),
        labeled(NUMBERS),
        lambda model: F.mse_loss(model(input_ids=IDS).logits[:, 0], NUMBERS.double()),
    ),
    "BERT, classes": Case(bert("SequenceClassification", num_labels=CLASSES), labeled(KINDS), of_kinds),
    "BERT, masked words": Case(bert("MaskedLM"), labeled(MASKED), lambda model: of_words(model, MASKED)),
    "T5": Case(t5, labeled(OTHERS), of_t5),
    "Llama, words": Case(llama("CausalLM"), labeled(NEXT), of_the_next),
    "Llama, smoothed": Case(llama("CausalLM"), labeled(NEXT), lambda model: of_the_next(model, SMOOTHING), SMOOTHING),
    "Llama, spans": Case(
        llama("QuestionAnswering"), {"input_ids": IDS, "start_positions": STARTS, "end_positions": STARTS}, of_spans
    ),
}


def trained(model: Any, case: Case, size: int) -> tuple[list[torch.Tensor], float]:
    """The gradient of a step, ``size`` samples at a time, and the loss that is logged."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    optimizer = Kept(model.parameters(), lr=0.0)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=SAMPLES // size,
            label_smoothing_factor=case.smoothing,
            max_steps=1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{name: one[row] for name, one in case.data.items()} for row in range(SAMPLES)],
            data_collator=default_data_collator,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        )
        logged = trainer.train().training_loss
    return optimizer.found, logged


def flat(gradient: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.double().flatten() for each in gradient])


def measured(case: Case) -> dict[str, Any]:
    """How often the right gradient is in the one found, what is left of it beside that, and the same of the loss."""
    torch.manual_seed(0)
    model = case.make().train()
    exact = copy.deepcopy(model).double()
    loss = case.loss(exact)
    loss.backward()
    wanted = flat([each.grad for each in exact.parameters() if each.grad is not None])
    found: dict[str, Any] = {}
    for name, size in (("at once", SAMPLES), ("one by one", 1)):
        bits, logged = trained(copy.deepcopy(model), case, size)
        gradient = flat(bits)
        times = float(gradient @ wanted / (wanted @ wanted))
        found[name] = {
            "gradient": times,
            "beside": float((gradient - times * wanted).norm() / gradient.norm()),
            "logged": logged / float(loss.detach()),
            "bits": hashlib.sha256(b"".join(each.numpy().tobytes() for each in bits)).hexdigest(),
        }
    return found


def main() -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # else accelerate makes a group of one
        os.environ.pop(name, None)
    parser = states.parser()
    parser.add_argument("--first", default="")
    options = parser.parse_args()
    sys.path[:0] = filter(None, options.first.split(os.pathsep))
    importlib.invalidate_caches()
    states.report(NAME, lambda: {name: measured(case) for name, case in CASES.items()}, options.out)
