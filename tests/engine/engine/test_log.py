"""What is logged: one line per process unless asked for more, on rank 0, and no problem in silence."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from rlhf_patches import PatchError, PatchReport, Rewrite, SettingsError, Shape, Status, import_system, ranks
from rlhf_patches.definitions.registry import PluginFailure, Registered
from rlhf_patches.engine import import_hooks, log
from rlhf_patches.engine.engine import Engine

BUG = "def add(a, b):\n    return a - b\n"
OTHER = BUG.replace("-", "*")
LAUNCHERS = [name for launcher in ranks._LAUNCHERS for name in launcher]
BEGUN, GO_ON = threading.Event(), threading.Event()
"""Set and waited for by a module that a thread imports."""


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
    (warning,) = [text for level, text in said() if level != "DEBUG"]
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


@pytest.mark.parametrize("asked", [None, "info", "warning"])
def test_that_numbers_change_is_a_warning_once_when_the_patch_is_applied(
    framework, engine, patches, said, monkeypatch, asked
):
    """Beside the first problem too, and not for a patch that is refused."""
    if asked:
        monkeypatch.setenv("RLHF_PATCHES_LOG", asked)
    made = engine(*(dataclasses.replace(patch, changes_numbers="it was wrong") for patch in patches))
    made.apply()
    assert not any("changes numbers" in text for _, text in said()), "nothing has been applied"
    for module in ("good", "bad"):
        framework.load(module)
    made.revert()
    made.apply()
    found = [text for level, text in said() if level == "WARNING" and "numbers" in text]
    explained = "`rlhf-patches explain x-good` says what that means for running experiments"
    assert found == [f"1 patch changes numbers here: x-good; {explained}"]


@pytest.fixture
def changing(framework):
    """Patches that change numbers, of modules ``trainer``, which imports ``model``, and ``other``."""
    framework.write("model", BUG)
    framework.write("trainer", f"from . import model\n{BUG}")
    framework.write("other", BUG)
    return [
        dataclasses.replace(
            framework.patch(Rewrite(framework.path(f"{module}:add"), "$A - $B", "$A + $B"), name=f"x-{module}"),
            changes_numbers="it was wrong",
        )
        for module in ("model", "trainer", "other")
    ]


def _numbers_said(said):
    return [text.partition(";")[0] for level, text in said() if level == "WARNING" and "numbers" in text]


def test_all_numbers_that_change_with_one_import_are_one_short_line(framework, engine, changing, said):
    made = engine(*changing)
    made.apply()
    framework.load("trainer")
    framework.load("other")
    made.apply()
    assert _numbers_said(said) == [
        "2 patches change numbers here: x-model, x-trainer",
        "1 patch changes numbers here: x-other",
    ]


def test_numbers_that_change_in_what_is_there_already_are_one_line(framework, engine, changing, said):
    framework.load("trainer")
    framework.load("other")
    engine(*changing).apply()
    assert _numbers_said(said) == ["3 patches change numbers here: x-model, x-trainer, x-other"]


def test_the_import_around_need_not_be_of_a_module_that_is_patched(framework, engine, changing, said):
    """TRL's trainers: PEFT's import is complete before that of transformers' Trainer begins."""
    framework.write("grpo", "from . import model\nfrom . import other\n")
    framework.write("sft", "from . import trainer\n")
    engine(*changing).apply()
    framework.load("grpo")
    framework.load("sft")
    assert _numbers_said(said) == [
        "2 patches change numbers here: x-model, x-other",
        "1 patch changes numbers here: x-trainer",
    ]


def test_a_program_that_trains_while_it_is_imported(framework, engine, changing, said):
    """Its own import is not waited for."""
    (framework.site / f"{framework.name}_of_a_user.py").write_text(
        f"import {framework.path('model')}\nfrom rlhf_patches.engine import log\n"
        f"def train():\n    import {framework.path('other')}\n    return set(log._said)\n\n\nSAID = train()\n"
    )
    engine(*changing).apply()
    assert {"x-model", "x-other"} <= importlib.import_module(f"{framework.name}_of_a_user").SAID


