"""What the allocator hands out beyond the logits, at 4096 tokens. Counted bytes, so the machine does not matter."""

from __future__ import annotations

import pytest
import torch

from rlhf_patches.patches._vocab_parallel import counters, softmax
from rlhf_patches.patches._vocab_parallel.entropy import token_entropy
from rlhf_patches.patches._vocab_parallel.logprob import token_logprobs
from tests.harness.token_reference import made, peak_memory

TOKENS, VOCABULARY = 4096, 16_384
# Per-token numbers: maximum, four sums, target, log-probability, entropy, their gradients, and temporaries of those.
PER_TOKEN = 200


def measure(dtype, kind, chunk_size=None, hold=False):
    """Bytes beyond the logits, forward and backward."""
    values = torch.zeros(1, TOKENS, VOCABULARY, dtype=dtype)
    target = torch.zeros(1, TOKENS, dtype=torch.long)
    found = []
    logits = made(values, lambda gradient: found.append(gradient.untyped_storage().nbytes()))
    with peak_memory() as forward:
        results = []
        if kind != "entropy":
            with_entropy = kind == "both"
            results.append(
                token_logprobs(logits, target, 0, VOCABULARY, chunk_size=chunk_size, with_entropy=with_entropy)
            )
        if kind != "log-probability":
            results.append(token_entropy(logits, chunk_size=chunk_size))
    held = [logits] if hold else []
    del logits
    loss = sum(result.sum() for result in results)
    with peak_memory() as backward:
        loss.backward()
    assert found == [values.nbytes]
    del held
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("kind", ["log-probability", "entropy", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_in_place(dtype, kind):
    """At most a tenth of the logits, which is the work buffer: 4 MiB of 128 or 256 MiB."""
    logits = TOKENS * VOCABULARY * dtype.itemsize
    forward, backward = measure(dtype, kind)
    assert counters.observed() == {"backward in place": 1}
    assert backward <= softmax.WORK_BYTES + PER_TOKEN * TOKENS <= 0.1 * logits
    assert forward <= softmax.WORK_BYTES + PER_TOKEN * TOKENS
    if dtype is torch.float32 and kind == "log-probability":
        assert backward <= PER_TOKEN * TOKENS  # the gradient is its own work buffer


@pytest.mark.parametrize("chunk_size", [1, 64, 10**6])
def test_the_callers_chunks_do_not_matter(chunk_size):
    _, backward = measure(torch.bfloat16, "log-probability", chunk_size)
    assert backward <= softmax.WORK_BYTES + PER_TOKEN * TOKENS


@pytest.mark.parametrize("kind", ["log-probability", "both"])
def test_out_of_place_is_one_tensor_of_the_logits_dtype(kind):
    _, backward = measure(torch.bfloat16, kind, hold=True)
    assert "backward in place" not in counters.observed()
    logits = TOKENS * VOCABULARY * 2
    assert logits <= backward <= logits + softmax.WORK_BYTES + PER_TOKEN * TOKENS


def test_the_measurement_sees_what_an_operator_allocates_within():
    tensor = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    with peak_memory() as peak:
        torch.zeros(1000, 1000).add_(tensor.t().contiguous().sum())
        torch.zeros(3000, 1000)
    assert 3000 * 1000 * 4 <= peak.bytes < 3000 * 1000 * 4 + 10**6
