"""Follows the gradients that backward passes make, parameter by parameter, without changing them.

The autograd graph of a loss says which parameters it reaches. A hook before each one's accumulation sees what is about
to be added to ``.grad``, after the user's own tensor hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import sketches

_MATRIX_PRODUCTS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0", "ConvolutionBackward0")
_LOW = (torch.bfloat16, torch.float16)


@dataclass
class Followed:
    """One parameter's gradient since the last step or clearing of it.

    Args:
        parameter: the leaf.
        made: the sum of what backward passes made; None if nothing was made.
        size: the sum of the sizes of these contributions.
        passes: the number of contributions in ``made``.
        dropped: the contributions that were cleared since the last step, while the parameter stayed as it was.
        began: the sketch of the ``.grad`` to which the first pass of the window was added; None if there was none.
        after: the sketch of ``.grad`` after the last backward pass.
        used: the sketch of ``.grad`` at the last step.
        finite: whether all contributions were finite.
    """

    parameter: torch.Tensor
    made: torch.Tensor | None = None
    size: float = 0.0
    passes: int = 0
    dropped: int = 0
    began: torch.Tensor | None = None
    after: torch.Tensor | None = None
    used: torch.Tensor | None = None
    finite: bool = True
    _bits: int = -1
    _wanted: bool = True

    def add(self, gradient: torch.Tensor, counts: bool) -> None:
        """Add what a backward pass is about to accumulate; ``counts`` is whether it may be wanted for training."""
        given = sketch_of(gradient)
        self.finite &= bool(torch.isfinite(given).all())
        self.made = given if self.made is None else self.made + given
        self.size += float(given.norm())
        self.passes += 1
        self._wanted = self._wanted and counts
        self._bits = fingerprint(self.parameter)

    def before_pass(self) -> None:
        """Notice what your code did to ``.grad`` since the last pass: it may clear or replace it."""
        gradient = self.parameter.grad
        now = None if gradient is None else sketch_of(gradient)
        if now is None or not bool(now.any()):
            if self.made is not None:
                unused = self.finite and self._wanted and bool(self.made.any())
                if unused and fingerprint(self.parameter) == self._bits:
                    self.dropped += self.passes
                self._forget()
            self.began = None
        elif self.made is None:
            self.began = now
        elif self.after is None or not torch.equal(now, self.after):
            self.made, self.size = now, float(now.norm())

    def after_pass(self) -> None:
        """Note ``.grad`` as the backward pass leaves it."""
        gradient = self.parameter.grad
        self.after = None if gradient is None else sketch_of(gradient)

    def rests(self) -> None:
        """Count a window that did not reach the parameter: nothing was made."""
        size = min(self.parameter.numel() * (2 if self.parameter.is_complex() else 1), sketches.BUCKETS)
        self.made = torch.zeros(size, dtype=torch.float64)
        gradient = self.parameter.grad
        if gradient is not None and self.used is not None:
            self.began = sketch_of(gradient) if bool(dense(gradient).any()) else None
        self.after_pass()

    def steps(self) -> None:
        """Begin a new window."""
        self._forget()
        self.dropped = 0

    def _forget(self) -> None:
        self.made, self.began, self.after = None, None, None
        self.size, self.passes, self.finite, self._wanted = 0.0, 0, True, True


class Follower:
    """Follows the parameters that losses reach."""

    def __init__(self) -> None:
        self._followed: dict[int, Followed] = {}
        self._hooks: list[Any] = []
        self._nodes: dict[int, Any] = {}
        self._reached: dict[int, Followed] = {}
        self.passes = 0
        self.products: dict[bool, int] = {True: 0, False: 0}
        """How many matrix products the graphs held in 16 bits, and how many in other formats."""
        self._failure = ""
        self._counts = True
        self.divisor = 1.0
        """What the last pass's loss was divided by, in its last operation."""

    @property
    def failure(self) -> str:
        """Why gradients could not be followed; empty if they could."""
        return self._failure

    def of(self, parameter: torch.Tensor) -> Followed | None:
        """Return what is known of a parameter that a loss has reached."""
        return self._followed.get(id(parameter))

    def adopt(self, parameter: torch.Tensor) -> Followed:
        """Follow a parameter that no loss of this rank has reached."""
        return self._followed.setdefault(id(parameter), Followed(parameter))

    def reached(self) -> list[torch.Tensor]:
        """Return the parameters that any loss has reached."""
        return [each.parameter for each in self._followed.values()]

    def begin_pass(self, roots: Sequence[Any]) -> None:
        """Look at the graphs of the tensors whose backward pass is about to run."""
        accumulators = [*self._accumulators(roots)]
        # A pass that also reaches an input is made for the input: adversarial examples.
        self._counts = all(isinstance(each.variable, torch.nn.Parameter) for each in accumulators)
        self.divisor = max((_divisor(each) for each in roots), default=1.0)
        for accumulator in accumulators:
            parameter = accumulator.variable
            followed = self._followed.get(id(parameter))
            if followed is None:
                followed = self._followed[id(parameter)] = Followed(parameter)
            if id(parameter) not in self._reached:
                followed.before_pass()
                self._reached[id(parameter)] = followed
            if self._nodes.get(id(parameter)) is not accumulator:
                self._nodes[id(parameter)] = accumulator
                self._hooks.append(accumulator.register_prehook(self._hook(followed)))

    def end_pass(self) -> None:
        """Note the gradients after a backward pass, whatever ended it."""
        for followed in self._reached.values():
            followed.after_pass()
        self._reached = {}
        self.passes += 1

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], {}

    def _hook(self, followed: Followed) -> Callable[[Any], None]:
        def before_accumulation(gradients: Any) -> None:
            try:
                if gradients and gradients[0] is not None:
                    followed.add(gradients[0], self._counts)
            except Exception as error:  # a tensor subclass without these operations
                self._failure = self._failure or f"{type(error).__name__}: {error}"

        return before_accumulation

    def _accumulators(self, roots: Sequence[Any]) -> Iterator[Any]:
        seen: set[Any] = set()
        left = [each.grad_fn for each in roots if isinstance(each, torch.Tensor) and each.grad_fn is not None]
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                yield node
                continue
            if node.name() in _MATRIX_PRODUCTS and (about := getattr(node, "_input_metadata", None)):
                self.products[about[0].dtype in _LOW] += 1
            left += [each for each, _ in node.next_functions if each is not None and each not in seen]


def _divisor(loss: Any) -> float:
    """Return the number by which a loss was divided last; 1 if it was not."""
    node = getattr(loss, "grad_fn", None)
    name = node.name() if node is not None else ""
    other = getattr(node, "_saved_other", None) if name in ("DivBackward0", "MulBackward0") else None
    if not isinstance(other, torch.Tensor) or other.numel() != 1 or not float(other):
        return 1.0
    return float(other) if name == "DivBackward0" else 1 / float(other)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number that changes with almost any change of a tensor's bits."""
    with torch.no_grad():
        values = tensor.detach()
        values = values.to_local() if hasattr(values, "to_local") else values
        values = torch.view_as_real(values) if values.is_complex() else values
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return int(values.contiguous().reshape(-1).view(kinds[values.element_size()]).sum(dtype=torch.int64))


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient of an embedding as a whole tensor."""
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def sketch_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's sketch, on the CPU."""
    with torch.no_grad():
        values = tensor.detach()
        values = dense(values.to_local() if hasattr(values, "to_local") else values)
        values = torch.view_as_real(values) if values.is_complex() else values
        return sketches.sketch([values], [values.numel()])
