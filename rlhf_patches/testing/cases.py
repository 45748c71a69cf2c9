"""Judge copies of a framework's release, edited or with another version, as text.

The release is the installed one, a wheel, an sdist, a directory, or ``NAME==VERSION``. It is not imported.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..definitions.bug import KnownBug
from ..definitions.changes import Rewrite, Shape
from ..definitions.registry import Registered
from ..definitions.status import PatchReport, Status
from ..definitions.variant import Variant
from ..guards import choices, decision, locating, memory, patterns, shapes, sources
from ..guards.choices import Decision, Found
from ..guards.places import FunctionNode, Source
from ..guards.versions import Verdict
from ..offline import archive, download, evaluate, members

INSTALLED = "installed"
UNKNOWN = "unknown"
"""An invalid version, for metadata without a version."""


class NoCase(Exception):
    """No release is available; the message has what to install."""


@dataclass(frozen=True)
class Case:
    """A variant of a patch, and a release for it.

    Attributes:
        patch: the patch, or the advice.
        variant: the variant for the release; without the bug, a variant whose modules the release has.
        version: the release's version, or UNKNOWN.
        read: returns the text of a module.
        affected: whether the release has the bug, by its version or else by its code.
    """

    patch: KnownBug
    variant: Variant
    version: str
    read: Callable[[str], str]
    affected: bool = True

    def __str__(self) -> str:
        return f"{self.patch.name}, {self.patch.distribution} {self.version}"

    def rows(
        self,
        folder: Path,
        versions: Iterable[str],
        texts: Mapping[str, str] | None = None,
        beside: tuple[str, str] | None = None,
    ) -> dict[str, PatchReport]:
        """The rows of ``rlhf-patches check`` for a copy of the variant's modules, by the version in its metadata.

        Args:
            folder: for the copy; an existing copy is overwritten.
            versions: the versions, which may include UNKNOWN.
            texts: by module, the text to write in place of the release's.
            beside: another distribution in the folder, and its version.
        """
        for module in self.variant.modules:
            path = folder.joinpath(*module.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((texts or {}).get(module) or self.read(module), encoding="utf-8")
        rows = {}
        with memory.parsed_once(kept=20):  # the text is the same for each
            for version in versions:
                written = [write_metadata(folder, self.patch.distribution, version)]
                written += [write_metadata(folder, *beside)] if beside else []
                rows[version] = row_of(folder, self.patch)
                for metadata in written:
                    shutil.rmtree(metadata)
        return rows

    def edits(self) -> Iterator[tuple[str, str, str]]:
        """For each function that the patch changes: its name, the module, and a text in which the function differs.

        The edit for a rewrite is at its pattern. A function guarded by its signature gets one more parameter, every
        other function one more statement.
        """
        seen = set()
        texts = {module: Source(module, f"{module}.py", self.read(module)) for module in self.variant.modules}
        for item in shapes.recognize_all(self.variant, texts):
            target, text = item.change.target, item.source.text
            if isinstance(item.change, Shape) and item.change.of_a_module:
                node = sources.find_import(item.source, item.change.pattern)
                yield target, item.source.module, _without_statement(text, node)
            elif isinstance(item.change, (Rewrite, Shape)):
                place = patterns.find(item.change, item.source, item.place)[0].range()
                yield target, item.source.module, _without(text, place.start.index, place.end.index)
            elif target not in seen:
                seen.add(target)
                edit = _with_a_statement if item.fingerprint else _with_a_parameter
                yield target, item.source.module, edit(text, sources.find_function(item.source, item.qualname))


def _without(text: str, start: int, end: int) -> str:
    for other in ("0", "pass"):
        changed = text[:start] + other + text[end:]
        try:
            with sources.no_warnings():
                compile(changed, "edited", "exec", dont_inherit=True)
        except SyntaxError:
            continue
        return changed
    raise AssertionError(f"no edit of {text[start:end]!r} compiles")


def _without_statement(text: str, node: ast.stmt) -> str:
    lines = text.split("\n")
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    return "\n".join([*lines[:first], f"{lines[first][: node.col_offset]}pass", *lines[last:]])


def _with_a_statement(text: str, node: FunctionNode) -> str:
    # After the docstring, which no guard checks.
    first = node.body[ast.get_docstring(node) is not None :][0]
    lines = text.split("\n")  # like Python: splitlines() also breaks at form feeds
    number = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))]) - 1
    before = lines[number].encode()[: first.col_offset].decode()
    if before.strip():  # def f(x): return x
        lines[number] = f"{before}edited = 0; {lines[number].removeprefix(before)}"
    else:
        lines.insert(number, f"{before}edited = 0")
    return "\n".join(lines)


def _with_a_parameter(text: str, node: FunctionNode) -> str:
    lines = text.split("\n")
    before, after = lines[: node.lineno - 1], "\n".join(lines[node.lineno - 1 :])
    return "\n".join([*before, re.sub(rf"(def\s+{node.name}\s*(\[.*?\])?\()", r"\1edited, ", after, count=1)])


def write_metadata(folder: Path, distribution: str, version: str) -> Path:
    """Write metadata of a distribution into a folder on sys.path; returns the metadata's folder."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    return metadata


def row_of(folder: Path, patch: KnownBug) -> PatchReport:
    """The row of ``rlhf-patches check FOLDER`` for a patch, registered or not."""
    return evaluate.check(archive.open_release(str(folder)), [Registered(patch, "a test")], by_name=True)[patch.name]


def case_of(patch: KnownBug, release: str = INSTALLED) -> Case:
    """The case of a patch and a release.

    Args:
        patch: the patch, or the advice.
        release: INSTALLED, or an argument of ``rlhf-patches check``.

    Raises:
        NoCase: the framework is not installed, or the release has none of the patch's modules.
        AssertionError: the patch cannot apply to the release, although the version is in its range.
        members.ReleaseError, download.DownloadError: the release cannot be fetched or read.
    """
    look: Callable[[Variant], Found] = choices.look
    read = locating.read_module
    if release != INSTALLED:
        opened = archive.open_release(download.path_of(release))
        if not evaluate.is_patched(opened, [Registered(patch, "a test")]):
            packages = ", ".join(dict.fromkeys(module.partition(".")[0] for module in patch.modules))
            raise members.ReleaseError(f"{opened.label} has no {packages}, so it cannot test {patch}")
        look, read = functools.partial(evaluate.look, opened), opened.source
    choice = choices.choose([look(variant) for variant in patch.variants])
    if isinstance(choice, Decision):
        if choice.status is not Status.ABSENT:
            raise AssertionError(f"{patch} is {choice.status} in {release}: {choice.reason}")
        where = f"pip install '{patch.distribution}{patch.variants[-1].guard.versions}'" if release == INSTALLED else ""
        raise NoCase(f"{choice.reason}{where and f'; {where} enables this test'}")
    variants: list[Variant] = [variant for variant in choice.variants if isinstance(variant, Variant)]
    version = choice.finding.version or UNKNOWN
    affected = choice.finding.verdict is Verdict.AFFECTED
    if choice.finding.verdict is Verdict.UNKNOWN:
        fitting = list(decision.shapes_in(variants, read)[0])
        variants, affected = fitting or variants, bool(fitting)
    return Case(patch, variants[-1], version, lambda module: read(module).text, affected)
