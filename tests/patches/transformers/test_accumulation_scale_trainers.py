"""transformers-accumulation-scale: users' models, losses and trainers, one process.

What is not known by identity keeps every bit that the release gives it, right or wrong: which of the two it is, its
author knows. What hands on the loss of transformers' own code is repaired, against a loop of our own in float64.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import logging
import textwrap
import types
import weakref
from unittest import mock

import pytest
import torch
from torch.nn import functional
from torch.optim import optimizer

from rlhf_patches.testing import in_process
from tests.harness.by_case import ByCase, exhaustive_but

transformers = pytest.importorskip("transformers")

from accelerate import hooks  # noqa: E402
from transformers.loss import loss_utils  # noqa: E402
from transformers.models.bert import modeling_bert  # noqa: E402

from rlhf_patches.patches.transformers import (  # noqa: E402
    _accumulation,
    _known_loss,
    _known_trainer,
    accumulation_scale,
)
from tests.patches.transformers.test_accumulation_scale import (  # noqa: E402
    CASES,
    SMALL,
    STEPS,
    STILL,
    TOLERANCE,
    assert_equal,
    off_by,
    rows,
    size,
    wanted,
)

assert rows  # the fixture
Trainer = transformers.Trainer


def entropy(logits, labels, reduction="mean"):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


# -- users' losses of a causal model, as `loss_function`


def divided(number):
    def loss(logits, labels, vocab_size=None, num_items_in_batch=None, **_kwargs):
        return entropy(logits, labels, "sum") / number(num_items_in_batch)

    return loss


def by_share(logits, labels, vocab_size=None, num_items_in_batch=None, **_kwargs):
    return entropy(logits, labels) * ((labels[:, 1:] != -100).sum() / num_items_in_batch)


def ignoring_the_number(logits, labels, **_kwargs):
    return entropy(logits, labels)


LOSSES = {
    "clamped": divided(lambda number: number.clamp(min=1)),
    "with an epsilon": divided(lambda number: number + 1e-8),
    "another type": divided(torch.Tensor.double),
    "single precision": divided(lambda number: number.to(torch.float32)),
    "half precision": divided(lambda number: number.to(torch.bfloat16)),
    "a Python number": divided(int),
    "as it is": divided(lambda number: number),
    "a share": by_share,
    "a mean": ignoring_the_number,
}
losses = types.SimpleNamespace(chosen=LOSSES["clamped"])
BY_NAME = {"chosen": LOSSES["clamped"]}


def llama():
    return CASES["Llama"][0]()


def with_loss(loss):
    def made():
        model = llama()
        model.loss_function = loss
        return model

    return made


class OfItsOwn(transformers.LlamaForCausalLM):
    loss_function = staticmethod(LOSSES["clamped"])


class Returned(transformers.LlamaForCausalLM):
    @property
    def loss_function(self):
        return BY_NAME["chosen"]


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, *arguments, num_items_in_batch=None, **options):
        outputs = function(self, *arguments, **options)
        outputs.loss = outputs.loss * (options["labels"][:, 1:] != -100).sum() / num_items_in_batch.clamp(min=1)
        return outputs

    return wrapper


class Decorated(transformers.LlamaForCausalLM):
    forward = decorated(transformers.LlamaForCausalLM.forward)


def of_class(kind):
    return lambda: kind(llama().config)


def hooked():
    model = CASES["BERT, classes"][0]()
    model.register_forward_hook(lambda module, given, outputs: type(outputs)({**outputs, "loss": outputs.loss / STEPS}))
    return model


OF_PROFILE = """
class Own(Llama):
    @functools.wraps(Llama.forward)
    def forward(self, *arguments, num_items_in_batch=None, **options):
        outputs = Llama.forward(self, *arguments, **options)
        outputs.loss = outputs.loss * (options["labels"][:, 1:] != -100).sum() / num_items_in_batch.clamp(min=1)
        return outputs
