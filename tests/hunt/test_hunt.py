"""The hunt itself: what it takes for a deviation, which verdict that gets, and what is written of it."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future

import pytest

np = pytest.importorskip("numpy")

from hunt import cells, check_patches, known_bugs, outcomes, page, rehearse, relations, trainers  # noqa: E402
from hunt.frameworks import FRAMEWORKS  # noqa: E402
from hunt.outcomes import compare  # noqa: E402
from hunt.relations import Pair, Relation  # noqa: E402
from hunt.runs import Result  # noqa: E402
from hunt.trainers import Trainer  # noqa: E402
from rlhf_patches.definitions import registry  # noqa: E402

GRADIENT = {"a": np.array([3.0, 4.0]), "b": np.array([[0.5]])}


def scaled(factor):
    return {"gradient": {name: factor * value for name, value in GRADIENT.items()}}


def test_a_factor_is_told_from_another_direction():
    assert str(compare(scaled(1.0), scaled(8.0))) == "8.000 x"
    turned = {"gradient": {**GRADIENT, "b": -GRADIENT["b"]}}
    found = compare(scaled(1.0), turned)
    assert found.ratio is None
    assert (found.size, found.where) == (2.0, "gradient b")


@pytest.mark.parametrize(
    "other",
    [
        {"gradient": {"a": GRADIENT["a"]}},
        {"gradient": {**GRADIENT, "a": np.array([3.0])}},
        {"gradient": {**GRADIENT, "a": np.array([3.0, math.nan])}},
    ],
    ids=["one is missing", "another shape", "not a number"],
)
def test_what_cannot_be_compared_is_no_agreement(other):
    assert compare(scaled(1.0), other).size == math.inf


def test_texts_are_compared_too():
    assert compare({"objects": {"model": "GPT"}}, {"objects": {"model": "GPT"}}).size == 0
    assert compare({"objects": {"model": "GPT"}}, {"objects": {"model": "T5"}}).size == math.inf


@pytest.mark.parametrize("outcome", [{}, scaled(0.0), {"loss": {}}], ids=["nothing", "zero", "no values"])
def test_agreeing_on_nothing_is_no_agreement(outcome):
    with pytest.raises(outcomes.Nothing):
        compare(outcome, outcome)


def test_a_small_tensor_is_seen_beside_a_large_one():
    one = {"gradient": {"large": np.full(100, 10.0), "small": np.array([1.0])}}
    other = {"gradient": {"large": np.full(100, 10.0), "small": np.array([1.1])}}
    assert compare(one, other).where == "gradient small"


def test_an_outcome_comes_back_as_it_was_saved(tmp_path):
    outcome = {"loss": {"step 1": 2.5}, "gradient": GRADIENT, "objects": {"model": "GPT"}}
    outcomes.save(outcome, tmp_path)
    assert compare(outcome | {"loss": {"step 1": np.array(2.5)}}, outcomes.load(tmp_path)).size == 0
    assert outcomes.load(tmp_path)["objects"] == {"model": "GPT"}


# ---------------------------------------------------------------------------------------------- verdicts

PAIR = Pair("8-of-1", {"accumulation": 1}, {"accumulation": 8})
CELL = cells.Cell(
    Trainer("trl/sft", lambda: {}, frozenset({"accumulation"})), Relation("micro_batches", "", (PAIR,)), PAIR
)


class Answers:
    """A runner whose results are given: by accumulation, and by what is applied."""

    def __init__(self, by_patches, applied=("helps", "does-not"), verdict=((), ("helps",))):
        self.by_patches, self.applied, self.helped = by_patches, applied, []
        self.occurred, self.unknown = verdict

    def ask(self, run):
        found = self.by_patches.get(run.patches, self.by_patches["off"])[run.settings["accumulation"] == 8]
        result = Result(None, found)
        if isinstance(found, dict):
            result = Result(found, None, None, self.applied, self.occurred, self.unknown)
        answer = Future()
        answer.set_result(result)
        return answer


RIGHT, WRONG = (scaled(1.0), scaled(1.0)), (scaled(1.0), scaled(8.0))
NEARLY = (scaled(1.0), scaled(1.03))
ACCEPT = [cells.Reason("accepted", ["trl/*:micro_batches/*"], "by definition", 0.05)]


@pytest.mark.parametrize(
    ("by_patches", "reasons", "kind", "words"),
    [
        ({"off": RIGHT}, [], "holds", "0e+00"),
        ({"off": WRONG}, [], "NEW", "8.000 x"),
        ({"off": WRONG, "on": RIGHT, "helps": RIGHT}, [], "known", "8.000 x: helps"),
        ({"off": WRONG, "on": RIGHT}, [], "known", "8.000 x: several of does-not, helps"),
        ({"off": WRONG, "on": NEARLY, "helps": NEARLY}, [], "NEW", "8.000 x; with patches 1.030 x"),
        (
            {"off": WRONG, "on": NEARLY, "helps": NEARLY},
            ACCEPT,
            "known",
            "8.000 x: helps; then 1.030 x, accepted: by definition",
        ),
        ({"off": NEARLY}, ACCEPT, "accepted", "1.030 x: by definition"),
        ({"off": WRONG}, ACCEPT, "NEW", "8.000 x"),
        ({"off": (scaled(1.0), "ValueError: no")}, ACCEPT, "NEW", "other: ValueError: no"),
        ({"off": ("hangs: not done after 60 s",) * 2}, [], "NEW", "both: hangs: not done after 60 s"),
        ({"off": (scaled(1.0), "hangs"), "on": RIGHT, "helps": RIGHT}, [], "known", "other: hangs: helps"),
    ],
)
def test_verdicts(by_patches, reasons, kind, words):
    verdict = cells.judge(CELL, Answers(by_patches), reasons)
    assert (verdict.kind, verdict.words) == (kind, words)


CONFIGURATION = check_patches.Configuration(CELL.trainer, {"accumulation": 8}, {"accumulation": 1})
HELD = {"objects": {"model": "compiled"}}


@pytest.mark.parametrize(
    ("by_patches", "kind"),
    [
        ({"off": RIGHT}, "same"),
        ({"off": RIGHT, "on": NEARLY}, "BROKEN"),
        ({"off": WRONG, "on": RIGHT}, "repaired"),
        ({"off": WRONG, "on": NEARLY}, "changed"),
        ({"off": WRONG, "on": (scaled(1.0), "TypeError: no")}, "BROKEN"),
        ({"off": (scaled(1.0), "hangs"), "on": RIGHT}, "repaired"),
        ({"off": ("raises", "raises")}, "cannot"),
        ({"off": RIGHT, "on": (scaled(1.0), scaled(1.0) | HELD)}, "BROKEN"),
        (
            {
                "off": (scaled(1.0), scaled(8.0) | HELD),
                "on": (scaled(1.0), scaled(1.0) | {"objects": {"model": "bare"}}),
            },
            "BROKEN",
        ),
        ({"off": RIGHT, "on": (scaled(1.0), scaled(1.0 + 1e-12))}, "BROKEN"),
    ],
)
def test_what_patches_may_change(by_patches, kind):
    assert check_patches.judge(CONFIGURATION, None, Answers(by_patches)).kind == kind


@pytest.mark.parametrize(
    ("on", "verdict", "kind"),
    [
        (RIGHT, (("helps",), ()), "repaired"),
        (RIGHT, ((), ("helps",)), "repaired"),
        (RIGHT, ((), ()), "BROKEN"),
        (WRONG, (("helps",), ()), "BROKEN"),
        (WRONG, ((), ("helps",)), "same"),
    ],
    ids=["it occurred", "nobody knows", "a false never", "a false alarm", "the same, nobody knows"],
)
def test_the_runs_own_verdict_has_to_say_the_same(on, verdict, kind):
    answers = Answers({"off": WRONG, "on": on}, verdict=verdict)
    assert check_patches.judge(CONFIGURATION, None, answers).kind == kind


@pytest.mark.parametrize(
    ("patch", "trainer", "factor", "kind"),
    [
        ("helps", "trl/*", 1 + 1e-7, "accepted"),
        ("helps", "trl/*", 1 + 1e-5, "BROKEN"),
        ("helps", "verl/*", 1 + 1e-7, "BROKEN"),
        ("another", "trl/*", 1 + 1e-7, "BROKEN"),
    ],
    ids=["as it is said", "more than that", "another trainer", "a patch that was not applied"],
)
def test_a_patch_may_change_what_is_said_of_it(patch, trainer, factor, kind):
    answers = Answers({"off": RIGHT, "on": (scaled(1.0), scaled(factor))})
    entry = check_patches.Accepted([trainer], patch, 1e-6)
    assert check_patches.judge(CONFIGURATION, None, answers, [entry]).kind == kind


# ---------------------------------------------------------------------------------- what is written of it


def test_every_trainer_has_a_framework_and_a_relation():
    related = relations.every()
    for each in trainers.every().values():
        assert each.framework in FRAMEWORKS
        assert [*cells.of(each, related)], f"no relation takes {each.name}"


def test_every_relation_says_what_must_hold():
    for each in relations.every().values():
        assert each.words.endswith(".")
        assert len({pair.name for pair in each.pairs}) == len(each.pairs) > 0


def test_each_bug_is_seen_or_it_is_said_why_not():
    seen = [each.bug for each in known_bugs.seen(trainers.every(), relations.every())]
    unseen = known_bugs.unseen()
    assert not {*seen} & unseen.keys()
    assert {*seen} | unseen.keys() == {item.patch.name for item in registry.load()[0] if item.patch.kind != "watch"}
    assert len(seen) >= 25


def test_the_page_is_what_was_found():
    assert page.PAGE.read_text() == page.text()


ROW = {"relation": "reference loss", "verdict": "deviates", "measured": "0.9", "text": "differs from the formula"}
OTHER = {"relation": "micro-batch weights", "verdict": "holds", "measured": "[1.000]", "text": ""}
BY_A_BUG = rehearse.Reason(["trl/sft-*"], "reference loss", "the formula", "no cap")


@pytest.mark.parametrize(
    ("rows", "known", "kind", "words"),
    [
        ([OTHER], [], "holds", ""),
        ([OTHER, ROW | {"verdict": "note"}], [], "holds", ""),
        ([OTHER, ROW], [], "NEW", "reference loss 0.9: differs from the formula"),
        ([OTHER, ROW], [BY_A_BUG], "known", "reference loss 0.9: differs from the formula: no cap"),
        (
            [OTHER | {"verdict": "deviates"}, ROW],
            [BY_A_BUG],
            "NEW",
            "micro-batch weights [1.000]: ; reference loss 0.9",
        ),
        ([OTHER | {"verdict": "not checked", "text": "sharded"}], [], "not checked", "sharded"),
    ],
)
def test_what_a_rehearsal_says(rows, known, kind, words):
    found = rehearse.judged("trl/sft-gpt2 plain", {row["relation"]: json.dumps(row) for row in rows}, known)
    assert found.kind == kind
    assert found.words.startswith(words)
    assert found.notes == tuple(row["relation"] for row in rows if row["verdict"] == "note")


def test_a_known_deviation_is_that_of_its_trainers():
    rows = {"reference loss": json.dumps(ROW)}
    assert rehearse.judged("trl/dpo plain", rows, [BY_A_BUG]).kind == "NEW"
    assert (
        rehearse.judged("trl/sft-gpt2 plain", {"it": json.dumps(ROW | {"text": "another"})}, [BY_A_BUG]).kind == "NEW"
    )


def test_the_rehearsed_configurations_are_those_that_are_drawn():
    """300 right ones or more, and each deviation is one of a bug that is known."""
    kept = json.loads(page.REHEARSED.read_text())
    drawn = {each.name for one in trainers.every().values() for each in rehearse.configurations(one)}
    assert {f"{row['trainer']} {row['settings']}" for row in kept} <= drawn
    assert sum(row["verdict"] == "holds" for row in kept) >= 300
    assert not [row for row in kept if row["verdict"] == "NEW"]
    known = [row for row in kept if row["verdict"] == "known"]
    whys = [each.why for each in rehearse.reasons()]
    assert all(any(why in row["words"] for why in whys) for row in known)
    assert all(any(why in row["words"] for row in known) for why in whys)


def test_reasons_are_of_cells_that_there_are():
    import fnmatch

    every = trainers.every()
    names = [cell.name for each in every.values() for cell in cells.of(each, relations.every(), "RELEASE")]
    names += [cell.name for each in every.values() for cell in cells.of(each, relations.every())]
    for reason in cells.reasons():
        for glob in reason.cells:
            assert fnmatch.filter(names, glob.partition(":")[0].partition("@")[0] + "*" + glob[glob.index(":") :]), glob
