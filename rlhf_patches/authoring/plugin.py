"""Write a distribution with one patch for its author to complete: known values are filled in, the rest is marked.

The generated test fails while marks are left.
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
"""The prefix of parts that only the author knows."""


class PluginError(Exception):
    """A plugin cannot be written; the message has the reason. No file is written."""


@dataclass(frozen=True)
class Plugin:
    """The contents of a plugin.

    Attributes:
        name: the patch's name.
        owner: the distribution that the patch is for; None if unknown.
        changes: the patch's changes, in order.
        nodes: the functions of the changes, by target.
        summary: one line, if known.
        missing: other tasks of the author, a line for each; while there are any, the patch is refused.
    """

    name: str
    owner: Owner | None
    changes: tuple[Change, ...]
    nodes: dict[str, FunctionNode]
    summary: str = ""
    missing: tuple[str, ...] = ()

    @property
    def distribution(self) -> str:
        """The name of the plugin's distribution."""
        return f"rlhf-patches-{self.name}"

    @property
    def package(self) -> str:
        """The plugin's package."""
        return package_of(self.name)

    def files(self) -> dict[str, str]:
        """The plugin's files: path to text."""
        texts = {
            "pyproject.toml": self._pyproject(),
            f"{self.package}/__init__.py": f'"""A patch for {self._framework}, loaded by rlhf_patches."""\n',
            f"{self.package}/patch.py": self._patch(),
            "tests/test_patch.py": self._test(),
            f"{self.package}/proofs/__init__.py": '"""Optional proofs for `rlhf-patches prove`."""\n',
            f"{self.package}/proofs/patch.py": self._proof(),
            f"{self.package}/proofs/patch_ranks.py": self._worker(),
        }
        repairs = [_implementation(change, self.nodes[change.target]) for change in self.changes]
        if any(repairs):
            head = '"""The code that replaces the defective code. It is imported when the patch is applied."""\n\n'
            texts[f"{self.package}/repair.py"] = head + "from __future__ import annotations\n" + "".join(repairs)
        return texts

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

# The entry point by which rlhf-patches loads the patch: any name, and the module with the hook.
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
            changes += f"\n{' ' * 16}# Keeps the patch refused until the above is complete: half a fix may do harm.\n"
            changes += f"{indented(held_back, 4)},"
        missing = "".join(f"{comment(f'{MARK} {line}')}\n" for line in self.missing)
        return f'''\
"""The patch. Commands that list patches import this module, so it must not import a framework."""

from __future__ import annotations

from rlhf_patches import {", ".join(kinds)}

{missing}PATCH = Patch(
    name={literal(self.name)},
    summary={literal(self.summary or f"{MARK} what the patch repairs, in one line")},
    harm="",  # {MARK} one of {", ".join(HARMS)}
    bug="{MARK} what is wrong, in one line",
    when="{MARK} the configuration in which the bug occurs, in one line",
    symptom="{MARK} what a user sees, the error message included",
    cause="{MARK} why upstream's code does that",
    repair="{MARK} what the patch changes, and what it does not change",
    references=("{MARK} the address of upstream's issue or pull request",),
    signatures=(),  # {MARK} of a bug that raises: (Signature("KeyError", "its message"),), for `diagnose`
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
            remark = f"# {MARK} which distribution on PyPI this is, and which of its releases have the bug"
        elif not versions:
            remark = f"# {MARK} which releases have the bug; the one that was read has no PEP 440 version"
        else:
            remark = "# The release that was read has the bug. `rlhf-patches survey` checks the others."
        distribution = self.owner.distribution if self.owner else "unknown"
        return f"            {remark}\n            guard=Guard({literal(distribution)}, {literal(versions)}),"

    def _proof(self) -> str:
        return f'''\
"""The proof for `rlhf-patches prove {self.name}`. Only its worker, patch_ranks.py, imports the framework."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case({literal(self._framework)}, {literal(self.name)}, "{MARK} what is run")
RIGHT = "{MARK} what is right, from a computation that does not use the patch"


def rows(reports: Reports) -> Iterator[Row]:
    """One row for each case, from each rank's report."""
    (report,) = reports
    before, after = report["before"], report["after"]
    cells = f"{{before}}"[:26], f"{{after}}"[:20], f"{{RIGHT}}"[:13]
    right = after == RIGHT
    yield Row(CASE, report["version"], *cells, right and before != RIGHT, unaffected=right and before == RIGHT)


PROOF = Proof((CASE,), rows)
'''

    def _worker(self) -> str:
        return f'''\
"""Runs upstream's code for proofs/patch.py: as released, with the patch, and reverted."""

from __future__ import annotations

from typing import Any

from rlhf_patches.proving import states


def observe() -> Any:
    """{MARK} call upstream's code as the bug report does; return what shows the bug, in JSON values."""
    raise NotImplementedError("observe() of proofs/patch_ranks.py is not written yet")