"""


def of_a_module_called_profile():
    scope = {"__name__": "profile", "functools": functools, "Llama": transformers.LlamaForCausalLM}
    exec(compile(OF_PROFILE, "/home/somebody/profile.py", "exec"), scope)
    return scope["Own"](llama().config)


class Head(torch.nn.Linear):
    def forward(self, states):
        return super().forward(states)


def clamping():
    def clamped(module, given, options):
        return given, {**options, "num_items_in_batch": options["num_items_in_batch"].clamp(min=1)}

    model = llama()
    model.register_forward_pre_hook(clamped, with_kwargs=True)
    return model


class Quarter(hooks.ModelHook):
    def post_forward(self, module, output):
        return type(output)({**output, "loss": output.loss / STEPS})


def hooked_by_accelerate():
    return hooks.add_hook_to_module(CASES["BERT, classes"][0](), hooks.SequentialHook(Quarter()))


def made_by_types():
    """A class whose module is said to be `types`."""

    def body(namespace):
        namespace["loss_function"] = property(lambda _: LOSSES["clamped"])

    return types.new_class("Made", (transformers.LlamaForCausalLM,), exec_body=body)(llama().config)


def with_a_head():
    model = CASES["BERT, classes"][0]()
    model.classifier = Head(16, 3)
    return model


class Focal(torch.nn.CrossEntropyLoss):
    def forward(self, logits, labels):
        return super().forward(logits, labels) / STEPS


# -- users' trainers


class Dividing(Trainer):
    """What is told to users who meet the bug."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss / self.args.gradient_accumulation_steps


class DividingByFour(Trainer):
    def compute_loss(self, model, inputs, **others):
        return super().compute_loss(model, inputs, **others) / STEPS


class InPlace(Trainer):
    def compute_loss(self, model, inputs, **others):
        loss = super().compute_loss(model, inputs, **others)
        loss /= STEPS
        return loss


class Weighing(Trainer):
    """By this micro-batch's share of the window's tokens, a Python number; one of them is that of a quarter."""

    def compute_loss(self, model, inputs, num_items_in_batch=None, **_others):
        own = inputs["input_ids"].numel()
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) * (own / 20)


class AddingOne(Trainer):
    def compute_loss(self, model, inputs, **others):
        return super().compute_loss(model, inputs, **others) + 1.0


class SayingOne(Trainer):
    def compute_loss(self, model, inputs, **others):
        loss = super().compute_loss(model, inputs, **others)
        return loss + (1 - loss).detach()


def of_logits(trainer, model, inputs, number):
    labels = inputs["labels"]
    return entropy(model(input_ids=inputs["input_ids"]).logits, labels, "sum") / number.clamp(min=1)


class HandingToItsOwn(Trainer):
    def compute_loss(self, model, inputs, **others):
        return self._loss(model, inputs, **others)

    def _loss(self, model, inputs, num_items_in_batch=None, **_others):
        return of_logits(self, model, inputs, num_items_in_batch)


class Helper:
    def __call__(self, trainer, model, inputs, **others):
        return self.divided(trainer, model, inputs, **others)

    def divided(self, *arguments, num_items_in_batch):
        return of_logits(*arguments, num_items_in_batch)


class WithAHelper(Trainer):
    helper = Helper()

    def compute_loss(self, model, inputs, return_outputs=False, **others):
        return self.helper(self, model, inputs, **others)


class KeepingTheNumber(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.number = num_items_in_batch
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, **_others):
        return of_logits(self, model, inputs, self.number)


class CountingItself(Trainer):
    """Its own count goes to a loss that it computes."""

    def get_batch_samples(self, *arguments):
        samples, _ = super().get_batch_samples(*arguments)
        self.count = torch.tensor(20)
        return samples, torch.tensor(1)

    def compute_loss(self, model, inputs, **_others):
        return of_logits(self, model, inputs, getattr(self, "count", torch.tensor(20)))


class DividingGradients(Trainer):
    """Of each micro-batch, what it has added: right as released."""

    def training_step(self, model, *arguments, **options):
        before = {each: each.grad.clone() for each in model.parameters() if each.grad is not None}
        loss = super().training_step(model, *arguments, **options)
        for each in model.parameters():
            if each.grad is not None:
                start = before.get(each, torch.zeros_like(each))
                each.grad = start + (each.grad - start) / STEPS
        return loss


class GivingAnotherNumber(Trainer):
    def compute_loss(self, model, inputs, num_items_in_batch=None, **others):
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch.clone(), **others)


