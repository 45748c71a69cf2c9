"""SkyRL's padding for FP8: before, after, and after a revert, on its real wrapper.

fp8_alignment_layout_ranks.py: many sizes of tensor and context parallelism, in one process that is one rank after
the other. fp8_alignment_ranks.py: training on two real ranks, whose layers refuse what TransformerEngine
refuses.
"""

from __future__ import annotations

import itertools

import pytest

from tests.harness.look_alikes import doctor_row
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_without_fp8_and_reverted_nothing_changes",
    "no side effects": "because it pads copies of the batch, and reads the model's config",
    "backward compatible": (
        "test_without_fp8_training_is_the_same_bit_for_bit",
        "test_skyrl_gets_back_exactly_what_it_put_in",
    ),
    "no new blocking": "test_a_later_pipeline_stage_has_the_layout_of_the_first",
    "as before": "test_padding_changes_no_token",
    "unchanged": "test_without_fp8_and_reverted_nothing_changes",
    "Only the wrapper's calls": "test_each_sequence_has_no_more_padding_than_that",
}

MODULE = "skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py"
# What TransformerEngine's pages ask of the tokens on a rank. The last two have none: the largest of the others.
ON_A_RANK = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "custom": 128, "of the future": 128}
LENGTHS = (13, 0, 1, 160, 7, 128, 16)
SIZES = (1, 2, 3, 4, 6, 8)
"""Of tensor parallelism; `make test` has one that 16 is no multiple of."""
SOME = (1, 3)


@pytest.fixture(scope="session")
def run(skyrl_ranks):
    """The layouts of a release, on one rank."""

    def layouts_of(release, part="before-and-after", sizes=SIZES, **settings):
        arguments = (part, *map(str, sizes))
        (report,) = skyrl_ranks(release, *arguments, worker="fp8_alignment_layout_ranks", ranks=1, **settings)
        return report

    return layouts_of


@pytest.fixture(scope="module", params=[SOME, pytest.param(SIZES, marks=pytest.mark.exhaustive)], ids=len)
def sizes(request):
    return request.param


@pytest.fixture(scope="module")
def layouts(run, sizes):
    return run("0.2", sizes=sizes)


@pytest.fixture(scope="module")
def first_release(run):
    return run("0.1", "twice", SOME)


@pytest.fixture(scope="module")
def ranks(skyrl_ranks):
    return skyrl_ranks("0.2", worker="fp8_alignment_ranks")


def cases(found):
    """Tensor and context parallelism, recipe, sequence parallelism, packed, and what was found."""
    for name, case in found.items():
        tp, cp, recipe, sequence_parallel, packed, *_ = name.split("-")
        yield int(tp), int(cp), recipe, sequence_parallel == "True", packed == "True", case


def smallest_multiple(tp, cp, recipe, sequence_parallel):
    """Of tokens that tensor and context parallelism can share out so that each part is one for the recipe."""
    layout = tp * 2 * cp if cp > 1 else tp
    parts = cp * (tp if sequence_parallel else 1)
    return next(n for n in itertools.count(1) if n % layout == 0 and n % (parts * ON_A_RANK[recipe]) == 0)


def wrong_parts(found):
    """The cases with FP8 in which a rank's part is none for the recipe."""
    return [
        (tp, cp, recipe, packed)
        for tp, cp, recipe, sequence_parallel, packed, case in cases(found)
        if recipe != "None" and (case["tokens"] / (tp if sequence_parallel else 1)) % ON_A_RANK[recipe]
    ]


def test_before_parts_are_wrong_and_after_none_is(layouts, sizes):
    before = wrong_parts(layouts["before"])
    assert {(tp, cp) for tp, cp, *_ in before} == set(itertools.product(sizes, (1, 2)))
    assert {recipe for _, _, recipe, *_ in cases(layouts["after"])} == {"None", *ON_A_RANK}
    assert wrong_parts(layouts["after"]) == []