def test_numbers_of_an_import_that_cannot_be_observed_are_not_lost(framework, engine, changing, said, monkeypatch):
    framework.write("grpo", "import sys\nfrom . import model\nfrom . import other\n")
    made = engine(*changing)
    made.apply()
    observe = import_system.observe
    monkeypatch.setattr(
        import_system, "observe", lambda spec, by: not isinstance(by, import_hooks.Later) and observe(spec, by)
    )
    framework.load("grpo")
    made.end()
    assert _numbers_said(said) == ["2 patches change numbers here: x-model, x-other"]


@pytest.mark.parametrize("ends", [True, False])
def test_numbers_wait_for_the_import_of_another_thread_but_not_for_ever(framework, engine, changing, said, ends):
    """An import that is under way at the end of the process is that of a thread that hangs."""
    framework.write("grpo", f"import {__name__} as test\ntest.BEGUN.set()\ntest.GO_ON.wait()\n")
    made = engine(*changing)
    made.apply()
    BEGUN.clear()
    GO_ON.clear()
    thread = threading.Thread(target=framework.load, args=["grpo"], daemon=True)
    thread.start()
    try:
        assert BEGUN.wait(60)
        framework.load("model")
        assert _numbers_said(said) == []
        if not ends:
            made.end()
            assert _numbers_said(said) == ["1 patch changes numbers here: x-model"]
    finally:
        GO_ON.set()
        thread.join()
    assert _numbers_said(said) == ["1 patch changes numbers here: x-model"]


def test_a_module_with_two_names_is_waited_for_once(framework, engine, changing, said):
    framework.write("grpo", "import sys\nsys.modules[__name__ + '_too'] = sys.modules[__name__]\nfrom . import model\n")
    engine(*changing).apply()
    framework.load("grpo")
    assert _numbers_said(said) == ["1 patch changes numbers here: x-model"]


@pytest.fixture
def program(framework):
    """Runs the text of a program, with the framework as ``fw`` and modules that belong to none, at its top level."""

    def run(text):
        for name in ("helper", "helper_too"):
            (framework.site / f"{framework.name}_{name}.py").touch()
        importlib.invalidate_caches()
        text = text.replace("fw_", f"{framework.name}_").replace("fw", framework.name)
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__"})

    yield run
    for name in ("helper", "helper_too"):
        sys.modules.pop(f"{framework.name}_{name}", None)


ALL_NUMBERS = ["3 patches change numbers here: x-model, x-other, x-trainer"]


@pytest.mark.parametrize(
    "imports",
    [
        "from fw import model, other\nimport fw_helper_too\nimport fw.trainer\ndef main(): pass\n",
        "def main():\n    from fw import model, other, trainer\n",
    ],
)
def test_all_that_the_statements_of_a_program_import_is_one_line(program, engine, changing, said, imports):
    """It is said as soon as a function imports something: then the program has begun, and not before."""
    engine(*changing).apply()
    program(f"{imports}main()")
    assert _numbers_said(said) == []
    program("def train():\n    import fw_helper\ntrain()")
    assert _numbers_said(said) == ALL_NUMBERS
    program("def train():\n    import fw_helper_too\ntrain()")
    assert _numbers_said(said) == ALL_NUMBERS