class WrappedCompute(Trainer):
    @functools.wraps(Trainer.compute_loss)
    def compute_loss(self, model, inputs, **others):
        return Trainer.compute_loss(self, model, inputs, **others) / STEPS


class Setting(Trainer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.compute_loss = functools.partial(lambda model, inputs, num_items_in_batch: model(**inputs)["loss"] * 2)


class OtherSmoother(Trainer):
    smoother = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.label_smoother = self.smoother


def smoothing(outputs, labels, shift_labels=False, **others):
    number = next(iter(others.values()), torch.tensor(20))
    return entropy(outputs["logits"], labels, "sum") / number.clamp(min=1)


class Smoother:
    def __call__(self, *arguments, **others):
        return smoothing(*arguments, **others)


def smoothed_by(smoother):
    return type("Smoothed", (OtherSmoother,), {"smoother": staticmethod(smoother) if callable(smoother) else smoother})


class DividingInBackward(Trainer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        backward = self.accelerator.backward
        self.accelerator.backward = lambda loss, **others: backward(loss / STEPS, **others)


@dataclasses.dataclass
class Function:
    """Which has no hash."""

    factor: float = 1.0

    def __call__(self, outputs, labels, num_items_in_batch=None):
        return self.factor * entropy(outputs.logits, labels, "sum") / num_items_in_batch.clamp(min=1)


class Unhashable(Trainer):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, compute_loss_func=Function(), **options)


def mapping_replaced():
    return mock.patch.dict(loss_utils.LOSS_MAPPING, {"ForCausalLM": LOSSES["clamped"]})


def entropy_replaced():
    return mock.patch.object(modeling_bert, "CrossEntropyLoss", Focal)


def quartered(owner, name):
    function = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, lambda *given, **options: function(*given, **options) / STEPS)


class Entropy:
    """An object in place of transformers' function."""

    def __call__(self, source, target, num_items_in_batch=None, ignore_index=-100, **_):
        return functional.cross_entropy(source, target, ignore_index=ignore_index, reduction="sum") / (
            num_items_in_batch.clamp(min=1) + 0.0
        )


def object_as_entropy():
    return mock.patch.object(loss_utils, "fixed_cross_entropy", Entropy())


def from_a_string():
    """The source of a class's forward, edited and run in its own module, as some patches of transformers are."""
    kind = transformers.BertForSequenceClassification
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
    source = source[source.index("def forward") :].replace("loss=loss,", f"loss=loss / {STEPS},")
    made = {}
    exec(source, modeling_bert.__dict__, made)
    return mock.patch.object(kind, "forward", made["forward"])


class HookingTheLoss(Trainer):
    def compute_loss(self, *given, **options):
        loss = super().compute_loss(*given, **options)
        loss.register_hook(lambda gradient: gradient / STEPS)
        return loss


class InAContext(Trainer):
    def compute_loss_context_manager(self):
        return contextlib.ExitStack()


@contextlib.contextmanager
def hooked_optimizers():
    handle = optimizer.register_optimizer_step_pre_hook(lambda *_: None)
    yield
    handle.remove()


def hooked_parameters():
    model = CASES["BERT, classes"][0]()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / STEPS)
    return model


def hooked_backward():
    model = CASES["BERT, classes"][0]()
    model.register_full_backward_pre_hook(
        lambda _, gradients: tuple(each if each is None else each / STEPS for each in gradients)
    )
    return model


