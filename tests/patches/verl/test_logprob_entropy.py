"""verl-logprob-entropy on verl's real functions: before, after, and after a revert.

The yardstick is float64 over the whole vocabulary, and what verl itself computes. logprob_entropy_ranks.py runs the
cases, through the engine's `_lm_head_logits_processor` where there is one, so at a temperature of 2, in place; sizes
are small, with blocks of four tokens, but for three cases of 4096 tokens.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import verl

WORKER = "tests.patches.verl.logprob_entropy_ranks"
IN_PLACE = {"backward in place": 1}
OUT_OF_PLACE = {"backward out of place because something else holds the logits": 1}
MUTATED = "has been modified by an inplace operation"
RUNS = {"0.9": (None, 2)}
MORE = {
    "0.1": ("0.1", 2),
    "0.9 on one rank": (None, 1),
    "0.9 on four ranks": (None, 4),
    "0.3": ("0.3", 2),
    "0.1 on four ranks": ("0.1", 4),
}


RULE_COVERAGE = {
    "minimal scope": "because the bug, a copy and a softmax of the logits, is in every call of what it replaces",
    "no side effects": ("test_the_logits_are_untouched", "test_who_reads_the_logits_in_between"),
    "backward compatible": (
        "test_dtypes_are_the_same",
        "test_targets_that_no_rank_has_are_verls",
        "test_labels_and_shapes",
    ),
    "known": "vocab_parallel/test_sharing.py::test_views_made_without_grad_are_cut_off",
    "no new blocking": "test_two_collectives_forward_and_none_backward",
    "reads the original values": "test_who_reads_the_logits_in_between",
    "does not modify the logits": "test_the_logits_are_untouched",
    "The patch does not change": "because no other function is changed",
}


@pytest.fixture(scope="module", params=[*RUNS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def reports(run_ranks, request):
    release, ranks = {**RUNS, **MORE}[request.param]
    return run_ranks(WORKER, levels=verl(release), ranks=ranks, TORCHDYNAMO_DISABLE="1")


@pytest.fixture
def old(reports):
    """Whether the caller asks for log-probabilities first."""
    return reports[0]["row"]["version"] < "0.4"


def pairs(reports, state="after"):
    """(name, what was there before, what is there in a state), for every case and rank."""
    for report in reports:
        for name, found in report[state].items():
            yield name, report["before"][name], found


def test_it_applies_and_nothing_fails(reports):
    for report in reports:
        assert report["row"]["status"] == "applied"
    for name, _, after in pairs(reports):
        assert after["failed"] is None, name


def test_the_logits_are_untouched(reports, old):
    """As released, the cross entropy writes into logits in fp32 that are not cloned before."""
    for name, before, after in pairs(reports):
        assert after["untouched"], name
        cloned = not old and ("metric" in name or "loss" in name or name in ("rows", "inference", "sum", "chunks"))
        if name in ("log-probs", "unknown", "large-direct"):
            assert not before["untouched"], name
        elif cloned:
            assert before["untouched"], name


def test_log_probabilities_are_verls(reports):
    """Bit for bit; from three ranks on, gloo adds up in another order for sums of another length."""
    for name, _, after in pairs(reports):
        assert after["same_log_probs"] or len(reports) > 2, name
        assert after["distance_of_log_probs"] <= 2**-23, name


def test_dtypes_are_the_same(reports):
    for name, before, after in pairs(reports):
        assert after["dtypes"] == before["dtypes"], name


def test_errors_against_float64_are_no_larger(reports):
    """Of the same formulas in another order: one unit in the last place of the largest is allowed.

    Two where verl has none to compare with.
    """
    seen = set()
    for name, before, after in pairs(reports):
        last_place = 2**-8 if name.endswith("bfloat16") else 2**-23
        for key in [key for key in after if key.startswith("error_of_")]:
            seen.add(key)
            assert after[key] <= max(before.get(key, 2 * last_place), last_place), (name, key)
    assert seen == {"error_of_log_probs", "error_of_entropy", "error_of_gradient"}


def test_targets_that_no_rank_has_are_verls(reports):
    """Minus the logarithm of the sum: the tests above leave these tokens out of the log-probabilities."""
    for name, before, after in pairs(reports):
        if name == "unknown":
            assert after["distance_of_log_probs"] <= 2**-23
            assert after["distance_of_gradient"] <= 4 * 2**-23
            assert before["error_of_gradient"] <= 4 * 2**-23, "and their gradient is not 0"


def test_labels_and_shapes(reports):
    """What verl takes is taken, of every type and also of no token at all; with the dtypes that it has."""
    for report in reports:
        before, after = report["inputs"]["before"], report["inputs"]["after"]
        assert len(before) == 80
        taken = {name for name, found in before.items() if isinstance(found, list)}
        assert len(taken) > 30
        for name in taken:
            assert isinstance(after[name], list), (name, after[name])
            assert after[name][:3] == before[name][:3], name
            assert after[name][3] <= max(2 * before[name][3], 2**-20), name


def test_two_collectives_forward_and_none_backward(reports, old):
    for name, before, after in pairs(reports):
        if len(reports) == 1:
            expected = [3 if name == "sum" else 0, 0]
        else:  # without gradients, the two calls of old releases are two passes
            expected = [5 if name == "sum" else 4 if old and name in ("metric", "inference") else 2, 0]
        # A metric of old releases has a gradient like any other.
        if old and name == "metric" and len(reports) > 1:
            expected = [2, 0]
        assert after["collectives"] == expected, name
        assert before["collectives"][0] > after["collectives"][0], name


def test_in_place(reports):
    for name, _, after in pairs(reports):
        if name == "inference":
            assert after["observed"] == {}
        else:
            assert after["observed"] == (OUT_OF_PLACE if name == "held" else IN_PLACE), name


def test_memory(reports):
    """In multiples of the logits, at 4096 tokens. The whole tensor in backward is the gradient of verl's division."""
    for name, before, after in pairs(reports):
        if name.startswith("large"):
            assert after["extra_memory"][0] <= 0.1, name
            assert after["extra_memory"][1] <= (0.1 if name == "large-direct" else 1.1), name
            assert name == "large-direct" or before["extra_memory"][0] >= 2.9, name


def test_who_reads_the_logits_in_between(reports, old):
    """As top-k distillation may: what it has saved is overwritten as released."""
    for report in reports:
        assert ("distillation" in report["after"]) is not old
        if not old:
            assert MUTATED in report["before"]["distillation"]["failed"]
            assert report["after"]["distillation"]["same_seen"]


def test_reverted_it_is_verls_again(reports):
    for name, before, reverted in pairs(reports, "reverted"):
        for key in ("collectives", "failed", "observed", "untouched"):
            assert reverted.get(key) == before.get(key), name
        assert all(value for key, value in reverted.items() if key.startswith("same_")), name
