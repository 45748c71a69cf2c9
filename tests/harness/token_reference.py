"""Log-probabilities and entropies as they are defined: in float64, one process, the whole vocabulary at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


def reference(
    logits: torch.Tensor, target: torch.Tensor, of_log_probs: torch.Tensor, of_entropy: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies, and the gradient of their weighted sum.

    Args:
        logits: ``[..., V]``, the whole vocabulary.
        target: ``[...]``; one outside of the vocabulary has log-probability 0, and, as SkyRL and NeMo-RL have it, the
            gradient of ``-logsumexp``.
        of_log_probs: the weights of the log-probabilities in the loss, ``[...]``.
        of_entropy: those of the entropies; None if these are not part of the loss.
    """
    exact = logits.detach().double().requires_grad_()
    log_p = exact.log_softmax(-1)
    known = (target >= 0) & (target < logits.shape[-1])
    log_probs = log_p.gather(-1, torch.where(known, target, 0).unsqueeze(-1)).squeeze(-1)
    normalizer = exact.logsumexp(-1)
    log_probs = torch.where(known, log_probs, normalizer.detach() - normalizer)
    # p log p is 0 where p is; the clamp keeps the gradient of -inf * 0 out of it.
    entropy = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)
    loss = (log_probs * of_log_probs).sum()
    if of_entropy is not None:
        loss = loss + (entropy * of_entropy).sum()
    (gradient,) = torch.autograd.grad(loss, exact) if logits.numel() else (torch.zeros_like(exact),)
    return torch.where(known, log_probs.detach(), 0.0), entropy.detach(), gradient


class Source(torch.autograd.Function):
    """Logits that are not a leaf, and a place for their gradient, without a byte of memory of its own.

    ``apply(leaf, make, sink)``: ``make()`` returns the logits, and ``sink(gradient)`` is called in backward.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Any, sink: Any) -> torch.Tensor:
        ctx.sink = sink
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.sink(gradient)
        return torch.zeros(1, device=gradient.device), None, None


def made(values: torch.Tensor, sink: Any) -> torch.Tensor:
    """A copy of the values with their strides, as logits that come out of a model."""
    return Source.apply(torch.zeros(1, requires_grad=True), values.clone, sink)


class Peak:
    """The most memory at once, in bytes, above what there was before."""

    bytes = 0


@contextlib.contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure what the CPU allocator hands out within the block.

    The profiler's events come from the allocator itself, so they have the temporaries within an operator too, which a
    TorchDispatchMode does not see. Those of operators, which are many more, are left out.
    """
    peak = Peak()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.autograd._enable_record_function(False)
        try:
            yield peak
        finally:
            torch.autograd._enable_record_function(True)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak.bytes = max(peak.bytes, now)


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """The number of elements of every all-reduce within the block, in their order."""
    sizes: list[int] = []
    original, lock = torch.distributed.all_reduce, threading.Lock()

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with lock:
            sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce
    try:
        yield sizes
    finally:
        torch.distributed.all_reduce = original
