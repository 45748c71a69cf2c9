"""A release of what a patch is for, as text: copies of it, edited or under another version, and what is said of them.

Nothing of a release is imported. It is the one that is installed, a wheel, an sdist, a directory, or ``NAME==VERSION``.
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
"""A version that is none: metadata that state it tell nothing."""


class NoCase(Exception):
    """There is no release to look at; the message says what to install."""


@dataclass(frozen=True)
class Case:
    """A variant of a patch, and a release whose code it is for.

    Attributes:
        patch: the patch, or the advice.
        variant: that of the release; of one without the bug, one whose modules it has.
        version: the release's, or UNKNOWN.
        read: gives the text of a module.
        affected: whether the release has the bug, as its version says, or else its code.
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
        """What ``rlhf-patches check`` says of a copy of the variant's modules, by the version that its metadata state.

        Args:
            folder: for the copy; a copy that is there is written over.
            versions: one after the other; UNKNOWN is one too.
            texts: by module, what to write in place of the release's own text.
            beside: another distribution that is there too, and its version.
        """
        for module in self.variant.modules:
            path = folder.joinpath(*module.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((texts or {}).get(module) or self.read(module), encoding="utf-8")
        rows = {}
        with memory.parsed_once(kept=20):  # the text is the same under each
            for version in versions:
                written = [write_metadata(folder, self.patch.distribution, version)]
                written += [write_metadata(folder, *beside)] if beside else []
                rows[version] = row_of(folder, self.patch)
                for metadata in written:
                    shutil.rmtree(metadata)
        return rows

    def edits(self) -> Iterator[tuple[str, str, str]]:
        """For each function that the patch changes: its name, the module, and a text in which it is another one.

        Of a rewrite the edit is where its pattern is, of a function guarded by its signature a parameter more, and of
        every other one a statement more.
        """
        seen = set()
        texts = {module: Source(module, f"{module}.py", self.read(module)) for module in self.variant.modules}
        for item in shapes.recognise_all(self.variant, texts):
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
    # After the docstring, which no guard looks at.
    first = node.body[ast.get_docstring(node) is not None :][0]
    lines = text.split("\n")  # as Python counts them: splitlines() would end one at a form feed
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
    """Let a folder on sys.path claim to hold a distribution; returns where it says so."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    return metadata


def row_of(folder: Path, patch: KnownBug) -> PatchReport:
    """What ``rlhf-patches check FOLDER`` says of a patch, registered or not."""
    return evaluate.check(archive.open_release(str(folder)), [Registered(patch, "a test")], by_name=True)[patch.name]


def case_of(patch: KnownBug, release: str = INSTALLED) -> Case:
    """The case that a release is for a patch.

    Args:
        patch: the patch, or the advice.
        release: INSTALLED, or what ``rlhf-patches check`` takes.

    Raises:
        NoCase: the framework is not installed, or the release has none of the patch's modules.
        AssertionError: the patch cannot be for it, though the version says so.
        members.ReleaseError, download.DownloadError: it cannot be had, or not be read.
    """
    look: Callable[[Variant], Found] = choices.look
    read = locating.read_module
    if release != INSTALLED:
        opened = archive.open_release(download.path_of(release))
        if not evaluate.is_patched(opened, [Registered(patch, "a test")]):
            packages = ", ".join(dict.fromkeys(module.partition(".")[0] for module in patch.modules))
            raise members.ReleaseError(f"{opened.label} has no {packages}, so it tells nothing of {patch}")
        look, read = functools.partial(evaluate.look, opened), opened.source
    choice = choices.choose([look(variant) for variant in patch.variants])
    if isinstance(choice, Decision):
        if choice.status is not Status.ABSENT:
            raise AssertionError(f"{patch} is {choice.status} in {release}: {choice.reason}")
        where = f"pip install '{patch.distribution}{patch.variants[-1].guard.versions}'" if release == INSTALLED else ""
        raise NoCase(f"{choice.reason}{where and f'; {where} has this test run'}")
    variants: list[Variant] = [variant for variant in choice.variants if isinstance(variant, Variant)]
    version = choice.finding.version or UNKNOWN
    affected = choice.finding.verdict is Verdict.AFFECTED
    if choice.finding.verdict is Verdict.UNKNOWN:
        fitting = list(decision.shapes_in(variants, read)[0])
        variants, affected = fitting or variants, bool(fitting)
    return Case(patch, variants[-1], version, lambda module: read(module).text, affected)
