"""Two and four ranks, each with its part of the vocabulary; and SkyRL's own file where it can be had."""

from __future__ import annotations

import pytest

from tests.harness import upstream_logprob
from tests.harness.forkserver import TORCH

WORKER = "tests.patches.vocab_parallel.ownership_ranks"
EPS = {"torch.float32": 2**-23, "torch.bfloat16": 2**-7, "torch.float16": 2**-10}


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, id="two ranks"), pytest.param(4, id="four ranks", marks=pytest.mark.exhaustive)],
)
def reports(request, run_ranks):
    return run_ranks(WORKER, levels=TORCH, ranks=request.param)


def scale_of(name):
    return int(name.split()[0].partition("scale")[2] or 3)


def test_against_float64(reports):
    """Float32 arithmetic: a few units of the largest x - m; the gradient is rounded to the logits' dtype once more."""
    for report in reports:
        for name, found in (report["ours"] | {f"{k} one": v for k, v in report["one rank"].items()}).items():
            bound = 16 * 2**-23 * max(1, scale_of(name))
            assert found["log_probs"] <= bound, name
            assert (found["entropy"] or 0) <= bound, name
            # Weights go up to 4. The gradients of entropies have a factor of the size of x - m.
            of_gradient = 4 * bound * (1 if found["entropy"] is None else 8 * scale_of(name))
            # Rounding: half a unit of gradients that are at most 4, or, of entropies, 4 * x - m.
            size = 4 if found["entropy"] is None else 4 * max(1, scale_of(name))
            assert found["gradient"] <= of_gradient + EPS[found["dtypes"][1]] / 2 * size, name
            assert found["dtypes"][0] == "torch.float32"


def test_collectives(reports):
    """Two forward and none backward, whatever the chunks; four if the entropies are asked for apart; none alone."""
    for report in reports:
        for name, found in report["ours"].items():  # without tokens there is nothing to reduce
            expected = 4 if name.endswith("apart") else 2
            assert found["collectives"] == ([0, 0] if name.startswith("no-tokens") else [expected, 0]), name
        assert all(found["collectives"] == [0, 0] for found in report["one rank"].values())
        assert report["default group"]["collectives"] == [2, 0]


def test_in_place(reports):
    for report in reports:
        for name, found in report["ours"].items():
            if name.endswith("apart"):
                assert found["observed"] == {
                    "backward in place": 1,
                    "backward out of place because something else holds the logits": 1,
                }, name
            else:
                assert found["observed"] == {"backward in place": 1}, name


def test_ranks_agree(reports):
    """On log-probabilities and entropies bit for bit: the loss is computed on every rank."""
    for name in reports[0]["ours"]:
        assert len({tuple(report["ours"][name]["bits"]) for report in reports}) == 1, name


def test_one_nan_row(reports):
    """On every rank, though only the first has the NaN."""
    for report in reports:
        for kind in ("alone", "together", "apart"):
            found = report["ours"][f"nan {kind}"]
            assert found["bad rows"] == found["bad rows of the gradient"] == [[1, 2]]
            assert found["bad elements of the gradient"] == found["row"]


def test_entropies_of_a_window_in_one_loss(reports):
    assert all(report["joint loss"]["ours"] is None for report in reports)


# ------------------------------------------------------------------------------------- next to SkyRL's own

upstream = pytest.mark.skipif(
    not upstream_logprob.find(), reason="no SkyRL beside this environment; `.cache/tools/bin/nox -s frameworks` has it"
)


def pairs(reports, version):
    """Each case as the two have computed it, where upstream can."""
    for report in reports:
        for name, found in report["theirs"][version].items():
            if "failed" not in found:
                yield name, report["ours"][f"{name.split()[0]} alone"], found


@upstream
@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_log_probabilities_are_upstreams_bit_for_bit(reports, version):
    """On two ranks. From three on, gloo adds up in an order that depends on where in a tensor a number stands."""
    if len(reports) > 2:
        pytest.skip("three ranks or more")
    for name, mine, found in pairs(reports, version):
        assert mine["bits"] == found["bits"], name


@upstream
@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_our_error_is_no_larger(reports, version):
    """Each case within a unit in the last place of the largest number in it; over all cases, typically no larger."""
    typical = {"log_probs": [[], []], "gradient": [[], []]}
    for name, mine, found in pairs(reports, version):
        scale, dtype = max(1, scale_of(name)), mine["dtypes"][1]
        assert mine["log_probs"] <= found["log_probs"] + 8 * scale * EPS["torch.float32"], name
        assert mine["gradient"] <= found["gradient"] + 4 * EPS["torch.float32"], name
        if dtype == "torch.float32":  # else both errors are the rounding to the logits' dtype
            for what, (ours, theirs) in typical.items():
                ours.append(mine[f"typical {what}"] / scale)
                theirs.append(found[f"typical {what}"] / scale)
    for what, (ours, theirs) in typical.items():
        assert sum(ours) <= sum(theirs) * (1 if what == "gradient" or len(reports) == 2 else 1.01), what


@upstream
@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.3.0", "0.4.0"])
def test_targets_that_no_rank_has(reports, version):
    """Their log-probability is 0 and their gradient -softmax: upstream's, in chunks or not, and ours."""
    for report in reports:
        for name in ("none-in-range", "some-in-range", "none-in-range-bfloat16"):
            mine = [report["ours"][f"{name} {kind}"] for kind in ("alone", "together")]
            kinds = ("chunked", "unchunked")
            found = [report["theirs"][version][f"{name} {kind}"] for kind in kinds]
            found += [report["theirs on one rank"][f"{version} {name} {kind}"] for kind in kinds]
            close = 4 * EPS[mine[0]["dtypes"][1]]
            assert all(one["gradient"] <= close for one in (mine[0], *found)), name
            assert all(one["log_probs"] <= 16 * 3 * EPS["torch.float32"] for one in (*mine, *found)), name
            if name.startswith("none"):
                assert not any(any(one["bits"]) for one in (*mine, *found)), "0.0 bit for bit"
                assert all(one["has a gradient"] for one in (*mine, *found))


@upstream
def test_upstreams_collectives_before(reports):
    for report in reports:
        assert report["theirs"]["0.3.0"]["ragged chunked"]["collectives"] == [9, 6]


@upstream
def test_the_crash_of_0_2_0(reports):
    for report in reports:
        assert "has been modified by an inplace operation" in report["joint loss"]["0.2.0"]
        assert report["joint loss"]["0.3.0"] is None


@upstream
def test_what_upstream_cannot_do(reports):
    """Logits that are not contiguous; 0.2.0 can with chunks."""
    for report in reports:
        for version, kinds in (("0.2.0", ["unchunked"]), ("0.3.0", ["unchunked", "chunked"])):
            failed = {name for name, found in report["theirs"][version].items() if "failed" in found}
            assert failed == {f"{case} {kind}" for case in ("transposed", "transposed-bfloat16") for kind in kinds}
