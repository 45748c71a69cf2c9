"""Against float64, in one process. What several ranks compute is in test_ranks.py."""

from __future__ import annotations

import threading

import pytest
import torch

from rlhf_patches.patches._vocab_parallel import counters, ownership, softmax
from rlhf_patches.patches._vocab_parallel.entropy import token_entropy
from rlhf_patches.patches._vocab_parallel.logprob import minus_cross_entropy, token_logprobs
from tests.harness.stuck import stuck_in
from tests.harness.token_reference import made, reference

V = 101
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Float32 arithmetic on sums of 101 terms: a few units in the last place of the largest number that occurs (x - m,
# about 8 times the scale). The gradient is rounded to the logits' dtype on top of that, once.
EPS = torch.finfo(torch.float32).eps


def tolerance(scale):
    return 16 * EPS * max(1.0, scale)


def run(values, target, blocks=None, monkeypatch=None, with_entropy=False, only_entropy=False):
    """Log-probabilities, entropies, their weights, and the gradient."""
    if blocks:
        monkeypatch.setattr(softmax, "WORK_BYTES", 4 * values.shape[-1] * blocks)
    weights, of_entropy = torch.randn(target.shape), torch.randn(target.shape)
    found = []
    logits = made(values, lambda gradient: found.append(gradient.clone()))
    log_probs = entropy = None
    loss = 0
    if not only_entropy:
        log_probs = token_logprobs(logits, target, 0, values.shape[-1], with_entropy=with_entropy)
        loss = (log_probs * weights).sum()
    if with_entropy or only_entropy:
        entropy = token_entropy(logits)
        loss = loss + (entropy * of_entropy).sum()
    del logits
    loss.backward()
    wanted = reference(
        values,
        target,
        torch.zeros_like(weights) if only_entropy else weights,
        of_entropy if with_entropy or only_entropy else None,
    )
    return (log_probs, entropy, found[0]), wanted


def check(found, wanted, scale, dtype):
    log_probs, entropy, gradient = found
    for one, exact in ((log_probs, wanted[0]), (entropy, wanted[1])):
        if one is not None:
            assert one.dtype is torch.float32
            torch.testing.assert_close(one.double(), exact, rtol=tolerance(scale), atol=tolerance(scale))
    assert gradient.dtype is dtype
    rounding = torch.finfo(dtype).eps / 2
    # Weights go up to 4; entropies' gradients have a factor of the size of x - m.
    bound = tolerance(scale) * 4 * (1 if entropy is None else 8 * max(1.0, scale))
    # Below its smallest normal number, float16 has a fixed step.
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), wanted[2], rtol=rounding, atol=bound + smallest)


@pytest.mark.parametrize("kind", ["log-probability", "entropy", "both"])
@pytest.mark.parametrize("scale", [1, 10, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_and_dtypes(dtype, scale, kind, monkeypatch):
    values = (torch.randn(3, 7, V) * scale).to(dtype)
    target = torch.randint(0, V, (3, 7))
    found, wanted = run(values, target, 4, monkeypatch, kind == "both", kind == "entropy")
    check(found, wanted, scale, dtype)
    assert counters.observed() == {"backward in place": 1}


@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 21, 1000])
@pytest.mark.parametrize("shape", [(3, 7), (1, 21), (21,), (2, 2, 3), (1, 1), ()])
def test_blocks_and_shapes_change_nothing(shape, blocks, monkeypatch):
    """One token per block, ragged last ones, one block for all: what a token gives does not depend on it."""
    values, target = torch.randn(*shape, V) * 5, torch.randint(0, V, shape)
    results = []
    for size in (blocks, 3):
        torch.manual_seed(1)
        results.append(run(values, target, size, monkeypatch, with_entropy=True)[0])
    for one, other in zip(*results, strict=True):
        assert one.shape in (target.shape, values.shape)
        assert torch.equal(one, other)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "window": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "columns": lambda x: torch.cat([x, x], dim=2)[..., : x.shape[2]],
    "vocabulary first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second": lambda x: torch.stack([x, x], dim=2).flatten(1, 2)[:, ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["held", "given away"])
