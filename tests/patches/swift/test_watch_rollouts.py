"""``swift-watch-rollouts``: ms-swift's own trainers, on engines of which something is wrong, and on right ones."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.swift import _watched_rollouts
from rlhf_patches.patches.swift.watch_rollouts import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness.by_case import ByCase, exhaustive_but
from tests.harness.forkserver import swift
from tests.patches.swift.watch_rollouts_cases import GROUPS, RESUMED

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_what_is_trained_is_the_same",
    "backward compatible": ("test_what_is_trained_is_the_same", "test_what_is_something_else"),
    "no new blocking": "because it reads numbers and lists that are in the host's memory, and asks a tensor nothing",
}
LOG_PROBABILITIES, EQUAL = "log-probabilities", "equal-completions"
WRONG = {"counted twice": "swift-lora-counted-twice", "corrected": "swift-lora-counted-twice"}
RIGHT = {"repaired": LOG_PROBABILITIES, "seeds of their own": EQUAL, "certain": EQUAL}
NOT_LOOKED_AT = [case for case in (*RESUMED, *GROUPS) if case not in {*WRONG, *RIGHT, "one seed"}]


class TestContract(PatchContract):
    patch = WATCH
    releases = (*(f"ms-swift=={name}" for name in ("3.11.0", "3.12.2", "4.0.0", "4.3.2", "4.6.0")), "ms-swift==3.9.3")
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


CORE = ("counted twice", "repaired", "not watched", "older rollouts", "one seed", "seeds of their own", "a part")
REST = tuple(case for case in (*RESUMED, *GROUPS) if case not in CORE)


@pytest.fixture(scope="module")
def older(run_ranks):
    levels = swift("swift-3.12", "swift_engine")

    def run(case):
        cases = CORE if case in CORE else REST
        (found,) = run_ranks("tests.patches.swift.watch_rollouts_ranks", *cases, levels=levels, ranks=1)
        return found[case]

    return ByCase(run)


def some(cases):
    return exhaustive_but(cases, *(case for case in cases if case in CORE))


@pytest.fixture(scope="module")
def newest(run_ranks):
    (found,) = run_ranks("tests.patches.swift.watch_rollouts_ranks", levels=swift(None, "swift_engine"), ranks=1)
    return found


@pytest.fixture(scope="module")
def megatron(run_ranks):
    worker, load = "tests.patches.swift.watch_rollouts_megatron_ranks", "swift_megatron_rollouts"
    return run_ranks(worker, levels=swift(None, load), ranks=2)


def check_told(found, says):
    (line,) = found["said"]
    wanted = re.escape(f"swift-watch-rollouts: {says}").replace(r"\{\}", "[0-9.]+")
    assert re.match(wanted, line), line
    return line


def check_is_a_lower_bound(found):
    """The mean |trainer - engine| of the two models, in float64, is the most that may be said."""
    figure = found["observed"][LOG_PROBABILITIES]
    assert figure["values"] == len(found["exact"]) > 1
    place = int(figure["at"].removeprefix("step ")) - 1
    # Log-probabilities in float32, of which a micro-batch's are of the order of 1.
    assert 0 <= figure["worst"] <= found["exact"][place] + 1e-5


DIFFER = "trainer and engine differ by {} nats per sampled token at step 2 (limit 0.1)"


@pytest.mark.parametrize("case", some(WRONG))
def test_it_says_once_what_is_wrong(older, case):
    """With a resumed adapter that is counted twice from the second update on, as released."""
    line = check_told(older[case], DIFFER)
    assert "Unrepaired known bugs with this sign: " in line
    assert WRONG[case] in line
    check_is_a_lower_bound(older[case])


def test_the_servers_workers_share_a_seed(older):
    """As released, with as many workers as samples."""
    line = check_told(older["one seed"], "all completions of a group are equal; the chance of this is e^-{}")
    assert "Unrepaired known bugs with this sign: swift-rollout-worker-seed; " in line


def test_in_the_newest_release(newest):
    check_told(newest["lost update"], DIFFER)
    check_is_a_lower_bound(newest["lost update"])
    check_told(newest["one seed"], "all completions of a group are equal; the chance of this is e^-{}")
    assert newest["right"]["said"] == []
    check_is_a_lower_bound(newest["right"])


def test_with_megatron(megatron):
    """On the last rank, which has them; not in evaluation, whose numbers are in the same dictionary."""
    first, megatron = megatron
    assert [found["said"] or found["observed"] for found in first.values()] == [{}] * len(first)
    assert [found["logged"] for found in first.values()] == [found["logged"] for found in megatron.values()]
    check_told(megatron["lost updates"], DIFFER)
    for case in ("lost updates", "right"):
        check_is_a_lower_bound(megatron[case])
    for case in ("right", "evaluated", "not watched"):
        assert megatron[case]["said"] == []
    assert megatron["evaluated"]["observed"] == {}
    assert megatron["right"]["logged"] == megatron["not watched"]["logged"]
    assert megatron["right"]["applied"] == [WATCH.name]


@pytest.mark.parametrize("case", some(RIGHT))
def test_nothing_is_said_of_a_right_run(older, case):
    assert older[case]["said"] == []
    assert older[case]["observed"][RIGHT[case]]["worst"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("case", some(NOT_LOOKED_AT))
def test_older_rollouts_and_turns_are_not_looked_at(older, case):
    """Nor is what was not computed."""
    assert (older[case]["said"], older[case]["observed"]) == ([], {})


def test_what_is_trained_is_the_same(older):
    """To the bit."""
    watched, alone = older["repaired"], older["not watched"]
    assert watched["applied"] == ["swift-lora-counted-twice", WATCH.name]
    assert alone["applied"] == ["swift-lora-counted-twice"]
    for name in ("logged", "trained"):
        assert json.dumps(watched[name]) == json.dumps(alone[name])
    assert older["one seed"]["samples"] == older["a part"]["samples"]


class Wanted:
    """A tensor on a GPU: whoever makes a number of it, or compares it, waits."""

    def _waits(self, *_: object) -> bool:
        raise AssertionError("this waits for a GPU")

    __float__ = __bool__ = __eq__ = __lt__ = __gt__ = __abs__ = __index__ = __iter__ = _waits  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def trainer_of(**changed):
    asked = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    of_request = {name: changed.pop(name) for name in list(changed) if name in (*asked, "structured_outputs_regex")}
    settings = {
        **{"async_generate": False, "multi_turn_scheduler": None, "enable_server_multi_turn": False},
        **{"is_multimodal": False, "model": SimpleNamespace(training=True)},
        "accelerator": SimpleNamespace(is_main_process=True),
        "state": SimpleNamespace(global_step=1, iteration=1),
        "request_config": SimpleNamespace(**{**asked, **of_request}),
    }
    return SimpleNamespace(**{**settings, **changed})


def logged(trainer, logs):
    """What both trainers' functions note of a dictionary."""
    for figure in _watched_rollouts.FIGURES:
        figure.start_anew()
    assert _watched_rollouts.around_log(lambda *_: "done", trainer, (logs, None), {}) == "done"
    assert _watched_rollouts.around_on_log(lambda *_: "done", trainer, (logs, ""), {}) == "done"
    return _watched_rollouts.observed()


