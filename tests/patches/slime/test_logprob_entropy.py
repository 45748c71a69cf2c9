"""slime-logprob-entropy: what is put in, and slime's real files, before, after and after a revert.

Without a clone (tests/harness/slime_clone.py) the tests of its files are skipped, and what is left is the record of its
tags (tests/record), by which the patch recognizes the functions, and the tests of what is put in.
"""

from __future__ import annotations

import pytest

from tests.harness import slime_clone
from tests.harness.forkserver import MEGATRON, Level
from tests.harness.slime_clone import with_clone

RULE_COVERAGE = {
    "minimal scope": "test_a_metric_gets_no_gradient_and_what_top_p_leaves_over_is_slimes",
    "no side effects": (
        "because tensors are all it gets; those that somebody holds stay: vocab_parallel/test_ownership.py"
    ),
    "backward compatible": ("test_functions", "test_what_is_put_in"),
    "known": "vocab_parallel/test_sharing.py::test_views_made_without_grad_are_cut_off",
    "no new blocking": "because every rank makes one all-reduce of maxima and one of sums; no lock is held",
    "does not change log-probabilities": "test_a_metric_gets_no_gradient_and_what_top_p_leaves_over_is_slimes",
}

FILES = ("slime/utils/ppo_utils.py", *(f"slime/backends/megatron_utils/{name}.py" for name in ("loss", "cp_utils")))
# Tag and what its metadata say, number of ranks, and of those, how many for context parallelism.
RUNS = {
    "v0.1.0": ("v0.1.0", "0.0.1", 2, 1),
    "main": ("HEAD", "0.3.1", 2, 1),
    "main, context parallel": ("HEAD", "0.3.1", 2, 2),
}
MORE = {
    "v0.2.0": ("v0.2.0", "0.2.0", 2, 1),
    "v0.2.4": ("v0.2.4", "0.2.3", 2, 1),
    "v0.3.0": ("v0.3.0", "0.3.0", 2, 1),
    "v0.3.1 on one rank": ("v0.3.1", "0.3.1", 1, 1),
    "v0.1.0 on four ranks": ("v0.1.0", "0.0.1", 4, 1),
    "main on four ranks": ("HEAD", "0.3.1", 4, 1),
    "main, tensor and context parallel": ("HEAD", "0.3.1", 4, 2),
}


