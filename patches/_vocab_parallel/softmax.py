"""One autograd function for log-probabilities and entropies of the same logits.

Per token: x are its logits over the whole vocabulary, m their maximum, z = x - m, s = sum(exp z), and
p = exp(z) / s. Then

    log-probability of target t:  z_t - log s          gradient  [t] - p
    entropy:                      log s - sum(p z)     gradient  p (sum(p z) - z)

which follow from dp_i / dx_j = p_i ([i = j] - p_j) (Bishop, Pattern Recognition and Machine Learning, 2006, eq. 4.106).
So backward needs m, s and sum(p z) of each token, and nothing from other ranks. For a target that no rank has,
Megatron's cross entropy uses z_t = 0: the log-probability is -log s, its gradient -p. SkyRL and NeMo-RL return 0 with
the same gradient, as if that 0 were not a constant. Callers get their framework's own result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import counters, fused, ownership

WORK_BYTES = 4 << 20
"""Memory for blocks of tokens in float32. Measured on a CPU: 2 to 4 MiB were fastest, 8 MiB took a fifth longer."""
WORK_BYTES_ON_GPU = 128 << 20
"""Measured on an H100 (`benchmarks/logprob_on_gpu.py`): 32 MiB, its L2 cache's size, took 1.5 times as long."""

# exp(-1e4) is 0 in float32, as exp(-inf) is; but 0 * -inf would be NaN.
_LOWEST = -1e4


class VocabParallelLogprobEntropy(torch.autograd.Function):
    """Log-probabilities of target tokens, or entropies, or both, over vocabulary-parallel logits.

    ``apply(logits, target, group, with_entropy, of_cross_entropy)``: logits are ``[..., V / TP]``; ``target`` is
    ``[...]``, int64, the index within this rank's part of the vocabulary, or -1 if it is elsewhere; or None, for the
    entropy alone. ``group`` is None where there is nothing to reduce. With ``of_cross_entropy``, a target that no rank
    has gets the result of Megatron's cross entropy. Returns log-probabilities and entropies, each float32 ``[...]``, or
    None if not asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor | None,
        group: Any,
        with_entropy: bool,
        of_cross_entropy: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tokens = logits.shape[:-1]
        target = None if target is None else target.reshape(-1)
        # For each token: sum(exp z), sum(exp(z) z), z_t, and whether this rank has the target.
        sums = torch.zeros(4, tokens.numel(), dtype=torch.float32, device=logits.device)
        total, weighted, chosen, owned = sums
        if target is not None:
            torch.ge(target, 0, out=owned)
        group = group if tokens.numel() else None  # the ranks of a group have the same tokens, or none
        maximum = _fused_sums(logits, target, sums, group, with_entropy) if fused.serves(logits) else None
        if maximum is None:
            maximum = _sums(logits, target, sums, group, with_entropy)
        chosen.masked_fill_(owned == 0, 0.0)
        if group is not None:
            torch.distributed.all_reduce(sums, op=torch.distributed.ReduceOp.SUM, group=group)

        # In this order, as (x - m) - log s, the result is SkyRL's bit for bit.
        log_total = total.log()
        # No views: callers cannot modify a view that an autograd function returns in place.
        log_probs = entropy = None
        if target is not None:
            log_probs = chosen.view(tokens) - log_total.view(tokens)
            if not of_cross_entropy:
                log_probs.masked_fill_(owned.view(tokens) == 0, 0.0)
        if with_entropy:
            entropy = log_total.view(tokens) - (weighted / total).view(tokens)
        ctx.set_materialize_grads(False)
        ctx.saved_by = VocabParallelLogprobEntropy  # distinguishes our contexts from upstream's
        ctx.refusal = ownership.refusal_in_forward(logits)
        ctx.save_for_backward(logits, maximum, sums, target)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        ctx.spent = True  # see `shared.recall`
        if of_log_probs is None and of_entropy is None:
            return None, None, None, None, None
        logits, (maximum, (total, weighted, *_), target), refusal = ownership.unpack(ctx)
        counters.count(refusal)
        # An alias: autograd must not pass on the tensor that it has saved.
        gradient = torch.empty_like(logits) if refusal else logits.detach()

        # The gradient is exp(z) (factor + slope z), plus `of_target` for the target's logit.
        factor, slope, of_target = torch.zeros_like(maximum), None, None
        if of_log_probs is not None:
            of_target = of_log_probs.reshape(-1).float()
            factor = -of_target / total
            of_target = of_target.masked_fill(target < 0, 0.0)
        if of_entropy is not None:
            # A token whose entropy has weight 0 gets no NaN from it: SkyRL skips chunks of such tokens.
            of_entropy = of_entropy.reshape(-1).float()
            unwanted = of_entropy == 0
            slope = (-of_entropy / total).masked_fill_(unwanted, 0.0)
            factor = factor - (slope * (weighted / total)).masked_fill_(unwanted, 0.0)

        terms = fused.Terms(maximum, factor, slope, target, of_target)
        for part, (matrix, result) in _parts((logits, gradient)):
            own = terms.of(part)
            if not (fused.serves(logits) and fused.write_gradient(matrix, result, own)):
                _write_gradient(matrix, result, own)
        return gradient, None, None, None, None


def _sums(
    logits: torch.Tensor, target: torch.Tensor | None, sums: torch.Tensor, group: Any, with_entropy: bool
) -> torch.Tensor:
    """Write this rank's part of the first three ``sums``; returns the maximum over all ranks."""
    total, weighted, chosen, _ = sums
    maximum = logits.amax(-1).float().reshape(-1)
    if group is not None:
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
    for part, (block,), work in _blocks((logits,), 1 + with_entropy):
        z = work[0].copy_(block).sub_(maximum[part, None])
        if target is not None:
            chosen[part] = z.gather(-1, target[part, None].clamp(min=0))[:, 0]
        if with_entropy:
            z.clamp_(min=_LOWEST)
            total[part] = torch.exp(z, out=work[1]).sum(-1)
            weighted[part] = z.mul_(work[1]).sum(-1)
        else:
            total[part] = z.exp_().sum(-1)
    return maximum