KL = "rollout_correction/kl"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    """Without torch, which need not be loaded here."""
    monkeypatch.setattr(_watched_rollouts, "_is_last_rank", lambda: True)


@pytest.mark.parametrize(
    "logs", [{}, None, {"eval_" + KL: 1.0}, {KL: "much"}, {KL: Wanted()}, {KL: None}, {"rollout_correction/k3_kl": 9.0}]
)
def test_what_is_something_else(logs, caplog):
    assert logged(trainer_of(), logs) == {}
    assert not [line for line in caplog.messages if "waits" in line]


@pytest.mark.parametrize(
    "outputs",
    [
        *(None, [], [None], [SimpleNamespace(response=None)]),
        [SimpleNamespace(response=SimpleNamespace(choices=[SimpleNamespace(logprobs=None)], prompt_token_ids=None))],
        [
            SimpleNamespace(
                response=SimpleNamespace(
                    choices=[SimpleNamespace(logprobs={"content": [{"logprob": -9.0}]}, token_ids=Wanted())],
                    prompt_token_ids=[1],
                )
            )
        ]
        * 9,
    ],
)
def test_outputs_that_are_something_else(outputs, caplog):
    for figure in _watched_rollouts.FIGURES:
        figure.start_anew()
    found = _watched_rollouts.around_outputs(lambda *_: "done", trainer_of(), ([], outputs), {})
    assert (found, _watched_rollouts.observed()) == ("done", {})
    assert not [line for line in caplog.messages if "waits" in line]


@pytest.mark.parametrize(
    "changed",
    [
        *({"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"temperature": 0.6}),
        *({"structured_outputs_regex": "yes|no"}, {"multi_turn_scheduler": "math_tip_trick"}),
        *({"accelerator": SimpleNamespace(is_main_process=False)}, {"request_config": None}),
    ],
)
def test_other_sampling_and_other_ranks(changed, monkeypatch):
    """Rollouts may differ rightly with others; and each number is noted by one rank."""
    monkeypatch.setattr(_watched_rollouts, "_is_last_rank", lambda: False)
    assert logged(trainer_of(), {KL: -0.05})[LOG_PROBABILITIES] == {"worst": 0.05, "at": "step 1", "values": 1}
    assert logged(trainer_of(**changed), {KL: -0.05}) == {}
    monkeypatch.setattr(_watched_rollouts, "_is_last_rank", lambda: True)
    rank_1 = trainer_of(accelerator=SimpleNamespace(is_main_process=False))
    assert logged(rank_1, {KL: -0.05})[LOG_PROBABILITIES]["values"] == 1, "Megatron's last rank"


def test_a_figure_that_is_no_number_is_told():
    found = logged(trainer_of(), {KL: float("nan"), "rollout_correction/log_ppl_abs_diff": 0.01})
    assert found[LOG_PROBABILITIES]["warning"]
