"""``list``, ``explain`` and ``diff``: all patches, one patch's page, and its change."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import settings
from ..definitions import pages, registry, search
from ..definitions.patch import Patch
from ..definitions.registry import PluginFailure, Registered
from ..definitions.status import PatchReport
from ..definitions.words import printable
from ..guards.edits import NoEffect, Unrecognized
from ..guards.places import NotFound, Unreadable
from ..offline import changes, evaluate
from ..proving import lookup
from . import output
from .command_line import Commands, UsageError

_NAME = "a patch's name, or a part of it"


def add(commands: Commands) -> None:
    """Declare the commands."""
    command = commands.add(
        "list", _list, "list all patches, advice and watches, built-in and from plugins", "rlhf-patches list --json"
    )
    command.add_argument("--json", action="store_true", help="a JSON list of objects, see docs/cli.md")
    output.add_details(command, places=False)
    command = commands.add(
        "explain",
        _explain,
        "show the page of a patch, an advice or a watch, or find the bugs that words describe",
        "rlhf-patches explain identical completions",
    )
    command.add_argument("words", nargs="+", metavar="NAME|WORDS", help=f"{_NAME}, or words of a symptom or an error")
    command = commands.add(
        "diff", _diff, "show a patch's change to the installed source", "rlhf-patches diff verl-no-sync-reentry"
    )
    command.add_argument("name", metavar="NAME", help=_NAME)
    command.add_argument(
        "--format",
        choices=("diff", "patch"),
        default="diff",
        help="'patch' adds a header for git apply, git am and patch -p1 (default: diff)",
    )


def _list(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    report = evaluate.inspect(registered, failures)
    if options.json:
        output.print_json(report)
        return 0
    by_name = {item.patch.name: item for item in registered}

    def cells(row: PatchReport) -> tuple[str, str]:
        item = by_name[row.name]
        return row.harm or "-", printable(pages.bug(item.patch) + registry.credit(item.plugin))

    def below(row: PatchReport) -> list[str]:
        return [printable(f"releases: {row.distribution} {row.guard}".rstrip())]

    output.print_report(report, options, ("PATCH", "STATUS", "HARM", "BUG"), cells, below)
    print()
    output.print_sum(report, "`rlhf-patches explain NAME` shows a page, `rlhf-patches doctor` the reason for a status")
    output.complain_of_plugins(failures)
    return 0


def _explain(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    words = " ".join(options.words)
    meant = _meant(words, registered)
    if len(meant) != 1:
        return _found(words, registered, failures, is_part=bool(meant))
    (item,) = meant
    text = output.printable_lines(pages.page(item.patch, item.plugin, lookup.how_to_prove(item.patch)))
    console = output.console()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(text), soft_wrap=False)  # which would crop code blocks
    else:
        print(text, end="")
    return 0


def _found(words: str, registered: Sequence[Registered], failures: Sequence[PluginFailure], *, is_part: bool) -> int:
    """List the bugs that words describe; ``is_part`` says whether several names have them as a part.

    Raises:
        UsageError: the words are a misspelt name, or describe no bug.
    """
    names = [item.patch.name for item in registered]
    found = search.Index(item.patch for item in registered).find(words)
    nearest = settings.nearest(words, names) if "-" in words else ""
    if nearest and settings.LINE not in nearest and not is_part:
        raise UsageError(f"there is no patch {words!r}{nearest}{registry.hint(failures)}")
    if not found:
        raise UsageError(
            settings.LINE.join(
                (
                    f"no known bug fits {words!r}{registry.hint(failures)}",
                    "`rlhf-patches diagnose LOG` reads a log or a traceback",
                    "`rlhf-patches list --all` shows every bug",
                )
            )
        )
    output.print_sentence(f"Known bugs that fit {printable(repr(words))}, best first:", style="bold")
    for patch in found:
        output.print_sentence(printable(f"{patch.name}: {pages.bug(patch)}"))
    output.print_sentence("Next: `rlhf-patches explain NAME` shows a page.")
    return 0


def _diff(options: argparse.Namespace) -> int:
    patch = _patch(options.name).patch
    if not isinstance(patch, Patch):
        raise UsageError(f"{patch.name} is an advice and changes no code: `rlhf-patches explain {patch.name}`")
    try:
        text = changes.patch_file(patch) if options.format == "patch" else changes.diff(patch)
    except NotFound as error:
        raise UsageError(
            f"{patch.name}: no change to show: {patch.distribution} is not installed here ({error})"
        ) from error
    except (NoEffect, Unrecognized, Unreadable) as error:
        raise UsageError(f"{patch.name} does not change anything here: {error}") from error
    except changes.NotAFile as error:
        raise UsageError(f"{patch.name} cannot be exported as a patch: {error}") from error
    console = output.console()
    if console.is_terminal:
        from rich.syntax import Syntax

        # Print the text, not the renderable, which would crop. The terminal wraps, and copied text keeps its lines.
        diff = Syntax("", "diff", background_color="default").highlight(output.printable_lines(text))
        diff.rstrip()
        console.print(diff)
    else:
        # Unescaped: the command `patch` reads it.
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"{sys.stdout.encoding} cannot encode the diff: set PYTHONIOENCODING=utf-8") from error
        print(text, end="")
    return 0


def _patch(name: str) -> Registered:
    """The patch whose name the user has typed, in full or in part, in any case.

    Raises:
        UsageError: no patch matches, or several do.
    """
    registered, failures = registry.load()
    meant = _meant(name, registered)
    if len(meant) > 1:
        names = settings.LINE.join(item.patch.name for item in meant)
        raise UsageError(f"{name!r} matches {len(meant)} names:{settings.LINE}{names}")
    return find(meant[0].patch.name if len(meant) == 1 else name, registered, failures)


def _meant(name: str, registered: Sequence[Registered]) -> list[Registered]:
    """The patch with this name; without one, the patches whose names contain it, in any case."""
    part = name.lower().replace("_", "-")
    meant = [item for item in registered if part and part in item.patch.name.lower()]
    return [item for item in meant if item.patch.name == name] or meant


def find(name: str, registered: Sequence[Registered], failures: Sequence[PluginFailure]) -> Registered:
    """The patch or advice with this name, which a user has typed.

    Raises:
        UsageError: there is none with this name.
    """
    for item in registered:
        if item.patch.name == name:
            return item
    nearest = settings.nearest(name, [item.patch.name for item in registered])
    raise UsageError(f"there is no patch {name!r}{nearest}{registry.hint(failures)}")
