"""SkyRL's patches on its real functions, two tensor-parallel ranks: before, after, and after a revert.

The yardstick is float64 over the whole vocabulary, and what SkyRL itself computes. logprob_backward_ranks.py runs
the cases; sizes are small, with blocks of four tokens.
"""

from __future__ import annotations

import pytest

from tests.harness import look_alikes, side_by_side
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import MEGATRON, TORCH, Level

RELEASES = exhaustive_but(("0.2", "0.3", "0.4"), "0.4")
PARTS = (
    *("statuses", "whatever_worked", "fused", "without_group", "across"),
    *("functions", "functions_without_the_entropy_patch", "context_parallel"),
)
WORKER = "logprob_backward_ranks"
IN_PLACE = {"backward in place": 1}
RULE_COVERAGE = {
    "minimal scope": "test_with_the_entropy_patch_disabled_nothing_gets_worse",
    "no side effects": "because tensors are all it gets; those that somebody holds stay: test_ownership.py",
    "backward compatible": ("test_whatever_skyrls_functions_take", "test_within_torch_compile"),
    "known": "vocab_parallel/test_sharing.py::test_views_made_without_grad_are_cut_off",
    "no new blocking": "because each call has one all-reduce of maxima and one of sums, on every rank of the group",
    "bit for bit": "test_log_probabilities_are_the_same_bit_for_bit",
    "result's dtype is the logits' dtype, as before": "test_dtypes_are_the_same",
    "The patch does not change": "test_context_parallel_callers",
    "stays as it is": "test_with_the_entropy_patch_disabled_nothing_gets_worse",
    "writes into the logits only under": "vocab_parallel/test_ownership.py::test_whoever_holds_them",
}
OUT_OF_PLACE = {"backward out of place because something else holds the logits": 1}
MUTATED = "has been modified by an inplace operation"
MODULE = "skyrl/backends/skyrl_train/distributed/megatron/model_utils.py"


# Not on top of megatron-core, whose import leaves Dynamo unable to trace an all_reduce.
COMPILED = (*TORCH, Level("tests.harness.loading:torch", str(side_by_side.folder("skyrl-0.4"))))


def parts_of(release):
    return (*PARTS, *(["chunked_entropy"] if release == "0.4" else []))


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def reports(skyrl_ranks, release):
    """Each rank's."""
    return skyrl_ranks(release, *parts_of(release), worker=WORKER)


def pairs(reports, part="functions", state="after"):
    """(name, what was there before, what is there in a state), for every case and rank."""
    for report in reports:
        for name, found in report[part][state].items():
            yield name, report[part]["before"][name], found


def test_all_patches_of_the_release_apply(reports, release):
    for report in reports:
        assert report["skyrl"] == f"{release}.0"
        assert report["statuses"] == {
            "skyrl-logprob-backward": "applied",
            "skyrl-entropy-backward": "applied",
        }


def test_before_the_chunked_loss_with_entropy_crashes_in_0_2_and_nowhere_else(reports, release):
    for name, before, _ in pairs(reports):
        # The entropy's backward runs first, as its forward ran last, and the other one finds its logits changed.
        crashes = release == "0.2" and name.removesuffix("-bfloat16") in (
            "chunked-loss",
            "chunked-unknown-loss",
            "chunked-class-loss",
            "packed-loss",
            "held-loss",
        )
        assert (MUTATED in (before["failed"] or "")) == crashes, name


def test_in_0_2_the_chunked_loss_with_entropy_no_longer_crashes(skyrl_ranks):
    for report in skyrl_ranks("0.2", *FEW, worker=WORKER):
        before, after, reverted = (report["demo"][state] for state in ("before", "after", "reverted"))
        assert before["chunked"]["failed"] is after["chunked"]["failed"] is reverted["chunked"]["failed"] is None
        assert MUTATED in before["chunked-loss"]["failed"]
        for name, found in after.items():
            assert found["failed"] is None
            assert found["same_log_probs"]
            assert found["error_of_gradient"] <= 2 * 2**-23, name


def test_after_nothing_fails(reports):
    for name, _, after in pairs(reports):
        assert after["failed_forward"] is None
        if name.startswith("inference"):
            assert "not enough values to unpack" in after["failed"], "as SkyRL says it"
        else:
            assert after["failed"] is None, name


def test_log_probabilities_are_the_same_bit_for_bit(reports):
    for name, _, after in pairs(reports):
        assert after.get("same_log_probs", name.startswith("entropy-alone")), name


def test_dtypes_are_the_same(reports):
    for name, before, after in pairs(reports):
        for key in ("log_probs_dtype", "entropy_dtype"):
            assert after.get(key) == before.get(key), name


