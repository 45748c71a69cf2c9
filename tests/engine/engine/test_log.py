"""What is logged: one line per process unless asked for more, on rank 0, and no problem in silence."""

from __future__ import annotations

import dataclasses
import logging
import sys
from types import SimpleNamespace

import pytest

from rlhf_patches import (
    Condition,
    DefinitionError,
    PatchError,
    PatchReport,
    Rewrite,
    SettingsError,
    Shape,
    Status,
    ranks,
)
from rlhf_patches.definitions.registry import PluginFailure, Registered
from rlhf_patches.engine import log
from rlhf_patches.engine.engine import Engine

BUG = "def add(a, b):\n    return a - b\n"
OTHER = BUG.replace("-", "*")
LAUNCHERS = [name for launcher in ranks._LAUNCHERS for name in launcher]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def said(caplog):
    """Level and text of everything so far."""
    caplog.set_level(logging.DEBUG, "rlhf_patches")
    return lambda: [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "rlhf_patches"]


@pytest.fixture
def patches(framework):
    """Patches of modules ``good``, ``bad`` and ``worse``: the first applies, the others are refused."""
    made = []
    for module, text in (("good", BUG), ("bad", OTHER), ("worse", OTHER)):
        framework.write(module, text)
        made.append(framework.patch(Rewrite(framework.path(f"{module}:add"), "$A - $B", "$A + $B"), name=f"x-{module}"))
    return made


def row(reason, status=Status.REFUSED):
    return PatchReport("x-bug", status, reason, "dist", "1.0", "", "tests")


def test_several_problems_at_once_are_one_line(framework, engine, patches, said):
    for module in ("good", "bad", "worse"):
        framework.load(module)
    Engine(
        load=lambda: ([Registered(patch, "tests") for patch in patches], [PluginFailure("plug", "it is\n  broken")])
    ).apply()
    (warning,) = [text for level, text in said() if level == "WARNING"]
    assert warning.startswith("plugin plug could not be used: it is broken; refused x-bad: ")
    assert "; refused x-worse: " in warning
    assert warning.endswith("(more: `rlhf-patches doctor`, RLHF_PATCHES_LOG=warning, RLHF_PATCHES_REPORT=FILE)"), (
        "what to do to see the rest"
    )
    assert "\n" not in warning
    assert ("DEBUG", "applied") in [(level, text.partition(" ")[0]) for level, text in said()]


def test_only_the_first_problem_is_a_warning(framework, engine, patches, said):
    made = engine(*patches)
    made.apply()
    for module in ("good", "bad", "worse"):
        framework.load(module)
    warnings = [text for level, text in said() if level == "WARNING"]
    assert [text.partition(":")[0] for text in warnings] == ["refused x-bad"]
    rest = {text.partition(":")[0]: level for level, text in said() if "refused x-bad" not in text}
    assert rest["applied x-good"] == rest["refused x-worse"] == "DEBUG"


@pytest.mark.parametrize("level", [None, "info"])
def test_text_from_outside_is_one_line_that_cannot_move_the_cursor(said, monkeypatch, level):
    if level:
        monkeypatch.setenv("RLHF_PATCHES_LOG", level)
    log.announce([row("one\ntwo \x1b[2J")], [PluginFailure("plug", "three\r\nfour\x07")])
    assert all(text.isprintable() for _, text in said())
    text = "; ".join(text for _, text in said())
    for part in (r"refused x-bug: one two \x1b[2J (plugin tests)", r"three four\x07"):
        assert part in text


def test_what_goes_to_a_terminal_by_our_own_handler(monkeypatch, capfd):
    """An exception's traceback keeps its lines."""
    monkeypatch.setattr(log.logger(), "handlers", [])
    monkeypatch.setattr(log.logger(), "propagate", True)
    level = log.logger().level
    log.configure("debug")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.logger().debug("text \x1b]0;title\x07", exc_info=True)
    finally:
        log.logger().setLevel(level)
    err = capfd.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") > 3
    assert r"ValueError: \x1b[2J" in err


@pytest.mark.parametrize("level", ["debug", "info", "warning", "off"])
def test_asked_for_each_thing_is_said_once_at_its_own_level(framework, engine, patches, said, monkeypatch, level):
    monkeypatch.setenv("RLHF_PATCHES_LOG", level)
    made = engine(*patches)
    for module in ("good", "bad", "worse"):
        framework.load(module)
    made.apply()
    made.apply()
    found = [(level, text.partition(":")[0]) for level, text in said()]
    assert found == [("INFO", "applied x-good"), ("WARNING", "refused x-bad"), ("WARNING", "refused x-worse")]
    assert all("more:" not in text for _, text in said())