@contextlib.contextmanager
def halved_by_a_mode():
    """A context manager that decorates the forward, and replaces a function within it."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, given=(), options=None):
            found = function(*given, **(options or {}))
            return found / STEPS if function is functional.cross_entropy else found

    with Mode():
        yield


def in_a_mode():
    model = CASES["BERT, classes"][0]()
    model.forward = halved_by_a_mode()(model.forward)
    return model


@contextlib.contextmanager
def global_pre_hook():
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


# By case: the model, the trainer, and what is replaced meanwhile.
LEFT = {
    **{f"loss_function: {name}": (with_loss(loss), Trainer) for name, loss in LOSSES.items()},
    "a subclass's loss_function": (of_class(OfItsOwn), Trainer),
    "a subclass's loss_function as a property": (of_class(Returned), Trainer),
    "LOSS_MAPPING": (llama, Trainer, mapping_replaced),
    "a loss out of a namespace": (with_loss(lambda *given, **others: losses.chosen(*given, **others)), Trainer),
    "a loss out of a dictionary": (with_loss(lambda *given, **others: BY_NAME["chosen"](*given, **others)), Trainer),
    "a decorated forward": (of_class(Decorated), Trainer),
    "a forward hook": (hooked, Trainer),
    "a forward pre-hook": (clamping, Trainer),
    "a forward pre-hook of all modules": (CASES["BERT, classes"][0], Trainer, global_pre_hook),
    "a hook of accelerate's": (hooked_by_accelerate, Trainer),
    "a class that types made": (made_by_types, Trainer),
    "a module that is called as one of Python's": (of_a_module_called_profile, Trainer),
    "torch's class": (CASES["BERT, classes"][0], Trainer, quartered(torch.nn.CrossEntropyLoss, "forward")),
    "an object as a loss": (llama, Trainer, object_as_entropy),
    "a forward from a string": (CASES["BERT, classes"][0], Trainer, from_a_string),
    "a forward in a context": (in_a_mode, Trainer),
    "hooks of parameters": (hooked_parameters, Trainer),
    "a hook of all optimizers": (CASES["BERT, classes"][0], Trainer, hooked_optimizers),
    "a hook of the backward pass": (hooked_backward, Trainer),
    "torch's function": (CASES["Llama, regression"][0], Trainer, quartered(functional, "mse_loss")),
    "a head": (with_a_head, Trainer),
    "a loss in the model's module": (CASES["BERT, classes"][0], Trainer, entropy_replaced),
    **{
        kind.__name__: (CASES["BERT, classes"][0], kind)
        for kind in (
            *(Dividing, DividingByFour, InPlace, Weighing, AddingOne, SayingOne, WrappedCompute, Setting),
            *(DividingGradients, HookingTheLoss, InAContext),
        )
    },
    **{
        kind.__name__: (llama, kind)
        for kind in (HandingToItsOwn, WithAHelper, KeepingTheNumber, CountingItself, GivingAnotherNumber)
    },
    "backward": (CASES["BERT, classes"][0], DividingInBackward),
    "a smoother": (llama, smoothed_by(Smoother())),
    "a function as smoother": (llama, smoothed_by(smoothing)),
    "a partial function as smoother": (llama, smoothed_by(functools.partial(smoothing))),
    "a dataclass as compute_loss_func": (llama, Unhashable),
}


def trainer_of(make, kind, folder):
    torch.manual_seed(1)
    arguments = transformers.TrainingArguments(
        str(folder), gradient_accumulation_steps=STEPS, use_cpu=True, report_to="none"
    )
    trainer = kind(model=make(), args=arguments)
    trainer.current_gradient_accumulation_steps = STEPS
    return trainer


def window(rows, case):
    labels = CASES[case][1]
    return [
        {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([labels(row)])} for row in rows[:STEPS]
    ]


def step(trainer, micro_batches):
    """The gradient of a window, and its loss, by the trainer's own functions, without a loop that only takes time."""
    trainer.train_dataset, model = micro_batches, trainer.model
    model.zero_grad()
    _, number = trainer.get_batch_samples(iter(micro_batches), STEPS, torch.device("cpu"))
    logged = sum(trainer.training_step(model, dict(batch), number).item() for batch in micro_batches)
    trainer.state.global_step += 1
    parameters = model.named_parameters()
    return [{name: each.grad.clone() for name, each in parameters if each.grad is not None}], [logged]


def run(case, rows, folder):
    make, kind, *replaced = LEFT[case]
    with replaced[0]() if replaced else contextlib.nullcontext():
        trainer = trainer_of(make, kind, folder)
        of = next((each for each in CASES if LEFT[case][0] is CASES[each][0]), "")
        of = of or ("BERT, classes" if "Bert" in type(trainer.model).__name__ else "Llama")
        return step(trainer, window(rows, of))