def _fused_sums(
    logits: torch.Tensor, target: torch.Tensor | None, sums: torch.Tensor, group: Any, with_entropy: bool
) -> torch.Tensor | None:
    """Like `_sums`, with one kernel; None, before any collective, if the kernel cannot run."""
    total, weighted, chosen, _ = sums
    maximum = torch.empty_like(total)
    for part, (matrix,) in _parts((logits,)):
        if not fused.sum_up(matrix, maximum[part], total[part], weighted[part] if with_entropy else None):
            return None
        if target is not None:
            chosen[part] = matrix.gather(-1, target[part, None].clamp(min=0))[:, 0].float()
    if group is not None:
        own = maximum.clone()
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
        shift = own.sub_(maximum).clamp_(min=_LOWEST)  # NaN where every rank's logits are -inf
        weighted.add_(shift * total).mul_(shift.exp())
        total.mul_(shift.exp_())
    chosen.sub_(maximum)
    return maximum


def _write_gradient(matrix: torch.Tensor, gradient: torch.Tensor, terms: fused.Terms) -> None:
    """Like `fused.write_gradient`, with torch's operators."""
    maximum, factor, slope, target, of_target = terms
    direct = gradient.dtype == torch.float32  # then the gradient itself is the work buffer
    in_place = gradient.data_ptr() == matrix.data_ptr()
    for part, (block, result), work in _blocks((matrix, gradient), (not direct) + (slope is not None)):
        z = result if direct else work[0]
        if not direct or not in_place:
            z.copy_(block)
        z.sub_(maximum[part, None])
        if slope is None:
            z.exp_().mul_(factor[part, None])
        else:
            if of_target is None:  # else NaN comes from the log-probability anyway
                z.nan_to_num_(nan=_LOWEST)
            exp = torch.exp(z.clamp_(min=_LOWEST), out=work[-1])
            z.mul_(slope[part, None]).add_(factor[part, None]).mul_(exp)
        if of_target is not None and target is not None:
            z.scatter_add_(-1, target[part, None].clamp(min=0), of_target[part, None])
        if not direct:
            result.copy_(z)


_Block = tuple[slice, tuple[torch.Tensor, ...], torch.Tensor]


def _blocks(tensors: tuple[torch.Tensor, ...], buffers: int) -> Iterator[_Block]:
    """Walk over tensors of one shape ``[..., V]`` in blocks of tokens.

    Yields:
        The block's slice of the tokens; its part of each tensor, ``[tokens, V]``; and
        uninitialized work buffers, float32 ``[buffers, tokens, V]``, the same memory for every block.
    """
    first = tensors[0]
    tokens, vocabulary = first.shape[:-1].numel(), first.shape[-1]
    work_bytes = WORK_BYTES if first.device.type == "cpu" else WORK_BYTES_ON_GPU
    size = min(tokens, max(1, work_bytes // (4 * vocabulary * max(1, buffers))))
    work = torch.empty(buffers, size, vocabulary, dtype=torch.float32, device=first.device)
    for part, matrices in _parts(tensors):
        start = part.start
        for parts in zip(*(matrix.split(size) for matrix in matrices), strict=True):
            number = len(parts[0])
            yield slice(start, start + number), parts, work[:, :number]
            start += number


def _parts(tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """`_matrices`, each with its slice of the tokens."""
    start = 0
    for matrices in _matrices(tensors):
        yield slice(start, start + len(matrices[0])), matrices
        start += len(matrices[0])


def _matrices(tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same memory as matrices ``[tokens, V]``: one per tensor if strides permit, else one per outer index."""
    if tensors[0].dim() == 2:
        yield tensors
        return
    try:
        flat = tuple(tensor.view(-1, tensor.shape[-1]) for tensor in tensors)
    except RuntimeError:  # such as the transpose of Megatron's [S, B, V]
        for parts in zip(*(tensor.unbind(0) for tensor in tensors), strict=True):
            yield from _matrices(parts)
    else:
        yield flat
