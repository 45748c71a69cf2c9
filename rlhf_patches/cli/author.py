"""``try`` and ``fingerprint``: questions of a patch author about upstream's code."""

from __future__ import annotations

import argparse
import difflib

from ..authoring import definition, upstream
from ..definitions.changes import Rewrite
from ..definitions.words import printable
from ..guards import fingerprints, patterns, shapes, sources
from ..guards.edits import Edit, NoEffect, Undefined, Unrecognized, with_edits
from ..guards.places import Source
from . import output
from .command_line import Commands, UsageError


def add(commands: Commands) -> None:
    """Declare the commands."""
    command = commands.add(
        "try",
        _try,
        "show where a pattern matches in a function, and the result of a rewrite",
        "rlhf-patches try trl.trainer.utils:pad 'torch.stack($A)' 'torch.stack($A, 0)' --in trl==1.14.2",
        wrong=(upstream.UpstreamError,),
    )
    _add_target(command)
    command.add_argument("pattern", metavar="PATTERN", nargs="?", help="an ast-grep pattern; without it, the source")
    command.add_argument("replacement", metavar="REPLACEMENT", nargs="?", help="the replacement, as in a Rewrite")
    add_of_rewrite(command)
    command.add_argument("--in", dest="release", metavar="RELEASE", help=RELEASE)
    command = commands.add(
        "fingerprint",
        _fingerprint,
        "print a function's fingerprint, for the fingerprints of a Replace or Wrap, and its signature",
        "rlhf-patches fingerprint trl.trainer.utils:pad trl==1.13.0 trl==1.14.2",
        wrong=(upstream.UpstreamError,),
    )
    _add_target(command)
    command.add_argument("releases", metavar="RELEASE", nargs="*", help=RELEASE)


RELEASE = "a wheel, an sdist, a directory, or NAME==VERSION (fetched with pip); default: the installed release"
"""Where the commands for authors read upstream's code."""


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="MODULE:FUNC", help="the function, as in a patch: pkg.mod:Class.method")


def _try(options: argparse.Namespace) -> int:
    source, node = upstream.open_upstream(options.release).function(options.target)
    places: list[tuple[int, int]] = []
    if options.pattern is not None:
        ranges = [match.range() for match in patterns.matches(source, node, options.pattern, options.inside)]
        places = [(each.start.line + 1, each.end.line + 1) for each in ranges]
    first = sources.first_line(node)
    marked = {line for start, end in places for line in range(start, end + 1)}
    for number, text in enumerate(source.text.splitlines()[first - 1 : node.end_lineno], first):
        print(printable(f"{'>' if number in marked else ' '}{number:>6}  {text}"))
    if options.pattern is None:
        return 0
    print()
    count = "1 match" if len(places) == 1 else f"{len(places)} matches"
    print(printable(f"{options.pattern!r}: {count} in {options.target} ({source.filename})"))
    if not places:
        complaint = patterns.no_python(options.pattern)
        if complaint:
            output.complain(f"the pattern {options.pattern!r} {complaint}")
        return 1
    if options.replacement is not None:
        _show(rewrite_of(options, len(places)), source)
    return 0


def add_of_rewrite(command: argparse.ArgumentParser) -> None:
    """Add the options for a `Rewrite`'s fields other than its pattern and replacement."""
    command.add_argument("--inside", metavar="PATTERN", help="a pattern that the match's parent must match")
    command.add_argument(
        "--use", metavar="NAME=MODULE:FUNC", action="append", default=[], help="the function for $NAME in REPLACEMENT"
    )


def rewrite_of(options: argparse.Namespace, matches: int) -> Rewrite:
    """The rewrite that the options describe."""
    uses = dict(use.partition("=")[::2] for use in options.use)
    return Rewrite(
        options.target, options.pattern, options.replacement, matches=matches, inside=options.inside, uses=uses
    )


def edits_of(rewrite: Rewrite, source: Source) -> tuple[Edit, ...]:
    """The edits of a rewrite in its module.

    Raises:
        UsageError: the rewrite is not possible.
    """
    try:
        edits = shapes.recognize(rewrite, source)
        shapes.check_compiles([edits], lines=True)
    except (Unrecognized, Undefined, NoEffect) as error:
        raise UsageError(f"the rewrite is not possible: {error}") from error
    return edits.edits


def _show(rewrite: Rewrite, source: Source) -> None:
    """Print the change as a diff, and its definition."""
    new = with_edits(source.text, edits_of(rewrite, source))
    old, name = source.text.splitlines(), source.filename
    for line in difflib.unified_diff(old, new.splitlines(), name, name, lineterm=""):
        print(output.printable_lines(line))
    print()
    print(printable(definition.one_line(rewrite)))


def _fingerprint(options: argparse.Namespace) -> int:
    releases_by_key: dict[tuple[str, str], list[str]] = {}
    wrong = 0
    for release in options.releases or [None]:
        try:
            _, node = upstream.open_upstream(release).function(options.target)
        except upstream.UpstreamError as error:
            output.complain(str(error))
            wrong = 2
            continue
        key = fingerprints.fingerprint_of(node), fingerprints.signature_of(node)
        releases_by_key.setdefault(key, []).append(release or "installed here")
    for (fingerprint, signature), releases in releases_by_key.items():
        print(printable(f"{fingerprint}  {signature}  {', '.join(releases)}"))
    return wrong