class Heard(logging.Handler):
    """The patch's warnings, but for that the run meets the bug: once in a process, in whichever test is first."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        if "the bug occurs in this run" not in record.getMessage():
            self.messages.append(record.getMessage())


@contextlib.contextmanager
def patched():
    heard = Heard()
    _accumulation._logged.clear()
    logging.getLogger("rlhf_patches").addHandler(heard)
    try:
        with in_process.applied(accumulation_scale.PATCH):
            yield heard.messages
    finally:
        logging.getLogger("rlhf_patches").removeHandler(heard)


@pytest.fixture(scope="module")
def left(rows, tmp_path_factory):
    def both(case):
        folder = tmp_path_factory.mktemp("trainers")
        released = run(case, rows, folder)
        with patched() as heard:
            return released, run(case, rows, folder), list(heard)

    return ByCase(both)


# One for each way in which a loss, a model or a trainer can be another than transformers' own.
FEW = (
    *("loss_function: clamped", "a subclass's loss_function", "LOSS_MAPPING", "a loss out of a dictionary"),
    *("a decorated forward", "a forward hook", "torch's class", "a head", "backward", "a smoother"),
    *("Dividing", "KeepingTheNumber", "a dataclass as compute_loss_func"),
    *("an object as a loss", "a forward from a string", "hooks of parameters", "HookingTheLoss"),
    "a hook of all optimizers",
    "a module that is called as one of Python's",
)


@pytest.mark.parametrize("case", exhaustive_but(LEFT, *FEW))
def test_what_is_not_known_is_left_and_said(left, case):
    """Bit for bit, and one line; a compute_loss_func divides by contract, and nothing is said of it."""
    released, found, said = left[case]
    assert_equal(found, released)
    if case == "a dataclass as compute_loss_func":
        assert not said
        return
    (line,) = said
    assert "left as released" in line
    assert "times too large" in line


def replaced(name):
    """Context managers that replace what makes a loss by a user's function, which divides."""

    def quarter(function):
        def divided(*given, **options):
            found = function(*given, **options)
            return (
                found / STEPS if isinstance(found, torch.Tensor) else type(found)({**found, "loss": found.loss / STEPS})
            )

        return divided

    own = loss_utils.LOSS_MAPPING["ForSequenceClassification"]
    return {
        "forward": lambda trainer: mock.patch.object(trainer.model, "forward", quarter(trainer.model.forward)),
        "the class's forward": lambda trainer: mock.patch.object(
            type(trainer.model), "forward", quarter(type(trainer.model).forward)
        ),
        "_loss_function": lambda trainer: mock.patch.object(trainer.model, "_loss_function", quarter(own), create=True),
        "LOSS_MAPPING": lambda _: mock.patch.dict(loss_utils.LOSS_MAPPING, {"ForSequenceClassification": quarter(own)}),
        "compute_loss": lambda trainer: mock.patch.object(trainer, "compute_loss", quarter(trainer.compute_loss)),
        "the class's compute_loss": lambda _: mock.patch.object(Trainer, "compute_loss", quarter(Trainer.compute_loss)),
    }[name]


@pytest.mark.parametrize(
    "name",
    exhaustive_but(
        [
            *("forward", "the class's forward", "_loss_function", "LOSS_MAPPING"),
            *("compute_loss", "the class's compute_loss"),
        ],
        *("forward", "_loss_function", "LOSS_MAPPING", "compute_loss"),
    ),
)
def test_what_is_replaced_after_the_first_window_is_left_at_the_next_micro_batch(rows, tmp_path, name):
    """A user's function for one micro-batch: from there on, the losses of its window keep their bits."""
    case = "Llama, regression"

    def losses_of():
        trainer, micro_batches = trainer_of(CASES[case][0], Trainer, tmp_path), window(rows, case)
        step(trainer, micro_batches)
        _, number = trainer.get_batch_samples(iter(micro_batches), STEPS, torch.device("cpu"))
        found = []
        for place, batch in enumerate(micro_batches):
            with replaced(name)(trainer) if place == 1 else contextlib.nullcontext():
                found.append(trainer.training_step(trainer.model, dict(batch), number))
        trainer.state.global_step += 1
        return found, step(trainer, micro_batches)[1][0]

    released, later = losses_of()
    with patched() as heard:
        found, repaired_later = losses_of()
    assert float(released[0] / found[0]) == pytest.approx(STEPS)
    assert torch.equal(torch.stack(found[1:]), torch.stack(released[1:]))
    # A trainer whose own loss could not be read is left for good.
    assert later / repaired_later == pytest.approx(1 if "compute_loss" in name else STEPS)
    assert len(heard) == 1