def test_strides(layout, kind, monkeypatch):
    monkeypatch.setattr(softmax, "WORK_BYTES", 4 * V * 3)
    contiguous = torch.randn(3, 5, V)
    values = LAYOUTS[layout](contiguous)
    target, weights, found = torch.randint(0, V, (3, 5)), torch.randn(3, 5), []
    leaf = contiguous.clone().requires_grad_()
    logits = LAYOUTS[layout](leaf * 1)
    logits.register_hook(lambda gradient: found.append(gradient.clone()))
    log_probs = token_logprobs(logits, target, 0, V)
    held = [logits] if kind == "held" else []
    del logits
    (log_probs * weights).sum().backward()
    exact = reference(values, target, weights)
    torch.testing.assert_close(log_probs.double(), exact[0], rtol=0, atol=tolerance(1))
    torch.testing.assert_close(found[0].double(), exact[2], rtol=0, atol=tolerance(4))
    del held
    assert ("backward in place" in counters.observed()) is (kind == "given away" and layout != "expanded")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["log-probability", "entropy", "both"])
def test_masked_logits(dtype, kind, monkeypatch):
    """-inf is probability 0: no gradient, no NaN; as a target it has log-probability -inf."""
    values = torch.randn(2, 6, V).to(dtype)
    values[:, :, ::3] = -torch.inf
    values[0, 0, 1:] = -torch.inf
    values[0, 0, 0] = 1.0  # one token left: probability 1, entropy 0
    target = torch.randint(0, V, (2, 6))
    target[target % 3 == 0] += 1
    target[0, 0] = 0
    found, wanted = run(values, target, 4, monkeypatch, kind == "both", kind == "entropy")
    check(found, wanted, 1, dtype)
    assert (found[2][:, 1:, ::3] == 0).all()
    masked = token_logprobs(values, torch.full((2, 6), 3), 0, V)
    assert (masked == -torch.inf).all()


def test_targets_that_no_rank_has():
    """Log-probability 0, and minus the probabilities as gradient. Any integer will do, -100 of ignored labels too."""
    values = torch.randn(2, 6, V)
    target = torch.tensor([[-100, -1, V, V + 7, 2**40, 5], [0, V - 1, -(2**40), 3, 4, 5]])
    found, wanted = run(values, target)
    check(found, wanted, 1, torch.float32)
    outside = (target < 0) | (target >= V)
    assert (found[0][outside] == 0).all()
    assert (found[2][outside] != 0).all()
    found, wanted = run(values, torch.full((2, 6), -100))
    check(found, wanted, 1, torch.float32)
    assert (found[0] == 0).all()
    assert found[2].abs().sum() > 1


@pytest.mark.parametrize("with_log_probs", [False, True])
def test_entropies_that_nobody_wants_give_no_nan(with_log_probs):
    """SkyRL 0.4.0 does not look at tokens that its loss leaves out. The log-probabilities' gradient has its NaN."""
    values, weights = torch.randn(1, 8, V), torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.0, 1.0, 1.0, 0.0]])
    values[0, 0, 3], values[0, 1, :], values[0, 2, 5], values[0, 6, 7] = torch.nan, -torch.inf, torch.inf, torch.nan
    target, found = torch.zeros(1, 8, dtype=torch.long), []
    logits = made(values, lambda gradient: found.append(gradient.clone()))
    log_probs = token_logprobs(logits, target, 0, V, with_entropy=True)
    entropy = token_entropy(logits)
    (entropy * weights + (log_probs if with_log_probs else 0)).sum().backward()
    finite = torch.tensor([3, 4, 5, 7])
    _, exact, gradient = reference(
        values[:, finite], target[:, finite], torch.full((1, 4), float(with_log_probs)), weights[:, finite]
    )
    torch.testing.assert_close(entropy[:, finite].double(), exact, rtol=0, atol=tolerance(1))
    torch.testing.assert_close(found[0][:, finite].double(), gradient, rtol=0, atol=32 * tolerance(1))
    assert entropy[0, [0, 1, 2, 6]].isnan().all()
    assert found[0][0, 6].isnan().all()
    assert found[0][0, :3].isnan().all() if with_log_probs else (found[0][0, :3] == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_bad_row_stays_alone(bad, dtype, monkeypatch):
    values = torch.randn(2, 6, V).to(dtype)
    target = torch.randint(0, V, (2, 6))
    torch.manual_seed(1)
    good, _ = run(values, target, 4, monkeypatch, with_entropy=True)
    values[1, 2, 50] = bad
    torch.manual_seed(1)
    found, _ = run(values, target, 4, monkeypatch, with_entropy=True)
    rest = torch.ones(2, 6, dtype=torch.bool)
    rest[1, 2] = False
    for one, other in zip(found, good, strict=True):
        assert one[1, 2].isnan().all()
        assert torch.equal(one[rest], other[rest])


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,), (1, 0)])
def test_no_tokens(shape):
    found, _ = run(torch.randn(*shape, V), torch.zeros(shape, dtype=torch.long), with_entropy=True)
    assert found[0].shape == found[1].shape == shape
    assert found[2].shape == (*shape, V)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_targets_of_any_integer_dtype_stay_as_they_are(dtype):
    values, target = torch.randn(2, 3, V), torch.tensor([[1, 2, -100], [4, 5, 6]], dtype=dtype)
    before = target.clone()
    assert torch.equal(token_logprobs(values, target, 0, V), token_logprobs(values, target.long(), 0, V))
    assert torch.equal(target, before)
    assert target.dtype is dtype