def test_errors_against_float64_are_no_larger(reports):
    """Gradients of the same formula in another order: one unit in the last place of the largest is allowed.

    Two where SkyRL has none to compare with: those of log-probabilities and entropies add up.
    """
    seen = set()
    for name, before, after in pairs(reports):
        last_place = 2**-8 if name.endswith("bfloat16") else 2**-23
        for key in [key for key in after if key.startswith("error_of_")]:
            seen.add(key)
            assert after[key] <= max(before.get(key, 2 * last_place), last_place), (name, key)
    assert seen == {"error_of_log_probs", "error_of_entropy", "error_of_gradient"}


def test_gradients_are_skyrls(reports):
    """But for the entropy of bfloat16 logits, whose sums SkyRL computes in bfloat16."""
    compared = 0
    for name, _, after in pairs(reports):
        if "distance_of_gradient" in after and name != "entropy-alone-bfloat16":
            assert after["distance_of_gradient"] <= (2**-7 if name.endswith("bfloat16") else 2e-6), name
            compared += 1
    assert compared > 30


def test_two_collectives_forward_and_none_backward(reports):
    for name, before, after in pairs(reports):
        # Entropies are computed on the way if SkyRL's own functions ask for them, in SkyRL's order.
        alone = "class" in name or name in ("entropy-first", "inference-packed-whole")
        both = "log_probs_dtype" in after and "entropy_dtype" in after
        assert after["collectives"] == [4 if alone and both else 2, 0], name
        assert before["collectives"][0] > after["collectives"][0], name


def test_in_place_with_skyrls_own_functions(reports):
    for name, _, after in pairs(reports):
        if name.startswith("held"):
            assert after["observed"] == OUT_OF_PLACE
            assert after["held_unchanged"], name
        elif name.startswith("inference"):
            assert after["observed"] == {}
        elif ("loss" in name and "class" in name) or name == "entropy-first":
            assert after["observed"] == IN_PLACE | OUT_OF_PLACE, "two functions: the second has the logits alone"
        else:
            assert after["observed"] == IN_PLACE, name


def test_memory(reports, release):
    """In multiples of the logits. Backward needs the block of tokens, and tensors of one number per token."""
    for name, before, after in pairs(reports):
        if name in ("chunked", "whole", "packed", "packed-whole", "chunked-loss", "whole-loss", "packed-loss"):
            assert after["extra_memory"][0] < 0.5, name
            assert after["extra_memory"][1] < 0.2, name
            if before["failed"] is None:
                assert before["extra_memory"][1] > 1.0, name


def test_reverted_it_is_skyrls_again(reports):
    for part in PARTS[5:]:
        for name, before, reverted in pairs(reports, part, "reverted"):
            for key in ("collectives", "failed", "observed"):
                assert reverted.get(key) == before.get(key), name
            assert all(value for key, value in reverted.items() if key.startswith("same_")), name


def test_context_parallel_callers(reports):
    for name, _, after in pairs(reports, "context_parallel"):
        assert after["same_log_probs"], name
        assert after["distance_of_gradient"] <= 2e-6
        assert after["observed"] == IN_PLACE


FEW = ("demo", "functions_without_the_entropy_patch")
"""Of 0.2, which has a bug of its own."""


@pytest.mark.parametrize("release", exhaustive_but(("0.2", "0.3", "0.4"), "0.2", "0.4"))
def test_with_the_entropy_patch_disabled_nothing_gets_worse(skyrl_ranks, release):
    """In 0.2.0 the entropy writes into the logits, so the function that would save them is left alone."""
    reports = skyrl_ranks(release, *(FEW if release == "0.2" else parts_of(release)), worker=WORKER)
    for name, before, after in pairs(reports, "functions_without_the_entropy_patch"):
        assert after["same_log_probs"]
        assert (after["failed"] is None) == (before["failed"] is None), name
        assert after["observed"] == ({} if release == "0.2" else IN_PLACE), name


def test_whatever_skyrls_functions_take(reports):
    """Fewer targets than tokens, integers for logits, and others that ours do not compute; errors stay errors."""
    worked = set()
    for name, before, after in pairs(reports, "whatever_worked"):
        assert (before["failed"] is None) == (after["failed"] is None), (name, after["failed"])
        if before["failed"] is None:
            worked.add(name)
            assert after["distance_of_result"] <= 2e-6, name
    assert {name for report in reports for name in report["whatever_worked"]["before"]} - worked == {
        *("chunk of no tokens", "backward of inference_only", "changed before backward"),
    }


def test_the_function_without_logits_agrees(reports, release):
    """SkyRL's own choice between the two is one of memory; targets that no rank has included."""
    for report in reports:
        assert set(report["fused"]) == ({"none", "every third", "all"} if release in ("0.3", "0.4") else set())
        for name, found in report["fused"].items():
            assert all(one <= 4e-6 for kind in ("chunked", "whole") for one in found[kind]), (name, found)
            assert all(one > 0.1 for one in found["gradients"])


