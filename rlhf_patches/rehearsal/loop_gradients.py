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
    _version: int = -1

    def add(self, gradient: torch.Tensor) -> None:
        """Add what a backward pass is about to accumulate."""
        given = sketch_of(gradient)
        self.finite &= bool(torch.isfinite(given).all())
        self.made = given if self.made is None else self.made + given
        self.size += float(given.norm())
        self.passes += 1
        self._version = self.parameter._version

    def before_pass(self) -> None:
        """Notice that ``.grad`` was cleared since the last pass."""
        gradient = self.parameter.grad
        empty = gradient is None or not bool(dense(gradient).any())
        if self.made is None:
            self.began = None if empty or gradient is None else sketch_of(gradient)
        elif empty:
            if self.finite and self.parameter._version == self._version and float(self.made.norm()):
                self.dropped += self.passes
            self._forget()

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
        self.size, self.passes, self.finite = 0.0, 0, True


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
        for accumulator in self._accumulators(roots):
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
                    followed.add(gradients[0])
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