@pytest.fixture(scope="session", params=[*RUNS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def run(request, run_ranks, tmp_path_factory):
    """Name, and each rank's report."""
    tag, version, ranks, context = {**RUNS, **MORE}[request.param]
    folder = slime_clone.write(tmp_path_factory.mktemp("slime"), tag, version, FILES)
    worker = "tests.patches.slime.logprob_entropy_ranks"
    levels = (*MEGATRON, Level("tests.harness.loading:torch", str(folder)))
    arguments = ("--context-parallel", str(context))
    return request.param, run_ranks(worker, *arguments, levels=levels, ranks=ranks, TORCHDYNAMO_DISABLE="1")


def pairs(reports, part, state="after"):
    for report in reports:
        for name, found in report[part][state].items():
            yield name, report[part]["before"][name], found


@with_clone
def test_functions(run):
    tag, reports = run
    alone = len(reports) == 1 or "context parallel" in tag
    for name, before, after in pairs(reports, "functions"):
        assert after["shapes"] == before["shapes"], name
        assert after["untouched"], name
        assert after["held"], name
        if name == "empty":
            continue
        if name == "masked":
            assert (after["collectives"], after["observed"]) == (before["collectives"], {}), "slime's own"
            continue
        assert after["distance_of_log_probs"] <= 2**-23, name
        assert after["same_log_probs"] or len(reports) > 2, name
        # Gradients of the same formula in another order.
        for key in [key for key in after if key.startswith("error_of_")]:
            assert after[key] <= max(before[key], 2 * 2**-23), (name, key)
        if not (alone and "tensor" not in tag):
            assert after["collectives"] == [2, 0], name
        held = {"backward out of place because something else holds the logits": 1}
        assert after["observed"] == (held if name == "held" else {"backward in place": 1}), name
        if name == "large":  # 4096 tokens; a quarter of the usual block for a quarter of a usual vocabulary
            assert max(after["extra_memory"]) <= 0.1
            assert before["extra_memory"][0] >= 2
    for name, before, reverted in pairs(reports, "functions", "reverted"):
        assert reverted["collectives"] == before["collectives"], name


@with_clone
def test_the_fused_cross_entropy_rounds_its_gradient_to_bfloat16(run):
    """Until 0.3.0, with logits in fp32; ours does not."""
    tag, reports = run
    old = tag.split()[0].rstrip(",") not in ("main", "v0.3.1")
    for _, before, after in pairs(reports, "functions"):
        if "error_of_gradient" in after:
            assert (before["error_of_gradient"] > 2**-11) == old
            assert after["error_of_gradient"] <= 4 * 2**-23


@with_clone
def test_slimes_own_policy_loss(run):
    """Packed samples and a temperature. Until 0.2.4 each sample is a call of its own; the last one owns the logits."""
    tag, reports = run
    by_sample = tag.split()[0] in ("v0.1.0", "v0.2.0", "v0.2.4")
    for name, before, after in pairs(reports, "policy"):
        assert after["distance_of_loss"] <= 2**-22, name
        assert after["distance_of_entropy"] <= 4e-6, name
        assert after["distance_of_gradient"] <= (2**-8 if by_sample or tag == "v0.3.0" else 1e-6), name
        assert after["collectives"] < before["collectives"], name
        held = {"backward out of place because something else holds the logits": 2}
        assert after["observed"] == {"backward in place": 1, **(held if by_sample else {})}, name


# ------------------------------------------------------------------------------------- what is put in


@pytest.mark.parametrize("kind", ["0.2.0", "0.2.2", "0.3.1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_put_in(kind, dtype):
    """Against float64, in one process."""
    torch = pytest.importorskip("torch")

    from rlhf_patches.patches.slime import _logits as ours
    from tests.harness.token_reference import made, reference

    def function(values, tokens):
        if kind == "0.3.1":
            return ours.around_masked(None, None, (values, tokens, None, True, 4, None, True), {})
        return (
            ours.whole(values, tokens, None, True) if kind == "0.2.0" else ours.in_chunks(values, tokens, None, True, 4)
        )

    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(11, 23, generator=generator) * 4).to(getattr(torch, dtype))
    tokens = torch.randint(23, (11,), generator=generator)
    weights, of_entropy = torch.randn(2, 11, generator=generator)
    gradients = []
    log_probs, entropy = function(made(values, gradients.append), tokens)
    ((log_probs.squeeze(-1) * weights).sum() + (entropy * of_entropy).sum()).backward()
    exact = reference(values, tokens, weights, of_entropy)
    last_place = torch.finfo(values.dtype).eps
    assert (log_probs.shape, log_probs.dtype) == ((11, 1), torch.float32)
    assert (entropy.shape, entropy.dtype) == ((11,), torch.float32 if kind == "0.3.1" else values.dtype)
    torch.testing.assert_close(log_probs.squeeze(-1).double(), exact[0], rtol=0, atol=16 * 2**-23 * 4)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=last_place, atol=16 * 2**-23 * 4)
    torch.testing.assert_close(gradients[0].double(), exact[2], rtol=2 * last_place, atol=4 * last_place)
    none = function(values[:0], tokens[:0])
    assert [list(one.shape) for one in none] == [[0], [0]]


def test_a_metric_gets_no_gradient_and_what_top_p_leaves_over_is_slimes():
    torch = pytest.importorskip("torch")

    from rlhf_patches.patches.slime import _logits as ours

    values, tokens = torch.randn(5, 7, requires_grad=True) * 1, torch.arange(5)
    log_probs, entropy = ours.around_masked(None, None, (values, tokens, None, True, -1, None, False), {})
    assert (log_probs.requires_grad, entropy.requires_grad) == (True, False)
    mask = torch.ones(5, 7, dtype=torch.bool)
    arguments = (values, tokens, None, True, -1, mask, False)
    assert ours.around_masked(lambda *args: args, None, arguments, {}) == arguments
    assert ours.around_masked(None, None, (values, tokens, None, False, -1, None, True), {})[1] is None
