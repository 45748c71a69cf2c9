"""A distribution with one patch, written for its author to complete: what can be known is filled in, the rest marked.

The marks are looked for by the generated test, so that a plugin cannot pass before they are gone.
"""

from __future__ import annotations

import ast
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..definitions.bug import HARMS
from ..definitions.changes import Change, Replace, Rewrite, Wrap
from ..guards import fingerprints, implementations
from ..guards.places import FunctionNode
from .definition import comment, indented, literal
from .upstream import Owner

MARK = "TODO:"
"""Begins what only the author knows."""


class PluginError(Exception):
    """A plugin cannot be written; the message says why. Nothing of it is."""


@dataclass(frozen=True)
class Plugin:
    """What a plugin is made of.

    Attributes:
        name: the patch.
        owner: what the patch is for; None where that is not known.
        changes: the patch's, in their order.
        nodes: the functions that the changes name, by target.
        summary: one line, if it is known.
        missing: what else is left to the author, a line for each; while there is any, the patch is refused.
    """

    name: str
    owner: Owner | None
    changes: tuple[Change, ...]
    nodes: dict[str, FunctionNode]
    summary: str = ""
    missing: tuple[str, ...] = ()

    @property
    def distribution(self) -> str:
        """What the plugin is called where it is installed."""
        return f"rlhf-patches-{self.name}"

    @property
    def package(self) -> str:
        """The package that it brings."""
        return package_of(self.name)

    def files(self) -> dict[str, str]:
        """Its files: from each one's path to its text."""
        found = {
            "pyproject.toml": self._pyproject(),
            f"{self.package}/__init__.py": f'"""A patch for {self._framework}, found by rlhf_patches."""\n',
            f"{self.package}/patch.py": self._patch(),
            "tests/test_patch.py": self._test(),
            f"{self.package}/proofs/__init__.py": '"""What `rlhf-patches prove` runs, if you write it."""\n',
            f"{self.package}/proofs/patch.py": self._proof(),
            f"{self.package}/proofs/patch_ranks.py": self._worker(),
        }
        repairs = [_implementation(change, self.nodes[change.target]) for change in self.changes]
        if any(repairs):
            head = '"""What runs in place of the code that has the bug. It is imported when that is patched."""\n\n'
            found[f"{self.package}/repair.py"] = head + "from __future__ import annotations\n" + "".join(repairs)
        return found

    @property
    def _framework(self) -> str:
        return self.owner.distribution if self.owner else self.changes[0].target.partition(".")[0].partition(":")[0]

    def _pyproject(self) -> str:
        return f"""\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{self.distribution}"
version = "0.1"
description = "A patch for {self._framework}, applied by rlhf-patches"
requires-python = ">=3.10"
dependencies = ["rlhf-patches"]

[project.optional-dependencies]
test = ["pytest"]

# How rlhf-patches finds the patch: any name, and the module with the hook.
[project.entry-points.rlhf_patches]
{self.name} = "{self.package}.patch"

[tool.setuptools]
packages = ["{self.package}", "{self.package}.proofs"]
"""

    def _patch(self) -> str:
        kinds = sorted({"Guard", "Patch", "Variant", "hookimpl", *(type(change).__name__ for change in self.changes)})
        changes = "\n".join(f"{_marked(change)}{indented(change, 4)}," for change in self.changes)
        if self.missing:
            held_back = Rewrite(self.changes[0].target, NO_PATTERN, NO_REPLACEMENT)
            changes += f"\n{' ' * 16}# Has the patch refused while something above is to do: half a fix may do harm.\n"
            changes += f"{indented(held_back, 4)},"
        missing = "".join(f"{comment(f'{MARK} {line}')}\n" for line in self.missing)
        return f'''\
"""The patch. This module is imported where patches are listed, so it imports no framework."""

from __future__ import annotations

from rlhf_patches import {", ".join(kinds)}

{missing}PATCH = Patch(
    name={literal(self.name)},
    summary={literal(self.summary or f"{MARK} what the patch repairs, in one line")},
    harm="",  # {MARK} one of {", ".join(HARMS)}
    bug="{MARK} what is wrong, in one line",
    when="{MARK} the configuration in which it bites, in one line",
    symptom="{MARK} what a user sees, the error message included",
    cause="{MARK} why upstream does that",
    repair="{MARK} what the patch changes, and what it leaves alone",
    references=("{MARK} the address of upstream's issue or pull request",),
    signatures=(),  # {MARK} of a bug that raises: (Signature("KeyError", "what it says"),), for `diagnose`
    variants=(
        Variant(
{self._guard()}
            changes=(
{changes}
            ),
        ),
    ),
    obsolete_when="{MARK} when the patch can be removed",
)


@hookimpl
def rlhf_patches() -> list[Patch]:
    """The patches of this distribution."""
    return [PATCH]
'''

    def _guard(self) -> str:
        versions = f"=={self.owner.version.partition('+')[0]}" if self.owner and self.owner.version else ""
        if self.owner is None:
            said = f"# {MARK} which distribution on PyPI this is, and which of its releases have the bug"
        elif not versions:
            said = f"# {MARK} which releases have the bug; the one that was read states no version of PEP 440"
        else:
            said = "# The release that was read has the bug. `rlhf-patches survey` tells of the others."
        distribution = self.owner.distribution if self.owner else "unknown"
        return f"            {said}\n            guard=Guard({literal(distribution)}, {literal(versions)}),"

    def _proof(self) -> str:
        return f'''\
"""What `rlhf-patches prove {self.name}` shows. It imports no framework: its worker, patch_ranks.py, does."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case({literal(self._framework)}, {literal(self.name)}, "{MARK} what is run")
RIGHT = "{MARK} what is right, from a computation that does not use the patch"


def rows(reports: Reports) -> Iterator[Row]:
    """One row for each case, from each rank's report."""
    (report,) = reports
    before, after = report["before"], report["after"]
    said = f"{{before}}"[:26], f"{{after}}"[:20], f"{{RIGHT}}"[:13]
    right = after == RIGHT
    yield Row(CASE, report["version"], *said, right and before != RIGHT, unaffected=right and before == RIGHT)


PROOF = Proof((CASE,), rows)
'''

    def _worker(self) -> str:
        return f'''\
"""What runs upstream's code for proofs/patch.py: as released, with the patch, and reverted."""

from __future__ import annotations

from typing import Any

from rlhf_patches.proving import states


def observe() -> Any:
    """{MARK} call upstream's code as the report of the bug does; return what shows it, as JSON has it."""
    raise NotImplementedError("observe() of proofs/patch_ranks.py is not written yet")


def main() -> None:
    """Run on each rank, by `rlhf-patches prove`."""
    states.report({literal(self.name)}, observe, states.parser().parse_args().out)
'''

    def _test(self) -> str:
        wanted: dict[str, str] = {}
        calls = f"        # {MARK} call, as the report of the bug does, and return what shows it:\n"
        for target, node in sorted(self.nodes.items()):
            module, _, qualname = target.partition(":")
            wanted[qualname.partition(".")[0]] = module
            calls += f"        {comment(f'{qualname}{fingerprints.signature_of(node)}')}\n"
        imports = "\n".join(f"    from {module} import {name}" for name, module in wanted.items())
        held = "".join(f"    {literal(rule)}: {literal(f'{MARK} {asked}')},\n" for rule, asked in _HELD.items())
        return f'''\
"""The patch on the real {self._framework}: wrong without it, right with it, out of the way of all else."""

import traceback
from pathlib import Path

import pytest
from rlhf_patches.testing import PatchContract

import {self.package}
from {self.package}.patch import PATCH

{_MARKED}
# The tests that hold the patch to each rule of docs/writing-a-patch.md, or "because ..."; and, with words of it as the
# key, for each sentence of the patch's texts that says what stays ("as before", "nothing changes").
RULE_COVERAGE = {{
{held}}}


class TestContract(PatchContract):
    """Refused where the code is another, unaffected outside the range, disabled, reverted."""

    patch = PATCH
    held = RULE_COVERAGE


def effect(call):
    """What a call returns, or what it raises, as "KeyError: 'x'": a bug may be either."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc()  # pytest shows it where the test fails
        return f"{{type(error).__name__}}: {{error}}"


def test_wrong_without_the_patch_and_right_with_it(apply_patch):
{imports}

    def result():
{calls}        pytest.fail("result() is not written yet: it has to call upstream's code")
        return {", ".join(wanted)}

    wrong = "{MARK} what it returns without the patch, or what it raises, as 'KeyError: key'"
    right = "{MARK} what is right, from a computation that does not use the patch"
    assert effect(result) == wrong
    apply_patch(PATCH.name)
    assert effect(result) == right


def test_nothing_is_left_to_write():
    files = [Path(__file__), *sorted(Path({self.package}.__file__).parent.glob("*.py"))]
    left = [
        f"{{file.name}}:{{number}}: {{line.strip()}}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if MARK in line
    ]
    assert not left, "\\n".join(["only the author knows this:", *left])
'''