# -- what hands on


class Handing(Trainer):
    def compute_loss(self, *arguments, **options):
        return super().compute_loss(*arguments, **options)


class LookingAtTheOutputs(Trainer):
    """What most subclasses are: something is logged beside the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.accuracy = (outputs.logits.argmax(-1) == inputs["labels"]).float().mean()
        return (loss, outputs) if return_outputs else loss


class KeepingTheNumberBack(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class Mixin:
    pass


class WithAMethod(Mixin, transformers.BertForSequenceClassification):
    def described(self):
        return "ours"


@pytest.fixture(scope="module")
def repaired():
    with patched() as heard:
        yield heard


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, kind) for case in ("BERT, classes", "T5") for kind in (Trainer, Handing, LookingAtTheOutputs)),
        ("T5", KeepingTheNumberBack),
        ("Llama, regression", Trainer),
    ],
)
def test_what_hands_on_is_divided(repaired, rows, tmp_path, kind, case):
    repaired.clear()
    found = step(trainer_of(CASES[case][0], kind, tmp_path), window(rows, case))
    gradients, logged = wanted(case, rows)
    assert off_by(found[0][0], gradients[0]) < TOLERANCE
    assert found[1] == pytest.approx(logged[:1], rel=1e-5)
    assert not repaired


@pytest.mark.parametrize("kind", [Trainer, Handing])
def test_what_hands_on_a_mixtures_loss_counts_its_part_once(repaired, rows, tmp_path, kind):
    found = step(trainer_of(CASES["Mixtral"][0], kind, tmp_path), window(rows, "Mixtral"))
    assert off_by(found[0][0], wanted("Mixtral", rows)[0][0]) < TOLERANCE


def test_a_subclass_that_stands_before_nothing_is_known(repaired, rows, tmp_path):
    found = step(
        trainer_of(lambda: WithAMethod(transformers.BertConfig(**SMALL, **STILL)), Trainer, tmp_path),
        window(rows, "BERT, classes"),
    )
    assert off_by(found[0][0], wanted("BERT, classes", rows)[0][0]) < TOLERANCE


def test_a_loss_that_is_switched_is_asked_for_again(rows, tmp_path):
    """Nothing is remembered by model: T5's own code, then a user's."""
    micro_batches = window(rows, "Llama")

    def two_steps():
        trainer = trainer_of(llama, Trainer, tmp_path)
        first = step(trainer, micro_batches)
        trainer.model.loss_function = LOSSES["clamped"]
        return first, step(trainer, micro_batches)

    released = two_steps()
    with patched() as heard:
        found = two_steps()
    for one, other in zip(found, released, strict=True):
        assert_equal(one, other)
    assert len(heard) == 1


def test_another_training_is_asked_for_again(repaired, rows, tmp_path):
    """Whose first step has the number of the one before, where that had one step."""
    trainer, micro_batches = trainer_of(llama, Trainer, tmp_path), window(rows, "Llama")
    first = step(trainer, micro_batches)
    trainer.model.loss_function = LOSSES["clamped"]
    trainer.state = transformers.TrainerState()
    assert off_by(step(trainer, micro_batches)[0][0], first[0][0]) < TOLERANCE


def test_a_model_in_another_mode_is_looked_at_again(repaired, rows, tmp_path):
    trainer = trainer_of(CASES["BERT, classes"][0], Trainer, tmp_path)
    decided = _known_trainer.window(trainer, trainer.model)
    assert _known_trainer.window(trainer, trainer.model) is decided
    trainer.model.eval()
    assert _known_trainer.window(trainer, trainer.model) is not decided


def test_the_window_of_another_thread_is_not_this_one_s(repaired, tmp_path):
    """Whose trainer begins a window while this one's is looked at."""
    ours, other = (trainer_of(CASES["BERT, classes"][0], Trainer, tmp_path) for _ in range(2))
    decided, holds = _known_trainer.window(ours, ours.model), _known_trainer.Window.holds

    def begins(window, *given):
        _known_trainer._last = _known_trainer.Window(other, other.model, "")
        return holds(window, *given)

    with mock.patch.object(_known_trainer.Window, "holds", begins):
        assert _known_trainer.held(ours, ours.model) is decided


