"""A patch's change to the source installed here, as text for people or as a file for git."""

from __future__ import annotations

import difflib
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..definitions.changes import Rewrite, Shape, Wrap, put_to_use
from ..definitions.patch import Patch
from ..definitions.words import printable
from ..guards import choices, decision, locating, shapes, sources
from ..guards.choices import Decision
from ..guards.edits import Edit, Unrecognized, edited, with_edits
from ..guards.places import NotFound, Source, Unreadable
from ..guards.shapes import Recognized


class NotAFile(Exception):
    """No patch file can make the change; the message has the reason."""


def diff(patch: Patch) -> str:
    """Unified diff of a patch's change to the installed source, for ``patch -p0`` in the folder that it names.

    A comment above a replaced or wrapped function shows the implementation.

    Raises:
        NotFound: the framework is not installed.
        Unrecognized, Unreadable: the patch would be refused.
    """
    recognized, _ = _recognized(patch)
    return "".join(
        f"# patch -p0 -d {shlex.quote(str(_root(source)))}\n{_unified(source, _as_shown(source, recognized))}"
        for source in _modules(recognized)
    )


def patch_file(patch: Patch) -> str:
    """The same as a file for ``git apply``, ``git am`` and ``patch -p1``: a header, and names below ``a/`` and ``b/``.

    The resulting file is the text that the engine compiles.

    Raises:
        NotAFile: the patch replaces or wraps a function, or a file is not UTF-8 text with plain line ends.
        NotFound, Unrecognized, Unreadable: as `diff`.
    """
    recognized, version = _recognized(patch)
    called = [item.change.target for item in recognized if not isinstance(item.change, Rewrite)]
    if called:
        raise NotAFile(
            f"{', '.join(dict.fromkeys(called))} is replaced or wrapped in memory, which a patch file cannot express; "
            "without --format the output shows it as comments"
        )
    parts = []
    for source in _modules(recognized):
        _check_is_the_file(source)
        edits = [edit for item in recognized if item.source is source for edit in item.edits]
        name = _name(source)
        parts.append(f"diff --git a/{name} b/{name}\n")
        parts.append(_unified(source, edited(source.text, edits), "a/", "b/"))
    return _head(patch, recognized, version) + "".join(parts)


def _recognized(patch: Patch) -> tuple[list[Recognized], str]:
    """The patch's changes in the installed code, and its version."""
    choice = choices.choose([choices.look(variant) for variant in patch.variants])
    if isinstance(choice, Decision):
        raise NotFound(choice.reason)
    recognized, errors = decision.shapes_in(choice.variants, locating.read_module)
    if not recognized:
        raise errors[0]
    if len(recognized) > 1:
        raise Unrecognized(decision.decide(choice, locating.read_module).reason)
    (changes,) = recognized.values()
    shapes.check_compiles(changes)
    return changes, choice.finding.version or "of an unknown version"


def _modules(recognized: Sequence[Recognized]) -> list[Source]:
    return list({item.source.module: item.source for item in recognized}.values())


def _head(patch: Patch, recognized: Sequence[Recognized], version: str) -> str:
    """The mail header of a patch; git and patch skip it or use it as the commit message."""
    roots = " and ".join(dict.fromkeys(str(_root(source)) for source in _modules(recognized)))
    lines = [
        f"From: rlhf-patches <{patch.name}@rlhf-patches.invalid>",
        f"Subject: [PATCH] {patch.name}: {patch.summary}",
        "",
        *(f"Reference: {reference}" for reference in patch.references),
        f"Affected: {patch.distribution} {patch.versions}",
        f"Made from: {patch.distribution} {version} in {roots}",
        *(f"Needs: {path}" for path in put_to_use(item.change for item in recognized)),
        "---",
    ]
    return "".join(f"{printable(line).rstrip()}\n" for line in lines)


def _check_is_the_file(source: Source) -> None:
    try:
        data = Path(source.filename).read_bytes()
    except OSError as error:
        raise NotAFile(f"{source.filename} is not a plain file, so no patch file can change it ({error})") from error
    if data != source.text.encode():
        raise NotAFile(f"{source.filename} is not UTF-8 with plain line ends, so a patch file would not apply")


def _root(source: Source) -> Path:
    """The folder of the module's top-level package."""
    file = Path(source.filename)
    return file.parents[source.module.count(".") + (file.stem == "__init__")]


def _name(source: Source) -> str:
    return Path(source.filename).relative_to(_root(source)).as_posix()  # patch refuses absolute names


def _unified(source: Source, new: str, old_prefix: str = "", new_prefix: str = "") -> str:
    name = _name(source)
    lines = difflib.unified_diff(_lines(source.text), _lines(new), old_prefix + name, new_prefix + name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    # Lines as `patch` counts them: str.splitlines also breaks at form feeds.
    lines = text.split("\n")
    return [*(f"{line}\n" for line in lines[:-1]), *lines[-1:]] if lines[-1] else [f"{line}\n" for line in lines[:-1]]


def _as_shown(source: Source, recognized: Sequence[Recognized]) -> str:
    edits: list[Edit] = []
    for item in recognized:
        if item.source is source:
            edits += list(item.edits) if isinstance(item.change, Rewrite) else [_note(item)]
    return with_edits(source.text, edits)


def _note(item: Recognized) -> Edit:
    """A comment above a function that is wrapped or replaced instead of edited."""
    assert not isinstance(item.change, (Rewrite, Shape))
    lines = item.source.text.splitlines(keepends=True)
    first = item.place.first_line
    start = sum(len(line) for line in lines[: first - 1])
    done = "wrapped" if isinstance(item.change, Wrap) else "replaced"
    note = [f"{done} by {item.change.implementation}:", *_text_of(item.change.implementation)]
    indent = " " * item.place.column
    return Edit(start, start, "".join(f"{indent}# {line}".rstrip() + "\n" for line in note))


def _text_of(path: str) -> list[str]:
    """The lines of an implementation; none if it is not a function in its module's text."""
    module, _, qualname = path.partition(":")
    try:
        source = locating.read_module(module)
        node = sources.find_function(source, qualname)
    except (NotFound, Unreadable, Unrecognized):
        return []
    lines = source.text.splitlines()[sources.first_line(node) - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)).splitlines()