@pytest.fixture
def acting(framework, engine):
    """Applies a patch that changes results to ``step``, which trains on a number of tokens; returns it."""
    framework.write("mod", "def step(tokens):\n    return len(tokens) - 1\n")
    framework.write("tells", "def uneven(tokens):\n    return len(tokens) / 2 if len(tokens) > 2 else False\n")
    path = framework.path("mod:step")

    def apply(condition="tells:uneven", changes_numbers="it was wrong"):
        conditions = (Condition(path, framework.path(condition), "gradient x"),) if condition else ()
        patch = framework.patch(Rewrite(path, "$A - 1", "$A + 1"), name="x-step")
        made = engine(dataclasses.replace(patch, changes_numbers=changes_numbers, conditions=conditions))
        made.apply()
        apply.made = made
        return framework.load().step

    return apply


def _acted(said):
    return [text.partition(";")[0] for level, text in said() if level == "WARNING" and text.startswith("x-step: ")]


@pytest.mark.parametrize("asked", [None, "info", "warning"])
def test_that_a_run_meets_a_bug_is_a_warning_once(acting, said, monkeypatch, asked):
    if asked:
        monkeypatch.setenv("RLHF_PATCHES_LOG", asked)
    step = acting()
    for tokens in ([1], [1, 2]):
        step(tokens)
    assert _acted(said) == [], "nothing is wrong"
    for tokens in ([1, 2, 3], [1, 2, 3, 4]):
        step(tokens)
    assert _acted(said) == ["x-step: the bug occurs in this run (gradient x 1.5), repaired"]
    (line,) = (text for _, text in said() if "occurs" in text)
    assert line.endswith("; see `rlhf-patches explain x-step`")


def test_a_repair_that_cannot_tell_says_once_that_it_runs(acting, said):
    step = acting(condition=None)
    assert _acted(said) == [], "it is only there"
    for _ in range(2):
        step([1])
    assert _acted(said) == ["x-step: its code runs, bug condition unknown"]


def test_a_patch_of_several_functions_says_once_that_it_runs(framework, engine, said):
    framework.write("mod", "def f(a):\n    return a - 1\n\n\ndef g(a):\n    return a - 1\n")
    changes = [Rewrite(framework.path(f"mod:{name}"), "$A - 1", "$A + 1") for name in "fg"]
    engine(dataclasses.replace(framework.patch(*changes, name="x-step"), changes_numbers="it was wrong")).apply()
    module = framework.load()
    assert (module.f(1), module.g(1)) == (2, 2)
    assert len(_acted(said)) == 1


@pytest.mark.parametrize("condition", ["tells:uneven", None])
def test_what_changes_no_results_or_was_acknowledged_or_is_of_another_rank_says_nothing(
    acting, said, monkeypatch, condition
):
    acting(condition, changes_numbers=None)([1, 2, 3])
    monkeypatch.setenv("RLHF_PATCHES_ACKNOWLEDGED", "x-s*")
    acting(condition)([1, 2, 3])
    monkeypatch.delenv("RLHF_PATCHES_ACKNOWLEDGED")
    monkeypatch.setenv("RANK", "1")
    acting(condition)([1, 2, 3])
    assert _acted(said) == []


def test_who_acknowledges_what_is_no_patch_is_told(engine, patches, monkeypatch):
    monkeypatch.setenv("RLHF_PATCHES_ACKNOWLEDGED", "x-goood")
    with pytest.raises(SettingsError, match="names 'x-goood', which is not a patch; did you mean 'x-good'"):
        engine(*patches).apply()


@pytest.mark.parametrize("asked", [None, "info", "warning"])
def test_an_advice_is_a_warning_once_in_a_process_that_imports_the_code(
    framework, engine, patches, said, monkeypatch, asked
):
    """Together with the first problem too. Strict mode is for what is refused."""
    if asked:
        monkeypatch.setenv("RLHF_PATCHES_LOG", asked)
    monkeypatch.setenv("RLHF_PATCHES_STRICT", "1")
    advice = framework.advice(Shape(framework.path("good:add"), "$A - $B"), name="x-advice")
    made = engine(advice, patches[1])
    made.apply()
    assert not any("what to do" in text for _, text in said()), "nothing has been imported"
    with pytest.raises(PatchError, match="x-bad was refused"):
        framework.load("bad")
    assert framework.load("good").add(2, 1) == 1, "nothing is changed"
    made.revert()
    monkeypatch.delenv("RLHF_PATCHES_STRICT")
    assert made.apply()["x-advice"].status is Status.ADVICE
    found = [text for level, text in said() if level == "WARNING" and "advice" in text]
    there = f"{framework.distribution} 1.0 has a known bug without a repair"
    assert found == [f"x-advice: {there}; see `rlhf-patches explain x-advice`"]


