"""transformers-accumulation-scale: trainers and losses of others, one process, against a loop of our own in float64.

That loop calls the same loss on a float64 copy: the mean over the micro-batches, or, for what is divided by
``num_items_in_batch``, the sum over the window. What the release had right has to keep its bits.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import functional

from rlhf_patches.testing import in_process

transformers = pytest.importorskip("transformers")

from rlhf_patches.patches.transformers import accumulation_scale  # noqa: E402
from tests.patches.transformers.test_accumulation_scale import (  # noqa: E402
    STEPS,
    TOLERANCE,
    VOCABULARY,
    assert_equal,
    off_by,
    rows,
    size,
    with_prompt,
)

assert rows  # the fixture


class Own(torch.nn.Module):
    """A model of somebody's, whose forward takes ``**kwargs`` and gives them to its loss."""

    def __init__(self, loss):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)
        self.loss = loss

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.embedding(input_ids).tanh())
        if labels is None:
            return transformers.utils.ModelOutput(logits=logits)
        return transformers.utils.ModelOutput(loss=self.loss(logits, labels, **kwargs), logits=logits)


def entropy(logits, labels, reduction="mean", **_kwargs):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def focal(logits, labels, **_kwargs):
    losses = entropy(logits, labels, "none")
    return (0.25 * (1 - torch.exp(-losses)) ** 2 * losses).mean()


def masked(logits, labels, **_kwargs):
    mask = (labels != -100).flatten().to(logits.dtype)
    return (entropy(logits, labels, "none") * mask).sum() / mask.sum()


def crf(logits, labels, **_kwargs):
    """Of a chain whose transitions all weigh the same."""
    forward = logits[:, 0]
    for position in range(1, logits.shape[1]):
        forward = torch.logsumexp(forward, 1, keepdim=True) + logits[:, position]
    gold = logits.gather(2, labels.clamp(min=0)[..., None]).sum((1, 2))
    return (torch.logsumexp(forward, 1) - gold).mean()


def connectionist(logits, labels, reduction="mean", **_kwargs):
    lengths = torch.full((len(labels),), logits.shape[1]), torch.full((len(labels),), 1)
    return functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1), labels[:, -1:].clamp(min=1), *lengths, reduction=reduction
    )


def distilled(logits, labels, **_kwargs):
    teacher = torch.linspace(0, 1, VOCABULARY, dtype=logits.dtype).softmax(-1).expand_as(logits)
    divergence = functional.kl_div(functional.log_softmax(logits / 2, -1), teacher, reduction="batchmean")
    return 0.3 * entropy(logits, labels) + 0.7 * 4 * divergence


def two_tasks(logits, labels, **_kwargs):
    return 0.7 * entropy(logits, labels) + 0.3 * functional.mse_loss(logits, torch.zeros_like(logits))


def contrasted(logits, labels, **_kwargs):
    first, second = functional.normalize(logits[0], dim=-1), functional.normalize(logits[0] ** 2, dim=-1)
    return functional.cross_entropy(first @ second.T / 0.05, torch.arange(len(first)))


class Averaged(torch.autograd.Function):
    """A kernel of somebody's."""

    @staticmethod
    def forward(ctx, losses, count):
        ctx.count, ctx.shape = count, losses.shape
        return losses.sum() / count

    @staticmethod
    def backward(ctx, gradient):
        return (gradient / ctx.count).expand(ctx.shape), None


def checkpointed(reentrant, logits, labels, **_kwargs):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(entropy, logits, labels, use_reentrant=reentrant)


OWN = {
    "mean": entropy,
    "focal": focal,
    "masked mean": masked,
    "CRF": crf,
    "CTC": connectionist,
    "distillation": distilled,
    "two tasks": two_tasks,
    "contrastive": contrasted,
    "checkpoint": functools.partial(checkpointed, False),
}


def by(numerator, number, logits, labels, num_items_in_batch):
    return numerator(logits, labels, "sum") / number(num_items_in_batch)


def weighted(logits, labels, num_items_in_batch):
    mask = (labels != -100).flatten().float() / num_items_in_batch
    return (entropy(logits, labels, "none")[None] @ mask[:, None]).sum()


def with_weights(logits, labels, num_items_in_batch):
    weights = torch.ones(VOCABULARY) / num_items_in_batch
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weights, reduction="sum")


def in_a_kernel(logits, labels, num_items_in_batch):
    return Averaged.apply(entropy(logits, labels, "none"), num_items_in_batch)


def divide(number):
    return functools.partial(by, entropy, number)


#: What divides by the number in some way, or adds up as it is.
DIVIDED = {
    "as it is": divide(lambda number: number),
    "a Python number": divide(lambda number: number.item()),
    "an integer": divide(int),
    "another type": divide(torch.Tensor.double),
    "clamped": divide(lambda number: number.clamp(min=1)),
    "with an epsilon": divide(lambda number: number + 1e-8),
    "its inverse": divide(lambda number: 1 / (1 / number)),
    "in a matrix product": weighted,
    "in the classes' weights": with_weights,
    "in a kernel": in_a_kernel,
    "absolute": lambda *given, **number: DIVIDED["as it is"](*given, **number).abs(),
    "a sum": functools.partial(entropy, reduction="sum"),
    "a sum over sequences": functools.partial(connectionist, reduction="sum"),
}