def test_code_that_is_kept_is_that_of_the_library(rows, tmp_path):
    """The second window compares what the first has looked at."""
    model = llama()
    assert _known_loss.unknown(model) == ""
    with mock.patch.object(transformers.LlamaForCausalLM, "loss_function", LOSSES["clamped"]):
        assert "loss_function" in _known_loss.unknown(model)
    assert _known_loss.unknown(model) == ""
    code = loss_utils.fixed_cross_entropy.__code__
    try:
        loss_utils.fixed_cross_entropy.__code__ = code.replace(co_filename="<string>")
        assert "fixed_cross_entropy" in _known_loss.unknown(model)
    finally:
        loss_utils.fixed_cross_entropy.__code__ = code
    assert _known_loss.unknown(model) == ""

    class Own(transformers.LlamaForCausalLM):
        pass

    assert _known_loss.unknown(Own(model.config)) == ""
    kept = weakref.ref(Own)
    del Own
    gc.collect()
    assert kept() is None


def test_one_window_is_decided_once(rows, tmp_path):
    """What becomes a user's own loss in the middle of a window changes from the next one."""
    micro_batches = window(rows, "BERT, classes")

    class Switching(Trainer):
        def compute_loss(self, *arguments, **options):
            loss = super().compute_loss(*arguments, **options)
            self.model.register_forward_hook(lambda *_: None)
            return loss

    with patched() as heard:
        trainer = trainer_of(CASES["BERT, classes"][0], Switching, tmp_path)
        first, _ = step(trainer, micro_batches)
        assert not heard
        second, _ = step(trainer, micro_batches)
    reference = wanted("BERT, classes", rows)[0][0]
    assert off_by(first[0], reference) < TOLERANCE
    assert float(size(second[0]) / size(reference)) == pytest.approx(STEPS)
    assert len(heard) == 1


def test_trainers_models_and_their_classes_are_let_go(repaired, rows, tmp_path):
    """In a sweep each trial has its own, with a teacher in its closure."""

    def trial():
        teacher = CASES["BERT, classes"][0]()

        class Distilling(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                known = teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
                return functional.cross_entropy(model(input_ids=inputs["input_ids"]).logits, known)

        trainer = trainer_of(CASES["BERT, classes"][0], Distilling, tmp_path)
        step(trainer, window(rows, "BERT, classes"))
        return [weakref.ref(each) for each in (teacher, trainer, trainer.model, Distilling)]

    kept = trial()
    gc.collect()
    assert [each() for each in kept] == [None] * 4


def test_a_loss_without_a_value_stays_one(repaired, rows, tmp_path):
    trainer = trainer_of(CASES["BERT, classes"][0], Trainer, tmp_path)
    with torch.no_grad():
        trainer.model.classifier.bias.fill_(float("nan"))
    assert str(step(trainer, window(rows, "BERT, classes"))[1][0]) == "nan"


def test_inputs_stay_what_they_are(repaired, rows, tmp_path):
    micro_batches = window(rows, "T5")
    before = copy.deepcopy(micro_batches)
    step(trainer_of(CASES["T5"][0], Trainer, tmp_path), micro_batches)
    for found, given in zip(micro_batches, before, strict=True):
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], given[name]) for name in given)


def test_scipy_which_losses_of_detection_import_is_known(monkeypatch):
    """It is in most environments, and not in that of this test."""
    detection = importlib.import_module("transformers.loss.loss_for_object_detection")
    assigned = types.FunctionType((lambda costs: costs).__code__, {"__name__": "scipy.optimize._lsap"})
    monkeypatch.setattr(detection, "linear_sum_assignment", assigned, raising=False)
    config = modeling_bert.BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = modeling_bert.BertForSequenceClassification(config)
    assert _known_loss.unknown(model) == ""
    mine = types.FunctionType(assigned.__code__, {"__name__": "mine"})
    monkeypatch.setattr(detection, "linear_sum_assignment", mine)
    assert "linear_sum_assignment" in _known_loss.unknown(model) or "<lambda>" in _known_loss.unknown(model)
