"""``try`` and ``fingerprint``: what somebody who writes a patch asks of upstream's code."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from ..definitions.patch import Rewrite
from ..definitions.status import printable
from ..guards import rewriting, shapes, sources
from ..guards.sources import NotFound, Source, Unreadable
from ..offline import archive, download
from . import output
from .command_line import Commands, UsageError


def add(commands: Commands) -> None:
    """Declare the commands."""
    command = commands.add(
        "try",
        _try,
        "where a pattern is in a function, and what a rewrite makes of it",
        "rlhf-patches try trl.trainer.utils:pad 'torch.stack($A)' 'torch.stack($A, 0)' --in trl==1.14.2",
    )
    _add_target(command)
    command.add_argument("pattern", metavar="PATTERN", nargs="?", help="an ast-grep pattern; without it, the source")
    command.add_argument("replacement", metavar="REPLACEMENT", nargs="?", help="what becomes of it, as in a Rewrite")
    command.add_argument("--inside", metavar="PATTERN", help="what the match's parent has to be")
    command.add_argument(
        "--use", metavar="NAME=MODULE:FUNC", action="append", default=[], help="what $NAME in REPLACEMENT stands for"
    )
    command.add_argument("--in", dest="release", metavar="RELEASE", help=_RELEASE)
    command = commands.add(
        "fingerprint",
        _fingerprint,
        "a function's fingerprint, as Replace and Wrap list it, and its signature",
        "rlhf-patches fingerprint trl.trainer.utils:pad trl==1.13.0 trl==1.14.2",
    )
    _add_target(command)
    command.add_argument("releases", metavar="RELEASE", nargs="*", help=_RELEASE)


_RELEASE = "a wheel, an sdist, a directory, or NAME==VERSION (fetched with pip); what is installed where there is none"


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="MODULE:FUNC", help="the function, as in a patch: pkg.mod:Class.method")


def _try(options: argparse.Namespace) -> int:
    source, node = _function(options.target, options.release)
    places: list[tuple[int, int]] = []
    if options.pattern is not None:
        places = rewriting.lines_of_matches(source, node, options.pattern, options.inside)
    first = sources.first_line(node)
    marked = {line for start, end in places for line in range(start, end + 1)}
    for number, text in enumerate(source.text.splitlines()[first - 1 : node.end_lineno], first):
        print(printable(f"{'>' if number in marked else ' '}{number:>6}  {text}"))
    if options.pattern is None:
        return 0
    print()
    print(printable(f"{options.pattern!r}: {len(places)} matches in {options.target} ({source.filename})"))
    if not places:
        complaint = rewriting.no_python(options.pattern)
        if complaint:
            output.complain(f"the pattern {options.pattern!r} {complaint}")
        return 1
    if options.replacement is not None:
        _show(_rewrite(options, len(places)), source)
    return 0


def _rewrite(options: argparse.Namespace, matches: int) -> Rewrite:
    uses = dict(use.partition("=")[::2] for use in options.use)
    return Rewrite(
        options.target, options.pattern, options.replacement, matches=matches, inside=options.inside, uses=uses
    )


def _show(rewrite: Rewrite, source: Source) -> None:
    """The change as a diff, and the definition that makes it."""
    try:
        found = shapes.recognise(rewrite, source)
        shapes.check_compiles([found], lines=True)
    except (rewriting.Unrecognised, rewriting.Undefined, rewriting.NoEffect) as error:
        raise UsageError(f"it cannot be rewritten so: {error}") from error
    new = rewriting.with_edits(source.text, found.edits)
    old, name = source.text.splitlines(), source.filename
    for line in difflib.unified_diff(old, new.splitlines(), name, name, lineterm=""):
        print(output.printable_lines(line))
    arguments = [rewrite.target, rewrite.pattern, rewrite.replacement]
    named: dict[str, Any] = {"matches": 1, "inside": None, "uses": {}}
    given = {name: getattr(rewrite, name) for name, default in named.items() if getattr(rewrite, name) != default}
    if "uses" in given:
        given["uses"] = dict(rewrite.uses)
    text = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in given.items())])
    print()
    print(printable(f"Rewrite({text})"))


def _fingerprint(options: argparse.Namespace) -> int:
    found: dict[tuple[str, str], list[str]] = {}
    wrong = 0
    for release in options.releases or [None]:
        try:
            _, node = _function(options.target, release)
        except UsageError as error:
            output.complain(str(error))
            wrong = 2
            continue
        key = sources.fingerprint_of(node), sources.signature_of(node)
        found.setdefault(key, []).append(release or "installed here")
    for (fingerprint, signature), releases in found.items():
        print(printable(f"{fingerprint}  {signature}  {', '.join(releases)}"))
    return wrong


def _function(target: str, release: str | None) -> tuple[Source, sources.FunctionNode]:
    module, _, qualname = target.partition(":")
    if not module or not qualname:
        raise UsageError(f"{target!r} is no function: expected MODULE:FUNC, such as pkg.mod:Class.method")
    try:
        if release is None:
            source = sources.read_module(module)
        else:
            source = archive.open_release(download.found(release)).source(module)
        return source, sources.find_function(source, qualname)
    except (NotFound, Unreadable, archive.ReleaseError, download.DownloadError) as error:
        raise UsageError(str(error)) from error
