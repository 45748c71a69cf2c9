"""``diagnose``: the known bug that a training log or a traceback shows, and the setting for it."""

from __future__ import annotations

import argparse
import json

from ..definitions import pages, registry
from ..definitions.patch import Advice
from ..definitions.words import plural, printable
from ..offline import diagnose, hangs, hints, inputs, logs
from ..offline.diagnose import Diagnosis
from ..offline.hangs import Group, Stack, Standing, Timeout
from ..offline.logs import Logs
from . import output
from .command_line import Commands, UsageError, add_output

_MOST_RANKS = 8
_MOST_GROUPS = 8
_EXPECTED = (
    "expected a training log with a Python exception (its traceback, or its last line alone), a timeout of NCCL or "
    "gloo, or a stack by faulthandler or py-spy; `rlhf-patches doctor` lists the known bugs of this "
    "environment"
)


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "diagnose",
        _diagnose,
        "find known bugs in training logs or a traceback: how certain each one is, and what to set",
        "rlhf-patches diagnose train.log",
        wrong=(inputs.InputError,),
    )
    command.add_argument(
        "log",
        nargs="*",
        default=["-"],
        metavar="LOG",
        help="files or folders (torchrun's --log-dir), also .gz; '-' or no LOG: standard input",
    )
    add_output(command)