def main() -> None:
    """Run on each rank by `rlhf-patches prove`."""
    states.report({literal(self.name)}, observe, states.parser().parse_args().out)
'''

    def _test(self) -> str:
        wanted: dict[str, str] = {}
        calls = f"        # {MARK} call, as the bug report does, and return what shows the bug:\n"
        for target, node in sorted(self.nodes.items()):
            module, _, qualname = target.partition(":")
            wanted[qualname.partition(".")[0]] = module
            calls += f"        {comment(f'{qualname}{fingerprints.signature_of(node)}')}\n"
        imports = "\n".join(f"    from {module} import {name}" for name, module in wanted.items())
        held = "".join(f"    {literal(rule)}: {literal(f'{MARK} {asked}')},\n" for rule, asked in _HELD.items())
        return f'''\
"""The patch on the real {self._framework}: wrong without it, right with it, without other effects."""

import traceback
from pathlib import Path

import pytest
from rlhf_patches.testing import PatchContract

import {self.package}
from {self.package}.patch import PATCH

{_MARKED}
# The tests for each rule of docs/writing-a-patch.md, or "because ..."; and the tests for each sentence of the patch's
# texts that promises no change ("as before", "nothing changes"), with words of the sentence as the key.
RULE_COVERAGE = {{
{held}}}


class TestContract(PatchContract):
    """Refused for other code, unaffected outside the range, disabled, reverted."""

    patch = PATCH
    held = RULE_COVERAGE


def effect(call):
    """The result of a call, or its exception as "KeyError: 'x'": a bug may be either."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc()  # pytest shows it if the test fails
        return f"{{type(error).__name__}}: {{error}}"


def test_wrong_without_the_patch_and_right_with_it(apply_patch):
{imports}

    def result():
{calls}        pytest.fail("result() is not written yet: it must call upstream's code")
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
    assert not left, "\\n".join(["complete these parts:", *left])
'''


_HELD = {
    "minimal scope": "a test that upstream's own code runs without the bug's condition",
    "no side effects": "a test that model, optimizer and arguments do not change (rlhf_patches.testing.untouched)",
    "backward compatible": "a test of inputs that upstream accepts, beyond those of the bug",
    "no new blocking": "a test that no rank waits for another that raised, or why no rank can",
}
"""The required tests of a patch, by rule."""

_MARKED = 'MARK = "TODO" + ":"  # in two pieces, or it would match itself'


def package_of(name: str) -> str:
    """The package name of a patch's plugin."""
    return f"rlhf_patches_{name.replace('-', '_')}"


NO_PATTERN = f"{MARK} $PATTERN"
"""A placeholder for a pattern that is not written yet: valid Python, but in no function, so the patch is refused."""
NO_REPLACEMENT = f"{MARK} the replacement"
"""A placeholder for a replacement that is not written yet: it does not compile, so the patch is refused."""


def _marked(change: Change) -> str:
    if isinstance(change, Rewrite) and MARK in change.replacement:
        where = "`rlhf-patches try` shows the matches of a pattern, and the result of a replacement."
        return f"{' ' * 16}# {where}\n"
    return ""


def _implementation(change: Change, node: FunctionNode) -> str:
    """The implementation of a change, which raises until it is written; empty for a rewrite."""
    if not isinstance(change, (Replace, Wrap)):
        return ""
    name = change.implementation.partition(":")[2]
    define = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    owner = change.target.partition(":")[2].rpartition(".")[0]
    if isinstance(change, Wrap):
        parameters, call = "(wrapped, instance, args, kwargs)", "wrapped(*args, **kwargs)"
        call = f"await {call}" if define.startswith("async") else call
        hint = f"""\
    # `args` holds every positional parameter, defaults filled in, without self or cls, which is `instance`; `kwargs`
    # the keyword-only ones. `{call}` calls upstream's function, whose parameters are
    {comment(fingerprints.signature_of(node))}
"""
    else:
        signature = implementations.of_node(node, owner)
        bare = [parameter.replace(default=parameter.empty) for parameter in signature.parameters.values()]
        parameters = str(signature.replace(parameters=bare))  # a call passes every one, defaults filled in
        hint = ""
    return f'''

{define} {name}{parameters}:
    """{MARK} the return value, and how it differs from upstream's."""
{hint}    raise NotImplementedError("{name} is not written yet")
'''


def write(files: dict[str, str], folder: Path) -> None:
    """Write a new folder with these files, all or none.

    Raises:
        PluginError: the folder exists or cannot be written.
    """
    if os.path.lexists(folder):
        raise PluginError(f"{folder} exists already and is not overwritten: choose another folder with --into")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise PluginError(f"there is no folder {parent} to write {folder.name} into: create it first")
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