def test_an_advice_with_a_condition_is_a_warning_when_the_run_meets_its_bug(framework, engine, said):
    """Not at the import; the function stays as released, and the end says it once more."""
    framework.write("good", "def add(a, b):\n    return a - b\n")
    framework.write("tells", "def negative(a, b):\n    return a < b\n")
    path = framework.path("good:add")
    made = framework.advice(Shape(path, "$A - $B"), name="x-advice")
    advice = dataclasses.replace(made, conditions=(Condition(path, framework.path("tells:negative")),))
    made = engine(advice)
    made.apply()
    module = framework.load("good")
    assert (module.add(3, 1), warnings(said)) == (2, [])
    assert str(made.report()["x-advice"].reached) == "called 1 time; bug condition true in 0: not affected so far"
    assert [module.add(1, 3), module.add(1, 4)] == [-2, -3]
    line = "x-advice: the bug occurs in this run, without a repair; see `rlhf-patches explain x-advice`"
    assert warnings(said) == [line]
    made.end()
    assert said()[-1] == ("INFO", "occurred and not repaired: x-advice")
    code = module.add.__code__
    made.revert()
    assert module.add.__code__ is not code
    assert module.add(1, 3) == -2
    with pytest.raises(DefinitionError, match="a condition has no predicate"):
        dataclasses.replace(advice, conditions=(Condition(path),))


def warnings(said):
    return [text for level, text in said() if level == "WARNING"]


@pytest.fixture
def training(acting, framework):
    """Applies a patch and returns its function and its engine."""
    step = acting()
    return step, acting.made


def test_a_run_reads_at_its_end_what_it_met(training, said, monkeypatch):
    """Once each, by one process: no launcher, no other rank, no process that a rank has started."""
    step, made = training
    made.end()
    assert information(said) == [], "nothing ran"
    monkeypatch.setenv("RANK", "1")
    step([1])
    monkeypatch.setenv("RANK", "0")
    assert information(said) == []
    step([1])
    assert information(said) == [], "it has been entered before"
    for program in ("/usr/bin/accelerate", "/x/deepspeed"):
        monkeypatch.setattr(sys, "argv", [program])
        made.end()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert information(said) == []
    made.end()
    assert information(said) == ["none of 1 repaired bug occurred"]
    step([1, 2, 3, 4])
    made.end()
    assert information(said)[1:] == ["1 of 1 repaired bug occurred: x-step (gradient x 2)"]


def information(said):
    return [text for level, text in said() if level == "INFO"]


def test_what_a_run_reads_has_a_prefix_unless_the_application_logs(training, framework, capfd, monkeypatch):
    step, made = training
    root, ours = logging.getLogger(), log.logger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    step([1])
    where = f"{framework.distribution} 1.0"
    assert capfd.readouterr().err == f"[rlhf_patches] {log.__version__}: 1 patch is applied ({where})\n"
    root.handlers.append(logging.NullHandler())
    made.end()
    assert capfd.readouterr().err == ""


def test_an_advice_that_is_switched_off_is_not_said(framework, engine, said, monkeypatch):
    framework.write("good", BUG)
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", "x-advice")
    made = engine(framework.advice(Shape(framework.path("good:add"), "$A - $B"), name="x-advice"))
    made.apply()
    framework.load("good")
    assert made.report()["x-advice"].status is Status.DISABLED
    assert [text for level, text in said() if level != "DEBUG"] == []


def test_other_ranks_say_nothing_not_even_for_debugging(said, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    log.announce([row("why")], [PluginFailure("plug", "broken")])
    assert said() == []
    monkeypatch.setenv("RLHF_PATCHES_LOG", "error:all")
    log.announce([row("why")], [PluginFailure("plug", "broken")])
    assert len(said()) == 2


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, ranks.Place()),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, ranks.Place("3", "1", "8")),
        ({"RANK": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ranks.Place("3", None, None)),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}, ranks.Place("2", "0", "4")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, ranks.Place("0", None, None)),  # a batch script
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ranks.Place("1", None, "2")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, ranks.Place("1", "1", "2")),
        ({"WORLD_SIZE": "8"}, ranks.Place()),
    ],
)
def test_where_launchers_say_the_rank(monkeypatch, environment, place):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert ranks.place() == place


def _distributed(**functions):
    return SimpleNamespace(is_available=lambda: True, **functions)


@pytest.mark.parametrize(
    ("module", "rank"),
    [
        (_distributed(is_initialized=lambda: True, get_rank=lambda: 2, get_world_size=lambda: 4), "2"),
        (_distributed(is_initialized=lambda: False), None),
        (_distributed(), None),  # half imported
        (None, None),
    ],
)
def test_the_process_group_knows_where_the_environment_does_not(monkeypatch, module, rank):
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    assert ranks.place().rank == rank
    assert log.speaks() is (rank is None)
    monkeypatch.setenv("RANK", "0")
    assert ranks.place().rank == "0"