def test_without_a_tensor_parallel_group_the_entropy_is_skyrls(reports, release):
    for report in reports:
        before, after = (report["without_group"][state]["run"] for state in ("before", "after"))
        assert after == before
        assert after["replaced"]["entropy"] == [[[6.0, 22.0, 38.0, 54.0, 70.0, 86.0]], None]
        assert len(after["replaced"]) == (4 if release == "0.4" else 1)
        assert not any(error for _, error in after["replaced"].values())
        assert all("not initialized" in error for _, error in after["bare"].values())


def test_a_graph_of_one_state_is_not_computed_by_the_other(reports):
    """Loudly, but for `DistributedLogprob`, where the original is at hand."""
    for report in reports:
        failed = {name for name, error in report["across"].items() if error}
        assert failed == {f"{name}, then revert" for name in ("whole", "chunked", "entropy")}


def test_the_chunked_entropy_of_0_4(skyrl_ranks):
    """Each slice's backward makes a tensor of the size of all logits, and two more collectives per chunk."""
    reports = skyrl_ranks("0.4", *parts_of("0.4"), worker=WORKER)
    for name, before, after in pairs(reports, "chunked_entropy"):
        assert after["observed"] == IN_PLACE
        assert after["distance_of_gradient"] <= 2e-6, name
        if name.startswith("bad-"):  # NaN or infinite where a whole chunk has no weight
            assert after["distance_of_sum"] <= 2e-6, name
        elif name.startswith("sum-"):
            assert after["collectives"] == 2 <= before["collectives"] - 1
            assert after["distance_of_sum"] <= 2e-6
            assert after["extra_memory"] < 0.2 < 1.0 < before["extra_memory"], name
        else:
            assert after["collectives"] == [2, 0]
    chunks = reports[0]["chunked_entropy"]["before"]
    assert chunks["chunk-1"]["collectives"] == [33, 0]


@pytest.mark.exhaustive
def test_within_torch_compile(run_ranks):
    """Dynamo takes none of our functions apart; SkyRL's own it makes one graph of, as released."""
    (found,) = run_ranks("tests.harness.compiled_regions_ranks", "skyrl", levels=COMPILED, ranks=1)
    assert found["cases"] == ["chunked: ok", "whole: ok", "entropy: ok", "callers: ok"]
    assert found["whole graph"] == {"chunked": ["ok", "ok"], "whole": ["ok", "ok"]}


@pytest.mark.exhaustive
def test_disabled_they_stay_away(skyrl_ranks):
    part = "functions_without_the_entropy_patch"
    reports = skyrl_ranks("0.2", "statuses", part, worker=WORKER, RLHF_PATCHES_DISABLE="skyrl-*")
    for report in reports:
        assert set(report["statuses"].values()) == {"disabled"}
    for name, before, after in pairs(reports, part):
        assert after["observed"] == {}
        assert (after["collectives"], after["failed"]) == (before["collectives"], before["failed"]), name


@pytest.mark.parametrize(
    ("version", "edit", "status"),
    [
        ("0.3.0", ("= ChunkedDistributedLogprob.apply(", "= (0, ChunkedDistributedLogprob)[1].apply("), "refused"),
        ("not-a-version", ("softmax_output.neg_()", "softmax_output.neg()"), "unaffected"),
    ],
)
def test_look_alikes(tmp_path, version, edit, status):
    source = side_by_side.folder("skyrl-0.3") / MODULE
    edit = look_alikes.replacing(*edit)
    row = look_alikes.doctor_row(tmp_path, "skyrl-logprob-backward", version=version, edit=edit, source=source)
    assert row["status"] == status


@pytest.mark.parametrize(
    ("version", "edit", "status"),
    [
        ("0.3.0", (), "applied"),  # shows that the other is not left alone for want of a working copy
        ("0.3.0", ("softmax_output.neg_()", "softmax_output.neg()"), "refused"),
    ],
)
def test_keeping_away(run_ranks, tmp_path, version, edit, status):
    """The same for real: refused, not a byte of the code is another."""
    text = (side_by_side.folder("skyrl-0.3") / MODULE).read_text()
    (tmp_path / MODULE).parent.mkdir(parents=True)
    (tmp_path / MODULE).write_text(look_alikes.replacing(*edit)(text))
    look_alikes.write_metadata(tmp_path, "skyrl", version)
    levels = (*MEGATRON, Level("tests.harness.loading:torch", str(tmp_path)))
    module = MODULE.removesuffix(".py").replace("/", ".")
    arguments = ("skyrl-logprob-backward", module, "tests.harness.skyrl_on_cpu:install")
    (found,) = run_ranks("tests.harness.keeping_away_ranks", *arguments, levels=levels, ranks=1)
    assert found["file"].startswith(str(tmp_path))
    assert found["status"] == status
    assert len(found["as written"]) > 2
    assert all(found["as written"]) == (status != "applied")