def _diagnose(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    read = logs.Logs(options.log)
    standing, advised = Standing(), hints.Hints()
    diagnoses, count = diagnose.diagnose(advised.observed(read), registered, standing)
    explained = [one.first.message for one in diagnoses if not isinstance(one.first, Stack)]
    further = advised.of_others(explained)
    understood = count or standing.count
    if not understood and not read.problems:
        raise UsageError(f"no exception and no hang in {_what(read)}: {_EXPECTED}")
    if options.json:
        print(json.dumps(_all_as_json(diagnoses, count, standing, read) | {"hints": further}, indent=2))
    elif options.quiet:
        for one in diagnoses:
            output.complain(f"{one.item.patch.name} ({_how_sure(one)}), {_where(one, read)}")
    elif understood:
        _print_standing(standing, read)
        _print(diagnoses, count, read)
        for line in further:
            output.print_sentence(line)
    for line in read.problems + ([] if options.quiet else read.left_out):
        output.complain(line)
    output.complain_of_plugins(failures)
    return 2 if read.problems else int(bool(diagnoses))


def _what(read: Logs) -> str:
    if read.several:
        left_out = f" ({len(read.left_out)} other files are no logs)" if read.left_out else ""
        return f"{plural(read.read, 'file')}{left_out}"
    return "standard input" if list(read.paths) == ["-"] else read.paths[0]


def _where(one: Diagnosis | Group, read: Logs) -> str:
    seen = one.first
    who = seen.stream if not seen.rank or seen.rank.rpartition(" ")[2] in seen.stream else seen.rank
    file = f"{seen.file} " if read.several else ""
    return f"{file}line {seen.line}{f' ({who})' if who else ''}"


def _print_standing(standing: Standing, read: Logs) -> None:
    """Print the timeouts and the stacks of the processes: those in a collective first."""
    stacks = sorted(standing.stacks.values(), key=lambda group: not _collective(group))
    for head, groups in (("Timed out:", list(standing.timeouts.values())), ("Stacks:", stacks)):
        if groups:
            print(head)
        for group in groups[:_MOST_GROUPS]:
            whose = f"{_ranks(group.ranks)}; " if group.ranks else ""
            print(printable(f"    {_sign(group)}: {whose}first at {_where(group, read)}"))
        if len(groups) > _MOST_GROUPS:
            print(f"    and {len(groups) - _MOST_GROUPS} more, see --json")
    for groups in standing.disagreeing():
        first = groups[0].first
        number = first.sequence if isinstance(first, Timeout) else ""
        each = " and ".join(f"{_collective(group)} on {_ranks(group.ranks)}" for group in groups)
        output.print_sentence(
            f"Collective number {number} is {each}: these ranks run different code before it. Look for what differs "
            "between them: a condition on the rank, on its data, or on a metric."
        )
    if standing.timeouts and not standing.stacks:
        print("`py-spy dump --pid PID` shows where a waiting rank is; with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 NCCL's")
        print("watchdog logs it. `diagnose` reads both.")
    if standing.count:
        print()


def _collective(group: Group) -> str:
    return hangs.collective(group.first.frames) if isinstance(group.first, Stack) else group.first.collective


def _sign(group: Group) -> str:
    first = group.first
    if isinstance(first, Timeout):
        if first.notice:
            return first.notice
        number = f" number {first.sequence}" if first.sequence else ""
        limit = f" after {int(first.milliseconds) / 1000:g} s" if first.milliseconds else ""
        return f"{first.collective or 'a collective'}{number} of {first.backend}{limit}"
    called, by = hangs.collective(first.frames), hangs.caller(first.frames)
    return f"{called}, called by {by.function} in {by.file}" if called else f"{by.function} in {by.file}"


def _group_as_json(group: Group) -> dict[str, object]:
    first = group.first
    base = {"collective": _collective(group), "file": first.file, "line": first.line, "times": group.times}
    if isinstance(first, Timeout):
        more: dict[str, object] = {
            "backend": first.backend,
            "sequence": first.sequence,
            "milliseconds": first.milliseconds,
            "group": first.group,
            "notice": first.notice,
        }
    else:
        more = {"frames": [f"{frame.file}:{frame.function}" for frame in first.frames]}
    return {**base, **more, "ranks": sorted(group.ranks)}


def _print(diagnoses: list[Diagnosis], count: int, read: Logs) -> None:
    exceptions = plural(count, "exception")
    if not diagnoses:
        print(f"No known bug in {exceptions}. `rlhf-patches doctor` lists the known bugs of this environment.")
        return
    for one in diagnoses:
        patch, seen = one.item.patch, one.first
        times = "" if one.times == 1 else f", {one.times} times"
        if len(one.ranks) > 1:
            times += f", {_ranks(one.ranks)}"
        print(
            printable(
                f"{patch.name}{registry.credit(one.item.plugin)}: {_how_sure(one)}; first at {_where(one, read)}{times}"
            )
        )
        if isinstance(seen, Stack):
            called = hangs.collective(seen.frames)
            print(printable(f"    the rank waits in {called or seen.frames[0].function}; this bug makes a run hang"))
        elif seen.exception:
            print(printable(f"    {seen.exception}: {seen.message}"[:200]))
        print(printable(f"    affected: {patch.distribution} {patch.versions}"))
        print(printable(f"    {pages.bug(patch)}"))
        what = "advice" if isinstance(patch, Advice) else "repair"
        print(printable(f"    {what}: `rlhf-patches explain {patch.name}`"))
    if all(isinstance(one.item.patch, Advice) for one in diagnoses):
        return
    print("\nTo run with the repair: `rlhf-patches run -- COMMAND`, or RLHF_PATCHES_AUTOLOAD=1. On the machine of the")
    print("log, `rlhf-patches doctor` shows whether the patch applies.")


def _how_sure(one: Diagnosis) -> str:
    if one.match == diagnose.CERTAIN:
        return "certain (exception, message and function match)"
    if one.match == diagnose.LIKELY:
        return "likely (exception and message match; no traceback)"
    if one.doubt:
        return f"possible (the log names {one.doubt}, which does not have this bug)"
    if isinstance(one.first, Stack):
        return "possible (a stack passes through its function)"
    if diagnose.OUT_OF_MEMORY in one.first.message:
        return "possible (memory runs out in its function)"
    if not one.first.frames and not one.first.cut:
        return "possible (no traceback, and other code raises this message, too)"
    return f"possible (in the traceback {one.first.cut or 'frames are missing'})"


def _ranks(ranks: set[str]) -> str:
    """The ranks of a diagnosis, as many as fit in a line."""
    shown = sorted(ranks, key=lambda rank: (len(rank), rank))
    more = f" and {len(shown) - _MOST_RANKS} more" if len(shown) > _MOST_RANKS else ""
    return ", ".join(shown[:_MOST_RANKS]) + more


def _all_as_json(diagnoses: list[Diagnosis], count: int, standing: Standing, read: Logs) -> dict[str, object]:
    return {
        "files": read.read,
        "exceptions": count,
        "bugs": [_as_json(one) for one in diagnoses],
        "timeouts": [_group_as_json(group) for group in standing.timeouts.values()],
        "stacks": [_group_as_json(group) for group in standing.stacks.values()],
        "problems": read.problems,
        "left_out": read.left_out,
    }


def _as_json(one: Diagnosis) -> dict[str, object]:
    return {
        "name": one.item.patch.name,
        "plugin": one.item.plugin,
        "harm": one.item.patch.harm or None,
        "bug": one.item.patch.bug or None,
        "when": one.item.patch.when or None,
        "match": one.match,
        "doubt": one.doubt,
        "sure": one.sure,
        "exception": "" if isinstance(one.first, Stack) else one.first.exception,
        "message": "" if isinstance(one.first, Stack) else one.first.message,
        "file": one.first.file,
        "line": one.first.line,
        "stream": one.first.stream,
        "rank": one.first.rank,
        "ranks": sorted(one.ranks),
        "times": one.times,
    }
