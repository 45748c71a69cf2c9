"""``diagnose``: which known bug a training log or a traceback shows, and what to set."""

from __future__ import annotations

import argparse
import json

from ..definitions import registry
from ..definitions.patch import Advice
from ..definitions.status import printable
from ..offline import diagnose, inputs, tracebacks
from ..offline.diagnose import Diagnosis
from . import output
from .command_line import Commands, UsageError, add_output


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "diagnose",
        _diagnose,
        "which known bug a training log or traceback shows, how sure that is, and what to set",
        "rlhf-patches diagnose train.log",
        wrong=(inputs.InputError, tracebacks.LogError),
    )
    command.add_argument("log", nargs="?", default="-", metavar="LOG", help="a file; '-', or none: standard input")
    add_output(command)


def _diagnose(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    try:
        if options.log == "-":
            found, count = diagnose.diagnose(tracebacks.read(inputs.standard_input()), registered)
        else:
            with open(options.log, "rb") as log:
                found, count = diagnose.diagnose(tracebacks.read(log), registered)
    except OSError as error:
        what = "standard input" if options.log == "-" else options.log
        raise UsageError(f"cannot read {what}: {error.strerror or error}") from error
    if options.json:
        print(json.dumps({"exceptions": count, "bugs": [_as_json(one) for one in found]}, indent=2))
    elif options.quiet:
        for one in found:
            output.complain(f"{one.item.patch.name} ({_how_sure(one)}), line {one.first.line}")
    else:
        _say(found, count)
    output.complain_of_plugins(failures)
    return int(bool(found))


def _say(found: list[Diagnosis], count: int) -> None:
    exceptions = f"{count} exception{'' if count == 1 else 's'}"
    if not found:
        print(f"No known bug in {exceptions}. `rlhf-patches doctor` says which bugs what is installed here has.")
        return
    for one in found:
        patch, seen = one.item.patch, one.first
        where = f"line {seen.line}{f' ({seen.stream})' if seen.stream else ''}"
        times = "" if one.times == 1 else f", {one.times} times"
        print(printable(f"{patch.name}{registry.credit(one.item.plugin)}: {_how_sure(one)}; first at {where}{times}"))
        print(printable(f"    {seen.exception}: {seen.message}"[:200]))
        print(printable(f"    affected: {patch.distribution} {patch.versions}"))
        what = "advice" if isinstance(patch, Advice) else "repair"
        print(printable(f"    {what}: {patch.summary}; `rlhf-patches explain {patch.name}`"))
    if all(isinstance(one.item.patch, Advice) for one in found):
        return
    print("\nTo run with it: `rlhf-patches run -- COMMAND`, or RLHF_PATCHES_AUTOLOAD=1. `rlhf-patches doctor` says")
    print("whether it applies to what is installed where the log comes from.")


def _how_sure(one: Diagnosis) -> str:
    return (
        "certain (exception, text and function)" if one.sure else "likely (exception and text; no traceback through it)"
    )


def _as_json(one: Diagnosis) -> dict[str, object]:
    return {
        "name": one.item.patch.name,
        "plugin": one.item.plugin,
        "sure": one.sure,
        "exception": one.first.exception,
        "message": one.first.message,
        "line": one.first.line,
        "stream": one.first.stream,
        "times": one.times,
    }
