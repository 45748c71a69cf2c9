"""The terms of a loss, read from the top of its autograd graph.

This module does not change the graph, unpack tensors that a user's hooks have packed, or wait for a device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch

# known here: only losses whose code is all known by identity (known_loss.py) are read; a node of another kind, or of a
# number that is not the window's, is reported as unclear.

# Nodes by name, without "Backward0".
_KINDS = {
    "around": ("ToCopy",),
    "as it is": (
        *("Clone", "Alias", "View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze"),
        *("Select", "Slice", "Permute", "Transpose", "T", "AsStrided"),
    ),
    # Nodes that take elements of their inputs.
    "elements": (
        *("Stack", "Cat", "Expand", "Unbind", "Gather", "Index", "IndexSelect"),
        *("MaskedSelect", "MaskedFill", "Where", "ConstantPadNd", "Repeat"),
    ),
    # Losses that record whether they are reduced to a mean or a sum.
    "reduced": (
        *("NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy"),
        *("BinaryCrossEntropyWithLogits", "SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"),
    ),
    "of each token": (
        *("LogSoftmax", "Softmax", "LogSigmoid", "Sigmoid", "Softplus", "Log", "Log1P", "Exp"),
        *("Logsumexp", "Pow", "CtcLoss", "CudnnCtcLoss", "Tanh"),
    ),
}
COMPILED = "CompiledFunction"
"""The kind of a compiled region."""
# The nodes that DistributedDataParallel and ZeRO-3 put around each output tensor of a model, as FSDP2 puts a ToCopy.
_OF_PYTHON = {
    "_DDPSinkBackward": "around",
    "PreBackwardFunctionForModuleBackward": "around",
    "PreBackwardFunctionBackward": "around",
    "CompiledFunctionBackward": COMPILED,
}
_OF_ONE_TERM = ("Mul", "around", "as it is")
_MOST_NODES = 256

BY_A_TENSOR = "a product with a tensor, or a quotient"
"""In `Reading.hidden`: a tensor on the device of the number of items, other than that number."""
ELSEWHERE = "by a tensor of another device"
"""The suffix of its entries for tensors on other devices."""

Origin = tuple[Any, int]
"""A node, and the index of its output."""


@dataclass
class Reading:
    """The terms of a loss.

    Attributes:
        window: whether a term is divided by the number of items.
        sums: whether a term is a sum over tokens or samples, divided only by numbers that are no count.
        means: the factors of the terms that are means, or divided by another number.
        unclear: the nodes of terms that may be either.
        hidden: the nodes that may hide the number of items, in whatever form, if the code uses it.
        parts: the factor of each part that occurs, by its index among the given parts; None if it is no number.
        plain: whether every mean is one of torch's losses, unweighted and multiplied only by numbers.
        compiled: whether a term comes out of a compiled region, which may hold others.
    """

    window: bool = False
    sums: bool = False
    means: set[float] = field(default_factory=set)
    unclear: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    parts: dict[int, float | None] = field(default_factory=dict)
    plain: bool = True
    compiled: bool = False

    @property
    def as_released(self) -> bool:
        """Whether no term is a mean of a micro-batch: the loss adds up correctly as it is."""
        return (self.window or self.sums) and not (self.means or self.unclear or self.parts or self.compiled)


class _Edge(NamedTuple):
    """The path of a term: an output of a node, and the known properties of that output.

    ``scale`` is its numeric factor; ``exact`` is whether that is the whole factor; ``over`` is the last reduction of
    the samples' losses, "mean" or "sum"; ``counted`` is whether a number divides it, which may be a count.
    """

    node: Any
    output: int
    scale: float = 1.0
    exact: bool = True
    over: str = ""
    counted: bool = False


class Items:
    """The number of items of a window, as passed to the model, and related settings."""

    __slots__ = ("_inputs", "_references", "converted", "value")

    def __init__(self, value: Any, *, converted: bool = False, counts: Any = None) -> None:
        """Args:
        value: the tensor itself, or a Python number, or None.
        converted: whether a wrapper may have converted it to half precision on its way to the model.
        counts: the micro-batch, of whose samples or tokens a number may be the count.
        """
        self.value, self.converted, self._inputs = value, converted, counts
        self._references = self._held_by()

    def counts(self, number: float) -> bool:
        """Whether a number is the number of a micro-batch's samples, or of all its tokens."""
        inputs = self._inputs.values() if isinstance(self._inputs, Mapping) else ()
        return any(number in (each.numel(), *each.shape[:1]) for each in inputs if isinstance(each, torch.Tensor))

    def are_held(self) -> bool:
        """Whether a graph built since then holds the tensor, for nodes that do not expose their saved tensors."""
        return self._held_by() > self._references

    def _held_by(self) -> int:
        return int(self.value._use_count()) if isinstance(self.value, torch.Tensor) else 0

    def are_on_device_of(self, constant: Any) -> bool:
        """Whether a tensor other than this one was not copied from it to another device."""
        if not isinstance(self.value, torch.Tensor):  # a Python number has no tensor copies
            return True
        return isinstance(constant, torch.Tensor) and self.value.device == constant.device

    def are(self, constant: Any) -> bool:
        """Whether a tensor is this one, or its converted copy."""
        value = self.value
        if value is None or constant is value:
            return value is not None
        if not isinstance(value, torch.Tensor):
            return bool(_number(constant) == value)
        if type(constant) is not torch.Tensor or type(value) is not torch.Tensor or constant.numel() != 1:
            return False
        if constant.dtype in (torch.bfloat16, torch.float16):
            return self.converted and value.is_floating_point() and value.dtype != constant.dtype
        shared = constant.dtype == value.dtype and constant.device == value.device
        return bool(shared and value.device.type in ("cpu", "cuda") and constant.data_ptr() == value.data_ptr())