def test_a_module_at_the_top_level_is_not_observed(program, engine, changing, said, monkeypatch):
    """A framework has a thousand of them."""
    engine(*changing).apply()
    program("from fw import model")
    observed = []
    observe = import_system.observe
    monkeypatch.setattr(import_system, "observe", lambda spec, by: observed.append(spec.name) or observe(spec, by))
    program("import fw_helper\ndef train():\n    import fw_helper_too\ntrain()")
    assert [name.partition("_")[2] for name in observed] == ["helper_too"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_function_imports_may_be_anything(program, framework, engine, changing, said, fails):
    """A part of the framework, or what cannot be imported."""
    framework.write("late", "raise LookupError" if fails else "")
    engine(*changing).apply()
    program("from fw import model")
    with pytest.raises(LookupError) if fails else contextlib.nullcontext():
        program("def train():\n    import fw.late\ntrain()")
    assert _numbers_said(said) == ["1 patch changes numbers here: x-model"]


def test_a_program_that_imports_nothing_more_says_it_at_its_end(program, engine, changing, said):
    made = engine(*changing)
    made.apply()
    program("import fw.model\nfrom fw import other, trainer")
    assert _numbers_said(said) == []
    made.end()
    assert _numbers_said(said) == ALL_NUMBERS


def test_what_was_imported_before_apply_is_said_at_once(program, engine, changing, said):
    program.__globals__["made"] = engine(*changing)
    program(f"import fw.model, fw.other, fw.trainer\nimport {__name__} as test\ntest.made.apply()")
    assert _numbers_said(said) == ["3 patches change numbers here: x-model, x-trainer, x-other"]


@pytest.mark.parametrize("asked", [None, "info", "warning"])
def test_a_refusal_and_an_advice_do_not_wait_for_a_program(program, framework, engine, said, monkeypatch, asked):
    if asked:
        monkeypatch.setenv("RLHF_PATCHES_LOG", asked)
    framework.write("bad", OTHER)
    framework.write("good", BUG)
    bad = framework.patch(Rewrite(framework.path("bad:add"), "$A - $B", "$A + $B"), name="x-bad")
    advice = framework.advice(Shape(framework.path("good:add"), "$A - $B"), name="x-advice")
    engine(bad, advice).apply()
    program("from fw import good, bad")
    warnings = [text.partition(":")[0] for level, text in said() if level == "WARNING"]
    assert warnings == ["x-advice", "refused x-bad"]


def test_a_refusal_does_not_wait(framework, engine, changing, said):
    framework.write("model", OTHER)
    imports = "from . import other\nfrom . import model\nfrom rlhf_patches.engine import log\n"
    framework.write("grpo", f"{imports}SAID = set(log._said)\n")
    engine(*changing).apply()
    said_by_then = framework.load("grpo").SAID
    assert any(text.startswith("refused x-model: ") for text in said_by_then)
    assert "x-other" not in said_by_then


def test_numbers_are_said_where_the_import_around_has_failed(framework, engine, changing, said):
    framework.write("trainer", f"from . import model\n{BUG}raise LookupError")
    made = engine(*changing)
    made.apply()
    with pytest.raises(LookupError):
        framework.load("trainer")
    assert _numbers_said(said) == ["1 patch changes numbers here: x-model"]
    made.end()
    assert len(_numbers_said(said)) == 1


def test_who_knows_that_numbers_change_is_not_told_again_but_of_refusals(
    framework, engine, changing, said, monkeypatch
):
    monkeypatch.setenv("RLHF_PATCHES_ACKNOWLEDGED", "x-mod*, x-other")
    framework.write("other", OTHER)
    engine(*changing).apply()
    framework.load("trainer")
    framework.load("other")
    assert _numbers_said(said) == ["1 patch changes numbers here: x-trainer"]
    assert any(level == "WARNING" and text.startswith("refused x-other: ") for level, text in said())
    monkeypatch.setenv("RLHF_PATCHES_ACKNOWLEDGED", "x-moddel")
    with pytest.raises(SettingsError, match="ACKNOWLEDGED names 'x-moddel', which is no patch; did you mean 'x-model'"):
        engine(*changing).apply()


@pytest.mark.parametrize("asked", [None, "info", "warning"])
def test_an_advice_is_a_warning_once_in_a_process_that_imports_the_code(
    framework, engine, patches, said, monkeypatch, asked
):
    """Beside the first problem too. Strict mode is for what is refused."""
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
    affected = f"{framework.distribution} 1.0 is affected (every version), and nothing here repairs it: a bug"
    assert found == [f"x-advice: {affected} (plugin tests); what to do: Do something else."]


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
    rows = [row("why"), dataclasses.replace(row("it is", Status.APPLIED), changes_numbers="it was wrong")]
    log.announce(rows, [PluginFailure("plug", "broken")])
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