def test_part_of_a_vocabulary_without_its_ranks():
    """Columns beyond vocab_end_index, as in a padded vocabulary, count in the softmax, as they do upstream."""
    values, target = torch.randn(2, 3, V), torch.tensor([[10, 11, 9], [100, 109, 110]])
    found = token_logprobs(values, target, 10, 110)
    exact = values.double().log_softmax(-1)
    wanted = [[exact[0, 0, 0], exact[0, 1, 1], 0], [exact[1, 0, 90], exact[1, 1, 99], 0]]
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.double), rtol=0, atol=tolerance(1))


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_chunk_size_changes_nothing(chunk):
    values, target = torch.randn(2, 7, V), torch.randint(0, V, (2, 7))
    wanted = token_logprobs(values, target, 0, V)
    assert torch.equal(token_logprobs(values, target, 0, V, chunk_size=chunk), wanted)
    assert torch.equal(token_logprobs(values, target, 0, V, chunk_size=chunk, inference_only=True), wanted)
    assert torch.equal(token_logprobs(values[0], target[0], 0, V, chunk_size=chunk), wanted[0])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_minus_cross_entropy(with_entropy):
    """As Megatron's cross entropy defines it, for targets outside of the vocabulary too: z_t is 0 there."""
    values = torch.randn(3, 7, V) * 5
    target = torch.randint(0, V, (3, 7))
    target[:, ::3] = torch.tensor([-100, V, V + 5])[:, None]
    weights, of_entropy, found = torch.randn(3, 7), torch.randn(3, 7), []
    logits = made(values, lambda gradient: found.append(gradient.clone()))
    log_probs, entropy = minus_cross_entropy(logits, target, with_entropy=with_entropy)
    del logits
    loss = (log_probs * weights).sum()
    if with_entropy:
        loss = loss + (entropy * of_entropy).sum()
    loss.backward()
    wanted = reference(values, target, weights, of_entropy if with_entropy else None)
    exact = values.double()
    unknown = (target < 0) | (target >= V)
    of_unknown = -(exact - exact.amax(-1, keepdim=True)).exp().sum(-1).log()
    wanted = (torch.where(unknown, of_unknown, wanted[0]), *wanted[1:])
    check((log_probs, entropy, found[0]), wanted, 5, torch.float32)
    assert of_unknown[unknown].abs().min() > 1e-3
    assert (entropy is None) is not with_entropy
    assert counters.observed() == {"backward in place": 1}


def test_inference_only():
    values, target = torch.randn(2, 7, V, requires_grad=True), torch.randint(0, V, (2, 7))
    wanted = token_logprobs(values, target, 0, V)
    for found in (
        token_logprobs(values, target, 0, V, inference_only=True),
        token_logprobs(values, target, 0, V, chunk_size=3, inference_only=True),
        torch.no_grad()(token_logprobs)(values, target, 0, V, with_entropy=True),
        torch.inference_mode()(token_logprobs)(values, target, 0, V, with_entropy=True),
        torch.inference_mode()(token_logprobs)(values.detach() * 1, target, 0, V, with_entropy=True),
    ):
        assert not found.requires_grad
        assert torch.equal(found, wanted)
    entropy = token_entropy(values)
    assert entropy.requires_grad
    assert torch.equal(token_entropy(values, inference_only=True), entropy)
    assert not token_entropy(values, inference_only=True).requires_grad