def is_divided(loss: torch.Tensor, items: Items) -> bool:
    """Whether a loss is seen to be one term, divided by the number of items: of most, sooner than by `read`."""
    try:
        node = loss.grad_fn
        for _ in range(4):
            kind = _kind_of(type(node).__name__)
            if kind == "Div" and items.are(_saved(node, "other")):
                return not (isinstance(items.value, torch.Tensor) and items.value.requires_grad)
            if kind not in _OF_ONE_TERM:
                return False
            (node, _), *others = node.next_functions
            if node is None or (others and others[0][0] is not None):
                return False
    except Exception:  # an unforeseen graph may raise anything: `read` reports it
        return False
    return False


def read(loss: torch.Tensor, items: Items, *, parts: Sequence[Origin] = (), below_factor: bool = False) -> Reading:
    """The terms of a loss.

    Args:
        loss: a scalar tensor that requires a gradient.
        items: the number that may divide it.
        parts: the origins of tensors that may be terms, such as a router's auxiliary loss.
        below_factor: whether to ignore a product as the last operation.
    """
    reading = Reading()
    asked = {part: place for place, part in enumerate(parts)}
    first = (loss.grad_fn, loss.output_nr)
    if below_factor and _kind(loss.grad_fn) == "Mul":
        first = loss.grad_fn.next_functions[0]
    pending = [_Edge(first[0], first[1])]
    for _ in range(_MOST_NODES):
        if not pending:
            return reading
        edge = pending.pop()
        node, output, scale, exact, over, counted = edge
        if node is None:  # a constant
            continue
        kind = _kind(node)
        if asked and (node, output) in asked:
            place = asked[node, output]
            before = reading.parts.get(place, 0.0)
            reading.parts[place] = before + scale if exact and before is not None else None
        elif kind in ("around", "as it is") and (inner := _behind(node, output)):
            pending.append(_Edge(inner[0], inner[1], scale, exact, over, counted))
        elif kind == "Mean":
            below, output = node.next_functions[0]
            pending.append(_Edge(below, output, scale, False, over or "mean", counted))
        elif kind in ("Sum", "elements"):
            if kind == "Sum" and not _is_of_losses(node):
                over = over or "sum"
            pending += [_Edge(below, output, scale, False, over, counted) for below, output in node.next_functions]
        elif kind in ("Add", "Sub", "Neg"):
            factors = (-1.0,) if kind == "Neg" else (1.0, float(node._saved_alpha) * (-1 if kind == "Sub" else 1))
            for (below, output), factor in zip(node.next_functions, factors, strict=False):
                pending.append(_Edge(below, output, scale * factor, exact, over, counted))
        elif kind in ("Mul", "Div"):
            _follow_factor(reading, pending, edge, kind, items)
        elif kind == COMPILED and items.are_held():
            reading.window = reading.compiled = True
        else:
            _end(reading, edge, kind, _name(node))
    reading.unclear.add(f"more than {_MOST_NODES} nodes")
    return reading


def _end(reading: Reading, edge: _Edge, kind: str, name: str) -> None:
    """Record a term at a node that is no multiple of its input, or that is unknown."""
    known = kind in ("reduced", "of each token")
    reduction = edge.node._saved_reduction if kind == "reduced" else 0  # as torch numbers them: none, mean, sum
    if edge.over == "mean" or reduction == 1:
        reading.means.add(edge.scale)
        reading.plain &= edge.exact and reduction == 1 and _saved(edge.node, "weight") is None
    elif known and not edge.counted and (reduction == 2 or edge.over == "sum"):
        reading.sums = True
    else:
        reading.unclear.add(name)
    if not known:
        reading.hidden.add(name)


def _is_of_losses(node: Any) -> bool:
    """Whether a sum is over several losses, not over samples."""
    behind = node.next_functions[0][0]
    return behind is not None and _name(behind) in ("Stack", "Cat")