_HELD = {
    "minimal scope": "a test that upstream's own code runs where the bug is not",
    "no side effects": "a test that model, optimizer and arguments stay as they are (rlhf_patches.testing.untouched)",
    "backward compatible": "a test of inputs that upstream takes, beyond those of the bug",
    "no new blocking": "a test that no rank waits for another that raised, or why none can",
}
"""What is asked of a patch's tests, by rule."""

_MARKED = 'MARK = "TODO" + ":"  # not in one piece, or it would be found here'


def package_of(name: str) -> str:
    """The package of a patch's plugin."""
    return f"rlhf_patches_{name.replace('-', '_')}"


NO_PATTERN = f"{MARK} $PATTERN"
"""Stands for a pattern that is not written yet: Python, and in no function, so that the patch is refused."""
NO_REPLACEMENT = f"{MARK} what it has to be"
"""Stands for a replacement that is not written yet: it does not compile, so that the patch is refused."""


def _marked(change: Change) -> str:
    if isinstance(change, Rewrite) and MARK in change.replacement:
        where = "`rlhf-patches try` shows what a pattern matches, and what a replacement makes of it."
        return f"{' ' * 16}# {where}\n"
    return ""


def _implementation(change: Change, node: FunctionNode) -> str:
    """The function that a change puts in, which raises until it is written; none for a rewrite."""
    if not isinstance(change, (Replace, Wrap)):
        return ""
    name = change.implementation.partition(":")[2]
    define = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    owner = change.target.partition(":")[2].rpartition(".")[0]
    if isinstance(change, Wrap):
        parameters, call = "(wrapped, instance, args, kwargs)", "wrapped(*args, **kwargs)"
        call = f"await {call}" if define.startswith("async") else call
        said = f"""\
    # `args` holds every positional parameter, defaults filled in, without self or cls, which is `instance`; `kwargs`
    # the keyword-only ones. `{call}` is what upstream does, whose parameters are
    {comment(fingerprints.signature_of(node))}
"""
    else:
        found = implementations.of_node(node, owner)
        bare = [parameter.replace(default=parameter.empty) for parameter in found.parameters.values()]
        parameters = str(found.replace(parameters=bare))  # a call passes every one, defaults filled in
        said = ""
    return f'''

{define} {name}{parameters}:
    """{MARK} what is returned, and how that differs from upstream's."""
{said}    raise NotImplementedError("{name} is not written yet")
'''


def write(files: dict[str, str], folder: Path) -> None:
    """Write a new folder with these files, all or none.

    Raises:
        PluginError: it is there already, or cannot be written.
    """
    if os.path.lexists(folder):
        raise PluginError(f"{folder} exists already; nothing is overwritten: choose another folder with --into")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise PluginError(f"there is no folder {parent} to write {folder.name} into: make it first")
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{folder.name}-") as temporary:
            new = Path(temporary, folder.name)
            for name, text in files.items():
                file = new / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            os.rename(new, folder)
    except OSError as error:
        raise PluginError(f"{folder} cannot be written: {error}") from error
