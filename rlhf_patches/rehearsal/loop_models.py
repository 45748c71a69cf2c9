"""The models and optimizers of a training loop, and what a step changes in them."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..definitions.words import plural
from . import parameters, pieces
from .loop_gradients import Follower, dense, fingerprint
from .loop_windows import parameters_of
from .parameters import shown
from .relation import Relation, Verdict

STEP = "optimizer step"
TIED = "tied parameters"
MODE = "training mode"
_TIMES_EPSILON = 10.0
_WRAPPERS = ("module.", "_orig_mod.")
_NORMS = torch.nn.modules.batchnorm._BatchNorm
_DROPOUT = torch.nn.modules.dropout._DropoutNd


@dataclass
class Models:
    """The modules whose parameters the losses reach.

    Args:
        roots: modules that no other module contains.
        named: their parameters by name; a parameter with several names has the first one.
        tied: the names of parameters that have several names, by identity when the loop took its first step.
    """

    roots: list[torch.nn.Module]
    named: dict[str, torch.nn.Parameter]
    tied: list[tuple[str, ...]]

    @property
    def names(self) -> dict[int, str]:
        """The names by identity."""
        return {id(each): name for name, each in self.named.items()}

    def averaged(self) -> list[Any]:
        """Return the instances of DistributedDataParallel among the modules."""
        kind = torch.nn.parallel.DistributedDataParallel
        return [each for root in self.roots for each in root.modules() if isinstance(each, kind)]


class Alive:
    """The optimizers, schedulers and data loaders of this process; a loop's own variables are out of reach."""

    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Any] = []
        kinds = (
            (torch.optim.Optimizer, self.optimizers),
            (torch.optim.lr_scheduler.LRScheduler, self.schedulers),
            (torch.utils.data.DataLoader, self.loaders),
        )
        for each in gc.get_objects():
            for kind, found_ones in kinds:
                if issubclass(type(each), kind):
                    found_ones.append(each)


def found(reached: Iterable[torch.Tensor]) -> Models:
    """Find the models that own any of the parameters that the losses reached."""
    wanted = {id(each) for each in reached}
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    inside = {id(child) for each in modules for child in (vars(each).get("_modules") or {}).values()}
    roots = [each for each in modules if id(each) not in inside and vars(each).get("_parameters") is not None]
    roots = [each for each in roots if any(id(own) in wanted for own in each.parameters())]
    named: dict[str, torch.nn.Parameter] = {}
    for place, root in enumerate(roots):
        prefix = f"{type(root).__name__}." if place else ""
        for name, each in root.named_parameters():
            named.setdefault(prefix + _plain(name), each)
    return Models(roots, named, _tied(roots))


