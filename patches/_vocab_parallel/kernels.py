"""Triton kernels for `fused`: one pass over the logits in forward, one in backward. Imported where a GPU runs them.

Triton interprets annotations, so only compile-time constants have some.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-1e4)  # as softmax._LOWEST


@triton.jit
def sum_up(
    logits,
    stride,
    maximum,
    total,
    weighted,
    columns,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    """For one token: m = max x, sum(exp(x - m)) and sum(exp(x - m) (x - m)), by the online form of softmax.

    Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, extended by the weighted sum.
    """
    token = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    sums = tl.zeros([block], tl.float32)
    weights = tl.zeros([block], tl.float32)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + token * stride + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # -inf minus -inf is NaN
        z = x - base
        exp = tl.exp(z)
        shift = largest - base
        scale = tl.exp(shift)
        if with_entropy:
            weights = scale * (weights + tl.maximum(shift, LOWEST) * sums) + tl.where(exp == 0.0, 0.0, exp * z)
        sums = scale * sums + exp
        largest = higher
    tl.store(maximum + token, largest)
    tl.store(total + token, tl.sum(sums, 0))
    if with_entropy:
        tl.store(weighted + token, tl.sum(weights, 0))


@triton.jit
def write_gradient(
    logits,
    stride,
    gradient,
    gradient_stride,
    maximum,
    factor,
    slope,
    target,
    of_target,
    columns,
    with_slope: tl.constexpr,
    with_target: tl.constexpr,
    block: tl.constexpr,
):
    """For one block of one token: exp(z) (factor + slope z), plus `of_target` for the target's logit."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns
    z = tl.load(logits + token * stride + at, mask=inside, other=0.0).to(tl.float32) - tl.load(maximum + token)
    if with_slope:
        z = tl.where(z < LOWEST, LOWEST, z)
        if not with_target:
            z = tl.where(z != z, LOWEST, z)  # else NaN comes from the log-probability anyway
        value = tl.exp(z) * (tl.load(slope + token) * z + tl.load(factor + token))
    else:
        value = tl.exp(z) * tl.load(factor + token)
    if with_target:
        value += tl.where(at == tl.load(target + token), tl.load(of_target + token), 0.0)
    tl.store(gradient + token * gradient_stride + at, value.to(gradient.dtype.element_ty), mask=inside)