def window(rows):
    return rows[:STEPS]


def gradient_of(model, micro_batches, loss_of):
    """By definition, in float64: the mean of the micro-batches' losses."""
    model = copy.deepcopy(model).double()
    losses = []
    for row in micro_batches:
        inputs = {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([with_prompt(row)])}
        losses.append(loss_of(model, inputs))
    sum(losses).div(len(losses)).backward()
    return {name: each.grad for name, each in model.named_parameters()}, float(sum(losses).detach()) / len(losses)


def made(loss):
    torch.manual_seed(1)
    return Own(loss)


@functools.cache
def trainer_of(kind, folder):
    arguments = transformers.TrainingArguments(
        str(folder), gradient_accumulation_steps=STEPS, use_cpu=True, report_to="none"
    )
    trainer = kind(model=made(entropy), args=arguments)
    trainer.current_gradient_accumulation_steps = STEPS
    return trainer


def run(loss, rows, tmp_path, kind=transformers.Trainer):
    """The gradient of a step, and its loss, by the trainer's own functions, without a loop that only takes time."""
    model, trainer = made(loss), trainer_of(kind, tmp_path)
    micro_batches = [
        {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([with_prompt(row)])}
        for row in window(rows)
    ]
    trainer.train_dataset = micro_batches
    number = trainer._get_num_items_in_batch(micro_batches, torch.device("cpu"))
    logged = sum(trainer.training_step(model, batch, number).item() for batch in micro_batches)
    return [{name: each.grad.clone() for name, each in model.named_parameters()}], [logged]


class Heard(logging.Handler):
    """What the patch says, by the case that is under way."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def times(value):
    return lambda logits, labels, **_: entropy(logits, labels) * value


def loss_of_model(trainer, model, inputs, number):
    """What transformers' own compute_loss does."""
    return transformers.Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=number)


def trainer_with(compute):
    class Overriding(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return compute(self, model, inputs, num_items_in_batch)

    Overriding.__name__ = compute.__name__  # messages have it, and each is said once
    return Overriding


def weighing(trainer, model, inputs, number):
    logits = model(input_ids=inputs["input_ids"]).logits
    weights = torch.linspace(1, 2, VOCABULARY, dtype=logits.dtype)
    return functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), weights)


class Weighing(transformers.Trainer):
    def compute_loss(self, model, inputs, **_others):
        return weighing(self, model, inputs, None)


def adding(trainer, model, inputs, number):
    loss = loss_of_model(trainer, model, inputs, number)
    return loss + 0.1 * model(input_ids=inputs["input_ids"]).logits.square().mean()


def adding_in_place(trainer, model, inputs, number):
    loss = loss_of_model(trainer, model, inputs, number)
    loss += 0.1 * model(input_ids=inputs["input_ids"]).logits.square().mean()
    return loss


def of_two_calls(trainer, model, inputs, number):
    reversed_ = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
    return (loss_of_model(trainer, model, inputs, number) + loss_of_model(trainer, model, reversed_, number)) / 2


def keeping_the_number(trainer, model, inputs, number):
    return loss_of_model(trainer, model, inputs, None)


#: By case: the trainer, and what it computes.
OVERRIDDEN = {
    "weighted": (Weighing, weighing),
    "adding": (trainer_with(adding), adding),
    "adding in place": (trainer_with(adding_in_place), adding_in_place),
    "two calls": (trainer_with(of_two_calls), of_two_calls),
    "keeping the number": (trainer_with(keeping_the_number), keeping_the_number),
}


class Stand:
    """What an overridden compute_loss needs of a trainer, in our loop."""

    compute_loss_func = label_smoother = None
    model_accepts_loss_kwargs = False
    args = transformers.TrainingArguments("unused", average_tokens_across_devices=False, use_cpu=True, report_to="none")

    class accelerator:
        parallelism_config = None


def dividing(trainer, model, inputs, number):
    return loss_of_model(trainer, model, inputs, number) / trainer.args.gradient_accumulation_steps


def dividing_in_place(trainer, model, inputs, number):
    loss = loss_of_model(trainer, model, inputs, number)
    loss /= trainer.accelerator.gradient_accumulation_steps * STEPS
    return loss


def multiplying(trainer, model, inputs, number):
    return loss_of_model(trainer, model, inputs, number) * (1 / STEPS)


def dividing_its_own(trainer, model, inputs, number):
    logits = model(input_ids=inputs["input_ids"]).logits
    return (0.3 * entropy(logits, inputs["labels"]) + 0.7 * logits.square().mean()) / STEPS


def summing_up(trainer, model, inputs, number):
    return entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"], "sum")