def origin(tensor: torch.Tensor) -> Origin:
    """The node that a tensor comes from, and the index of its output, below the nodes of wrappers."""
    node, output = tensor.grad_fn, tensor.output_nr
    while node is not None and _kind(node) == "around":
        behind = _behind(node, output)
        if behind is None:
            break
        node, output = behind
    return node, output


def factor(loss: torch.Tensor) -> float | None:
    """The number that a loss was last multiplied by, before a subtraction; 1 without a product.

    None if hooks hold it.
    """
    node, _ = origin(loss)
    if _name(node) == "Sub":
        node, _ = node.next_functions[0]
    if _name(node) != "Mul":
        return 1.0
    constant = _saved(node, "other")
    return None if constant is _PACKED else _number(constant) or 1.0


def _behind(node: Any, output: int) -> Origin | None:
    """The input of a pass-through node that belongs to one of its outputs; None if it is unknown."""
    behind = node.next_functions
    if output == 0:
        return behind[0] if len(behind) else None
    # One output per passed object, but one input per tensor only.
    of_tensors_only = len(getattr(node, "_input_metadata", ())) == len(behind)
    return behind[output] if of_tensors_only else None


def _name(node: Any) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _kind(node: Any) -> str:
    """The effect of a node on a loss; its name if the effect is unknown."""
    return _kind_of(type(node).__name__)


@functools.cache
def _kind_of(name: str) -> str:
    if not name[-1].isdigit():  # a Python function, which may have the name of one of torch's
        return _OF_PYTHON.get(name, name)
    name = name.rstrip("0123456789").removesuffix("Backward")
    return next((kind for kind, names in _KINDS.items() if name in names), name)


def _follow_factor(reading: Reading, pending: list[_Edge], edge: _Edge, name: str, items: Items) -> None:
    """A product or quotient with the number of items, a number, or a tensor, which may be a count or a mask."""
    node, _, scale, exact, over, counted = edge
    left, right = (*node.next_functions, (None, 0))[:2]  # one edge for a product with a number within torch
    if (left[0] is None) == (right[0] is None) or (name == "Div" and left[0] is None):
        _end(reading, edge, "", f"{name} of two tensors")
        return
    (below, output), side = (left, "other") if left[0] is not None else (right, "self")
    constant = _saved(node, side)
    number = None if constant is _PACKED else _number(constant)
    if name == "Div" and (items.are_held() if constant is _PACKED else items.are(constant)):
        reading.window = True
    elif number is not None and (name == "Mul" or number != 0):
        scale *= number if name == "Mul" else 1 / number
        if name == "Div" and not over and items.counts(number):
            reading.hidden.add("Div by a count")
            exact, over = False, "mean"
        pending.append(_Edge(below, output, scale, exact, over, counted or (name == "Div" and not over)))
    else:
        reading.hidden.add(BY_A_TENSOR if items.are_on_device_of(constant) else f"{name} {ELSEWHERE}")
        pending.append(_Edge(below, output, scale, False, over or ("mean" if name == "Div" else ""), counted))


_PACKED = object()
_NAMES = {side: (f"_raw_saved_{side}", f"_saved_{side}") for side in ("other", "self", "weight")}
_NARROW_FLOAT = torch.ones((), dtype=torch.float16)
_NARROW_INTEGER = torch.ones((), dtype=torch.int8)


def _saved(node: Any, side: str) -> Any:
    """The tensor or number that a node has saved, None without one; `_PACKED` for a tensor that hooks have packed.

    Only the backward pass unpacks: hooks that offload or recompute do so once.
    """
    raw_name, name = _NAMES[side]
    raw = getattr(node, raw_name, None)
    if raw is not None and not isinstance(raw, (int, float)):
        try:
            if hasattr(raw, "unpack_hook"):
                if raw.unpack_hook is not None:
                    return _PACKED
            else:  # an earlier torch shows it only by rejecting other hooks
                raw.register_hooks(_itself, _itself)
        except RuntimeError:
            return _PACKED
    try:
        return getattr(node, name, None)
    except RuntimeError:  # a graph that has been freed
        return None


def _itself(tensor: Any) -> Any:
    return tensor


def _number(constant: Any) -> float | None:
    """The value of a Python number as autograd keeps it: a tensor that takes no part in type promotion."""
    if isinstance(constant, (int, float)):
        return float(constant)
    if type(constant) is not torch.Tensor or constant.dim() or not constant.is_cpu:
        return None
    narrow = _NARROW_FLOAT if constant.is_floating_point() else _NARROW_INTEGER
    if torch.result_type(narrow, constant) != narrow.dtype:
        return None
    try:
        return float(constant)
    except (RuntimeError, TypeError):  # a dispatch mode that reads values is on
        with _python_dispatch._disable_current_modes():
            return float(constant)