def test_under_autocast():
    values, target = torch.randn(2, 7, V), torch.randint(0, V, (2, 7))
    torch.manual_seed(1)
    plain, _ = run(values, target, with_entropy=True)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = run(values, target, with_entropy=True)
    assert all(map(torch.equal, plain, cast))


ARGUMENTS = {
    "no columns": ({"logits": torch.zeros(2, 3, 0)}, r"shape \[2, 3, 0\].*at least one column"),
    "integers": ({"logits": torch.zeros(2, 3, 5, dtype=torch.long)}, r"dtype torch.int64: expected floating-point"),
    "other tokens": ({"target": torch.zeros(2, 4, dtype=torch.long)}, r"\[2, 4\].*\[2, 3, 5\].*one target.*\[2, 3\]"),
    "floating targets": ({"target": torch.zeros(2, 3)}, "target has dtype torch.float32: expected integers"),
    "other device": ({"target": torch.zeros(2, 3, dtype=torch.long, device="meta")}, "target is on meta"),
    "empty part": ({"start": 3, "end": 3}, "vocab_start_index 3 and vocab_end_index 3 span 0"),
    "too large a part": ({"end": 6}, r"span 6 tokens, and the logits have 5 columns \(\[2, 3, 5\]\)"),
    "chunk": ({"chunk_size": 0}, "chunk_size is 0: expected a number of tokens, 1 or more, or None"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments_are_named(case):
    change, message = ARGUMENTS[case]
    good = {"logits": torch.zeros(2, 3, 5), "target": torch.zeros(2, 3, dtype=torch.long), "start": 0, "end": 5}
    arguments = {**good, **change}
    with pytest.raises(ValueError, match=message):
        token_logprobs(
            arguments["logits"],
            arguments["target"],
            arguments["start"],
            arguments["end"],
            chunk_size=arguments.get("chunk_size"),
        )


def test_bad_arguments_of_the_cross_entropy():
    with pytest.raises(ValueError, match=r"\[2, 4\].*\[2, 3, 5\].*one target"):
        minus_cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))


def test_bad_arguments_of_the_entropy():
    with pytest.raises(ValueError, match=r"shape \[\]"):
        token_entropy(torch.zeros(()))
    with pytest.raises(ValueError, match="chunk_size is -1"):
        token_entropy(torch.zeros(2, 5), chunk_size=-1)


# ------------------------------------------------------------------------------------- what must not wait


def test_counting_waits_for_nobody_for_long(monkeypatch):
    """Backward counts, and a report asks: within a signal's handler, too, that has interrupted the counting."""
    monkeypatch.setattr(counters, "TIMEOUT", 0.01)
    with stuck_in(counters.locked()):
        counters.count("it is a test")
        assert counters.observed() == {"backward out of place because it is a test": 1}
    with counters.locked(), counters.locked():
        counters.count(None)


@pytest.mark.parametrize("failing", ["never ends", "no thread"])
def test_a_measurement_that_does_not_end_leaves_backward_out_of_place(monkeypatch, failing):
    """Within a rank's backward, other ranks waiting."""
    free = threading.Event()
    if failing == "never ends":
        monkeypatch.setattr(ownership, "TIMEOUT", 0.01)
        monkeypatch.setattr(ownership, "_calibrate", lambda: free.wait(60))
    else:

        def start(self):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
    ownership._lowest_counts.cache_clear()
    try:
        leaf = torch.randn(3, 5, requires_grad=True)
        token_logprobs(leaf * 1, torch.tensor([0, 1, 2]), 0, 5).sum().backward()
        wanted = torch.nn.functional.one_hot(torch.tensor([0, 1, 2]), 5) - leaf.detach().softmax(-1)
        torch.testing.assert_close(leaf.grad, wanted)
        assert counters.observed() == {f"backward out of place because {ownership.UNPROVEN}": 1}
    finally:
        free.set()
        ownership._lowest_counts.cache_clear()