def counting(trainer, model, inputs, number):
    return summing_up(trainer, model, inputs, number) / number.item()


def with_a_margin(trainer, model, inputs, number):
    reversed_ = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
    difference = loss_of_model(trainer, model, inputs, number) - loss_of_model(trainer, model, reversed_, number)
    return functional.softplus(difference)


def with_a_margin_of_means(*given):
    return with_a_margin(*given)


DEALT_WITH = {
    "dividing": dividing,
    "in place": dividing_in_place,
    "multiplying": multiplying,
    "a weighted sum": dividing_its_own,
    "a sum": summing_up,
    "counting": counting,
}


class Setting(transformers.Trainer):
    """With a compute_loss whose code cannot be read."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.compute_loss = functools.partial(lambda model, inputs, num_items_in_batch: model(**inputs)["loss"] * 2)


#: By case: the model's loss, and the trainer.
LEFT = {
    "a margin of two divided losses": (DIVIDED["as it is"], trainer_with(with_a_margin)),
    "a margin of two means": (entropy, trainer_with(with_a_margin_of_means)),
    "a partial function": (entropy, Setting),
}


@dataclass
class Found:
    """Gradient and loss of a step as released, the same with the patch, and what that said."""

    released: Any
    patched: Any = None
    said: list[str] = field(default_factory=list)


CASES = (
    {("own", name): (loss, transformers.Trainer) for name, loss in OWN.items()}
    | {("divided", name): (loss, transformers.Trainer) for name, loss in DIVIDED.items()}
    | {("overridden", name): (entropy, kind) for name, (kind, _) in OVERRIDDEN.items()}
    | {("dealt with", name): (entropy, trainer_with(compute)) for name, compute in DEALT_WITH.items()}
    | {("left", name): case for name, case in LEFT.items()}
    | {
        ("added", compute.__name__): (DIVIDED["as it is"], trainer_with(compute))
        for compute in (adding, adding_in_place)
    }
    | {("no value", str(value)): (times(value), transformers.Trainer) for value in (math.nan, math.inf)}
)


@pytest.fixture(scope="module")
def found(rows, tmp_path_factory):
    """Of all cases: to put a patch on and take it off takes longer than a step."""
    folder = tmp_path_factory.mktemp("trainers")
    results = {name: Found(run(loss, rows, folder, kind)) for name, (loss, kind) in CASES.items()}
    heard = Heard()
    logging.getLogger("rlhf_patches").addHandler(heard)
    try:
        with in_process.applied(accumulation_scale.PATCH):
            for name, (loss, kind) in CASES.items():
                heard.messages = results[name].said
                results[name].patched = run(loss, rows, folder, kind)
    finally:
        logging.getLogger("rlhf_patches").removeHandler(heard)
    return results


def assert_divided(found, reference, mean):
    assert float(size(found.released[0][0]) / size(reference)) == pytest.approx(STEPS, rel=1e-4)
    assert off_by(found.patched[0][0], reference) < TOLERANCE
    assert found.patched[1] == pytest.approx([mean], rel=1e-5)
    assert not found.said


@pytest.mark.parametrize("case", OWN)
def test_a_loss_of_somebodys_model_is_divided(found, rows, case):
    reference = gradient_of(made(OWN[case]), window(rows), lambda model, inputs: model(**inputs).loss)
    assert_divided(found["own", case], *reference)


@pytest.mark.parametrize("case", OVERRIDDEN)
def test_an_overridden_compute_loss_is_divided(found, rows, case):
    compute = OVERRIDDEN[case][1]
    reference = gradient_of(made(entropy), window(rows), lambda model, inputs: compute(Stand(), model, inputs, None))
    assert_divided(found["overridden", case], *reference)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in ("divided", "dealt with")])
def test_what_uses_the_number_or_divides_keeps_its_bits(found, case):
    """Whatever is made of the number first: a loss that may be divided by it is left."""
    assert_equal(found[case].patched, found[case].released)


@pytest.mark.parametrize("case", LEFT)
def test_what_cannot_be_told_is_left_and_said(found, case):
    assert_equal(found["left", case].patched, found["left", case].released)
    assert len(found["left", case].said) == 1
    assert "cannot be told" in found["left", case].said[0]


@pytest.mark.parametrize("compute", [adding, adding_in_place])
def test_what_is_added_to_a_divided_loss_is_divided(found, rows, compute):
    number = sum(label != -100 for row in window(rows) for label in with_prompt(row))

    def defined(model, inputs):
        logits = model(input_ids=inputs["input_ids"]).logits
        return STEPS * entropy(logits, inputs["labels"], "sum") / number + 0.1 * logits.square().mean()

    reference, _ = gradient_of(made(entropy), window(rows), defined)
    case = found["added", compute.__name__]
    assert off_by(case.released[0][0], reference) > 0.01
    assert off_by(case.patched[0][0], reference) < TOLERANCE


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_without_a_value_stays_one(found, value):
    assert str(found["no value", value].patched[1][0]) == value