def test_each_sequence_has_no_more_padding_than_that(layouts):
    for tp, cp, recipe, sequence_parallel, packed, case in cases(layouts["after"]):
        if recipe == "None":
            continue
        multiple = smallest_multiple(tp, cp, recipe, sequence_parallel)
        padded = [-(-length // multiple) * multiple for length in LENGTHS]
        if packed:
            assert case["cu_seqlens"] == [0, *itertools.accumulate(padded)]
            assert case["longest"] == max(padded)
            assert case["tokens"] == sum(padded) // cp
        else:
            assert case["tokens"] == max(padded)


def test_skyrl_gets_back_exactly_what_it_put_in(layouts, sizes):
    assert len(layouts["after"]) == 7 * (8 + 16 * len(sizes[1:])), "without tensor parallelism there is no sequence's"
    for state in ("before", "after", "reverted"):
        assert all(case["restored"] for case in layouts[state].values())


def test_without_fp8_and_reverted_nothing_changes(layouts, sizes):
    """Tokens, positions, masks and lengths, by their digest."""
    without = {name: case for name, case in layouts["after"].items() if "-None-" in name}
    assert len(without) == 8 + 16 * len(sizes[1:])
    assert without == {name: layouts["before"][name] for name in without}
    assert layouts["reverted"] == {name: layouts["before"][name] for name in layouts["before"] if name.startswith("1-")}
    assert any(case != layouts["before"][name] for name, case in layouts["after"].items() if "-delayed-" in name)


def test_routers_replay_the_experts_of_the_same_tokens(layouts, sizes):
    """With the real `RouterReplay`; SkyRL works out where each token is a second time for it."""
    assert len(layouts["replays_after"]) == 24 * len(sizes)
    assert all(layouts["replays_before"].values())
    assert all(layouts["replays_after"].values())


def test_a_later_pipeline_stage_has_the_layout_of_the_first(layouts):
    assert layouts["later_stage"] == {"packed False": True, "packed True": True}


def test_the_same_as_0_3_where_that_is_right(layouts, run, sizes):
    """0.3.0 pads to multiples of 16 on each context-parallel rank, whatever the recipe and sequence parallelism."""
    theirs = run("0.3", "of-0.3", sizes)["given"]
    compared = set()
    for name, case in layouts["after"].items():
        tp, cp, recipe, sequence_parallel, packed, cp_rank, _ = name.split("-")
        if (recipe, sequence_parallel) != ("delayed", "False"):
            continue
        key = f"{tp}-{cp}-{packed}-{cp_rank}"
        assert {name: case["given"][name] for name in theirs[key]} == theirs[key], name
        compared.add(key)
    assert compared == set(theirs)
    assert len(compared) == 4 * len(sizes)


def test_0_1_0(first_release):
    """There, context parallelism fails on any sequence shorter than its padding: not with FP8, as they come padded."""
    assert wrong_parts({name: case for name, case in first_release["before"].items() if not case["failed"]})
    with_fp8 = {name: case for name, case in first_release["after"].items() if "-None-" not in name}
    assert len(with_fp8) > 20
    assert wrong_parts(with_fp8) == []
    assert all(case["restored"] for case in with_fp8.values())
    without = {name: case for name, case in first_release["after"].items() if "-None-" in name}
    assert without == {name: first_release["before"][name] for name in without}
    assert {name.split("-")[1] for name, case in without.items() if case["failed"]} == {"2"}
    for name, case in first_release["reverted"].items():
        assert case == first_release["before"][name]


@pytest.mark.exhaustive
def test_training_is_refused_before_and_not_after(ranks):
    """On two real ranks, the same run without and with the patch."""
    for report in ranks:
        assert len(report["cases"]) == 15
        messages = " ".join(message for case in report["cases"].values() for message in case["refused_before"].values())
        for message in ("FP8 execution requires", "Caller must pad", "MXFP8 requires", "All-gather requires"):
            assert message in messages
        for name, case in report["cases"].items():
            assert bool(case["refused_before"]) != name.endswith("-None"), name
        # 24 tokens on a rank are a multiple of 8, and the forward pass alone gets through.
        assert list(report["cases"]["context-packed-whole-delayed"]["refused_before"]) == ["training"]
        assert all(case["refused_after"] == {} for case in report["cases"].values())


@pytest.mark.exhaustive
def test_the_models_tokens_on_each_rank(ranks):
    for report in ranks:
        for name, case in report["cases"].items():
            recipe = name.rpartition("-")[2]
            if recipe == "None":
                assert case["given_after"] == case["given_before"]
                continue
            split = 2 if name.startswith("tensor") else 1  # by sequence parallelism, within the model
            assert all(tokens / split % ON_A_RANK[recipe] == 0 for tokens in case["given_after"]), name
            assert {tokens % ON_A_RANK[recipe] for tokens in case["seen_after"]} == {0}, name


@pytest.mark.exhaustive
def test_padding_changes_no_token(ranks):
    """In fp32. Products of matrices with more rows may be summed in another order: some units in the last place."""
    for report in ranks:
        for name, case in report["cases"].items():
            assert case["log_probs"] > 20
            assert case["gradients_found"] > 20
            assert case["difference_of_log_probs"] <= 1e-5, name
            assert case["difference_of_inference"] <= 1e-5, name
            assert case["difference_of_gradients"] <= 2e-6, name


@pytest.mark.exhaustive
def test_without_fp8_training_is_the_same_bit_for_bit(ranks):
    for report in ranks:
        without = [case["same"] for name, case in report["cases"].items() if name.endswith("-None")]
        assert without == [True] * 3


@pytest.mark.exhaustive
def test_the_report_says_what_was_done(layouts, ranks, sizes):
    (row,) = layouts["report"]
    assert (row["name"], row["status"]) == ("skyrl-fp8-alignment", "applied")
    assert row["observations"]["batches padded to multiples of 16 tokens"] > 0
    if 8 in sizes:
        assert row["observations"]["batches padded to multiples of 1024 tokens"] > 0, "blockwise, 8 ranks"
    applied = [row for row in ranks[0]["report"] if row["status"] == "applied"]
    assert len(applied) == 1
    assert "batches padded to multiples of 32 tokens" in applied[0]["reason"]


@pytest.mark.exhaustive
def test_disabled_it_stays_away(run):
    report = run("0.2", "twice", (2,), RLHF_PATCHES_DISABLE="skyrl-fp8-*")
    assert report["report"][0]["status"] == "disabled"
    assert report["after"] == report["before"]
    assert wrong_parts(report["after"])


@pytest.mark.parametrize(("release", "version"), [("0.1", "0.2.0"), ("0.2", "0.1.0")])
def test_one_releases_code_that_calls_itself_the_other(tmp_path, release, version):
    source = folder(f"skyrl-{release}") / MODULE
    assert doctor_row(tmp_path, "skyrl-fp8-alignment", version=version, source=source)["status"] == "refused"