def _plain(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _tied(roots: Iterable[torch.nn.Module]) -> list[tuple[str, ...]]:
    together: dict[int, list[str]] = {}
    for root in roots:
        for name, each in root.named_parameters(remove_duplicate=False):
            together.setdefault(id(each), []).append(_plain(name))
    return [tuple(names) for names in together.values() if len(names) > 1]


def fingerprints(named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: fingerprint(each) for name, each in named.items()}


# -- relations


def trained_relation(models: Models, stepping: Sequence[Any], given: set[int]) -> Relation:
    """Which of the optimizers' parameters require a gradient and never got one."""
    trained = [each for each in models.named.values() if each.requires_grad]
    names = models.names
    held = {id(each): names.get(id(each), f"parameter {place}") for place, each in enumerate(_held(stepping))}
    none = [held[id(each)] for each in _held(stepping) if each.requires_grad and id(each) not in given]
    counts = f"{len(trained)} trained, {len(models.named) - len(trained)} frozen"
    if none:
        text = f"{len(none)} require a gradient and got none: {shown(none)}"
        return Relation(parameters.TRAINED, Verdict.NOTE, counts, text)
    return Relation(parameters.TRAINED, Verdict.HOLDS, counts)


def _held(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    return [one for each in optimizers for one in parameters_of(each)]


def optimizer_relation(models: Models, alive: Alive, stepping: Sequence[Any], given: set[int]) -> Relation:
    """The optimizers that stepped hold the parameters of the models that the losses reach.

    An optimizer may hold a part of a model on purpose. It is an error if it holds parameters of no model in use, in
    place of those that no optimizer has.

    Args:
        models: the models in use.
        alive: the optimizers that exist.
        stepping: those that stepped.
        given: the identities of parameters that had a gradient.
    """
    every = [each for each in alive.optimizers if isinstance(vars(each).get("param_groups"), list)]
    held = {id(each) for each in _held(every)}
    mine = {id(each): each for each in _held(stepping)}
    trainable = {name: each for name, each in models.named.items() if each.requires_grad}
    missing = [name for name, each in trainable.items() if id(each) not in held]
    known = {id(each) for each in models.named.values()} | given
    strangers = [each for each in mine.values() if id(each) not in known]
    frozen = [each for each in mine.values() if not each.requires_grad]
    measured = f"{len(trainable) - len(missing)} of {len(trainable)}"
    if strangers and missing:
        text = f"the optimizer has {len(strangers)} that no model in use has, from another model or a replaced module"
        text += f"; it lacks {len(missing)} that require a gradient: {shown(missing)}"
        return Relation(parameters.OPTIMIZER, Verdict.DEVIATES, measured, text)
    notes = []
    if missing:
        notes.append(f"no optimizer has {len(missing)} that require a gradient: {shown(missing)}")
    if strangers:
        notes.append(f"the optimizer has {len(strangers)} that no model in use has")
    if frozen and mine and len(frozen) == len(mine):
        text = "all of the optimizer's parameters are frozen"
        return Relation(parameters.OPTIMIZER, Verdict.DEVIATES, measured, text)
    verdict = Verdict.NOTE if notes else Verdict.HOLDS
    return Relation(parameters.OPTIMIZER, verdict, measured, "; ".join(notes))


@dataclass(frozen=True)
class Step:
    """What one step changed.

    Args:
        moved: names of the optimizer's parameters that changed.
        still: names of its parameters that got a gradient that is not 0 and did not change.
        coarse: those of ``still`` that need not move: 16 bits, a small learning rate, an unknown optimizer.
        frozen_moved: names of parameters that require no gradient and changed within the step.
    """

    moved: tuple[str, ...]
    still: tuple[str, ...]
    coarse: tuple[str, ...]
    frozen_moved: tuple[str, ...]


def step_of(
    optimizer: Any, names: Mapping[int, str], follower: Follower, before: Mapping[str, int], now: Mapping[str, int]
) -> Step:
    """Compare fingerprints before and after a step."""
    moved, still, coarse = [], [], []
    held = [(group, each) for group in optimizer.param_groups for each in group["params"]]
    known = ["parameter"] * len(held)
    for place, (group, each) in enumerate(held):
        known[place] = names.get(id(each), f"parameter {place}")
        followed = follower.of(each)
        if before[known[place]] != now[known[place]]:
            moved.append(known[place])
        elif followed is not None and followed.used is not None and bool(followed.used.any()):
            still.append(known[place])
            if not _must_move(optimizer, group, each):
                coarse.append(known[place])
    frozen = [name for name in now if name not in known and before.get(name) != now[name]]
    frozen += [known[place] for place, (_, each) in enumerate(held) if not each.requires_grad and known[place] in moved]
    return Step(tuple(moved), tuple(still), tuple(coarse), tuple(frozen))


def _must_move(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Whether any of torch's optimizers moves a parameter with this gradient."""
    step = inspect.unwrap(type(optimizer).step)
    if not pieces.written_in(step).startswith("torch.optim.") or parameter.grad is None:
        return False
    if parameter.dtype not in (torch.float32, torch.float64) or group.get("lr") is None:
        return False
    values, gradient = parameter.detach().abs(), dense(parameter.grad.detach()).abs()
    least = float(group["lr"]) * min(1.0, float(gradient.max()))
    return bool(least > _TIMES_EPSILON * torch.finfo(parameter.dtype).eps * float(values.max()))


def step_relation(steps: Sequence[Step]) -> Relation | None:
    """What has a gradient moves at the step, and what is frozen does not."""
    steps = [each for each in steps if each.moved or each.still or each.frozen_moved]
    if not steps:
        return None
    measured = ", ".join(f"{len(each.moved)} moved" for each in steps)
    if frozen := sorted({name for each in steps for name in each.frozen_moved}):
        text = f"{len(frozen)} that are frozen moved at the step: {shown(frozen)}"
        return Relation(STEP, Verdict.DEVIATES, measured, text)
    for place, each in enumerate(steps):
        wrong = [name for name in each.still if name not in each.coarse]
        if wrong and (not each.moved or place):
            once = {name for one in steps[:place] for name in one.moved}
            if not each.moved or not once.intersection(wrong):
                text = f"{len(wrong)} got a gradient and did not move at step {place + 1}: {shown(wrong)}"
                return Relation(STEP, Verdict.DEVIATES, measured, text)
    notes = []
    if coarse := sorted({name for each in steps for name in each.coarse}):
        notes.append(f"{len(coarse)} got a gradient and did not move: a step too small for their format, or not yet")
    if still := sorted({name for each in steps for name in each.still} - set(coarse)):
        notes.append(f"{len(still)} got a gradient and did not move: {shown(still)}")
    return Relation(STEP, Verdict.NOTE if notes else Verdict.HOLDS, measured, "; ".join(notes))


def tied_relation(models: Models) -> Relation | None:
    """Parameters that were one when the loop began still are; those that a model's configuration ties are."""
    now, wrong = _tied(models.roots), []
    for names in models.tied:
        if not any(set(names) <= set(each) for each in now):
            wrong.append(f"{' and '.join(names[:2])} were one parameter")
    wrong += [problem for root in models.roots for each in root.modules() if (problem := _untied(each))]
    if wrong:
        return Relation(TIED, Verdict.DEVIATES, plural(len(wrong), "pair", "pairs"), "; ".join(wrong))
    return Relation(TIED, Verdict.HOLDS, plural(len(now), "pair", "pairs")) if now else None


def _untied(module: torch.nn.Module) -> str:
    if not type(module).__module__.startswith("transformers.") or not getattr(module, "_tied_weights_keys", None):
        return ""
    config = getattr(module, "config", None)
    if config is None or not getattr(config, "tie_word_embeddings", False):
        return ""
    try:
        first, second = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    except Exception:  # a model without one of them
        return ""
    if first is second or first.data_ptr() == second.data_ptr() or first.shape != second.shape:
        return ""
    return f"{type(module).__name__}'s configuration ties its embeddings, and they are two parameters"


def mode_relation(models: Models, calls_train: bool) -> Relation | None:
    """Dropout and batch normalization train in training mode; ``train()`` changes nothing else.

    Args:
        models: the models that the loop trains.
        calls_train: whether `train()` may be called: it is the user's code.
    """
    if calls_train:
        for root in models.roots:
            if root.training and (changed := _changed_by_train(root)):
                text = f"train() was not called: it would freeze or thaw {len(changed)}: {shown(changed)}"
                return Relation(MODE, Verdict.DEVIATES, "", text)
    random, norms = [], []
    for root in models.roots:
        for name, each in root.named_modules():
            if isinstance(each, _DROPOUT) and each.p and not each.training:
                random.append(_plain(name))
            elif isinstance(each, _NORMS) and each.track_running_stats and not each.training:
                norms.append(_plain(name))
    off = [type(each).__name__ for each in models.roots if not each.training]
    if not (random or norms):
        return Relation(MODE, Verdict.HOLDS, "" if off else "on")
    texts = [f"{type_} is in evaluation mode" for type_ in off]
    texts += [f"dropout is off in {plural(len(random), 'module', 'modules')}: {shown(random)}"] if random else []
    texts += [f"{plural(len(norms), 'batch norm uses', 'batch norms use')} running statistics"] if norms else []
    return Relation(MODE, Verdict.NOTE, "off" if off else "on", "; ".join(texts))


def _changed_by_train(root: torch.nn.Module) -> list[str]:
    """Return the parameters that ``train()`` freezes or thaws, and restore them and the modules' modes."""
    modes = [(each, each.training) for each in root.modules()]
    named = dict(root.named_parameters())
    before = {name: each.requires_grad for name, each in named.items()}
    try:
        root.train()
        return [_plain(name) for name, each in named.items() if each.requires_grad != before[name]]
    except Exception:  # the user's own train()
        return []
    finally:
        for module, training in modes:
            module.training = training
        for name, each in named.items():
            if each.requires_grad != before[name]:
                each.requires_grad_(before[name])
