"""What comes with the package of a release's text is what is found in that text, in every release at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "release_record"))

import record
import texts

from rlhf_patches.definitions import registry
from rlhf_patches.guards import known, memory, shapes
from rlhf_patches.guards.places import Source
from rlhf_patches.guards.shapes import Recognized
from tests.harness.by_case import exhaustive_but
from tests.patches.test_contract import CASES, UNKNOWN, Case, each_of, stands_in

ROOT = str(Path(__file__).parents[2])
KEPT = {(item.distribution, entry.version) for item in record.load_all() for entry in texts.kept(item)}
RELEASED = [
    case
    for case in CASES
    if case.version != UNKNOWN and not stands_in(case) and (case.patch.distribution, case.version) in KEPT
]


def one_for_each_distribution(cases: list[Case]) -> list[Any]:
    """The others are exhaustive: tests/record says the same of every release."""
    first = {case.patch.distribution: case for case in reversed(cases)}.values()
    return [case if case in first else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


@each_of(one_for_each_distribution(RELEASED))
def test_the_facts_are_those_of_the_text(case: Case) -> None:
    """With all variants of the distribution, as the record has them: a function's slice is what any of them needs."""
    registered = [item.patch for item in registry.load()[0] if item.patch.distribution == case.patch.distribution]
    variants = [variant for patch in registered for variant in patch.variants]
    for module in case.variant.modules:
        source = known.look_up(Source(module, f"{module}.py", case.read(module)))
        assert source.known is not None, f"{module} of {case}: `make releases` writes what is known of it"
        with memory.parsed_once(kept=20):
            found = texts.of_text(source, variants)
        shipped = texts.load(module.partition(".")[0])
        for key, text in found.texts.items():
            assert text["functions"].items() <= shipped.texts[key]["functions"].items()
            assert text["future"] == shipped.texts[key]["future"]
        for key, function in found.functions.items():
            changes = function.pop("changes")
            assert changes.items() <= shipped.functions[key]["changes"].items()
            assert function.items() <= shipped.functions[key].items()


@each_of(one_for_each_distribution(RELEASED))
def test_what_is_recognized_is_what_a_search_finds(case: Case) -> None:
    """And the code compiled of it, to the column: as released, and edited."""
    both: list[list[object]] = []
    for look in (lambda source: source, known.look_up):
        read = {module: look(Source(module, f"{module}.py", case.read(module))) for module in case.variant.modules}
        with memory.parsed_once(kept=20):
            both.append([_told(item) for item in shapes.recognize_all(case.variant, read)])
            shapes.check_compiles(shapes.recognize_all(case.variant, read))
    assert both[0] == both[1]


def _told(item: Recognized) -> tuple[object, ...]:
    code = item.original_code()
    return item.in_the_whole()._replace(source=item.source._replace(known=None)), code, [*code.co_positions()]


def test_no_text_is_known_with_a_line_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in RELEASED[:5]:
        module = case.variant.modules[0]
        source = Source(module, f"{module}.py", case.read(module) + "# edited\n")
        assert known.look_up(source).known is None


FRAMEWORK = {
    "torch": "torch.utils.cpp_extension",
    "trl": "trl.trainer.grpo_trainer",
    "megatron": "megatron.core.distributed.distributed_data_parallel",
}


@pytest.mark.parametrize("package", exhaustive_but(FRAMEWORK, "torch"))
def test_a_known_release_is_not_searched(package: str, tmp_path: Path) -> None:
    """By a process that patches and nothing else; and within our hooks no file is read but what is installed."""
    pytest.importorskip(package)
    home = tmp_path / "home"
    home.mkdir()
    code = f"""
import os, sys
sys.dont_write_bytecode = True
ours, opened = [0], []
def of_torch(frame):  # which an implementation imports
    return frame is not None and ("/torch/" in frame.f_code.co_filename or of_torch(frame.f_back))
def audit(event, arguments):
    if ours[0] and event in ("open", "os.mkdir", "os.rename", "os.link") and not of_torch(sys._getframe()):
        opened.append(os.fspath(arguments[0]) if not isinstance(arguments[0], int) else "")
sys.addaudithook(audit)
import rlhf_patches
from rlhf_patches.engine.engine import engine
from rlhf_patches.definitions import registry
from rlhf_patches.guards import sources
def never(*arguments):
    raise AssertionError("a text was parsed")
sources._parse = never
def within(call):
    def counted(*arguments):
        ours[0] += 1
        try:
            return call(*arguments)
        finally:
            ours[0] -= 1
    return counted
engine._imported = within(engine._imported)
within(rlhf_patches.apply)()
import {FRAMEWORK[package]}
assert [row for row in rlhf_patches.report() if row.status == "applied"], rlhf_patches.report()
assert "ast_grep_py" not in sys.modules
installed = (*map(os.path.realpath, filter(None, sys.path)), {ROOT!r}, "/proc/")
print(sorted(path for path in set(opened) if not os.path.realpath(path).startswith(installed)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"HOME": str(home), "PATH": "", "RLHF_PATCHES_LOG": "off", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
