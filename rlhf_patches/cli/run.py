"""``run`` and ``report``: run a command with the patches, and show the patches' state in all of its processes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile

from .. import autoload, settings
from ..definitions import registry
from ..runs import hook_files
from . import output, supervised
from .command_line import Commands, UsageError, add_command, add_output, given_command


def add(commands: Commands) -> None:
    """Declare the commands."""
    command = commands.add(
        "run",
        _run,
        "run a command with the patches, in all of its Python processes",
        "rlhf-patches run --strict -- torchrun --nproc-per-node 8 train.py",
    )
    command.add_argument("--only", metavar="NAMES", help="names or globs, comma-separated: apply nothing else")
    command.add_argument("--disable", metavar="NAMES", help="names or globs, comma-separated: do not apply these")
    command.add_argument("--enable", metavar="NAMES", help="names, comma-separated: also apply these contested patches")
    command.add_argument("--strict", action="store_true", help="a refused or failed patch stops the process")
    verbosity = command.add_mutually_exclusive_group()
    verbosity.add_argument(
        "--log",
        metavar="LEVEL",
        help="debug, info, warning, error, off; ':all' for every rank (default: see docs/reports.md)",
    )
    verbosity.add_argument("--quiet", action="store_true", help="the same as --log off")
    command.add_argument("--report", metavar="FILE", help="each process writes a line of JSON to this file")
    add_command(command)
    command = commands.add(
        "report",
        _report,
        "show the patches' state in all processes of a run, and which processes differ",
        "rlhf-patches run --report run.jsonl -- torchrun train.py; rlhf-patches report run.jsonl",
    )
    command.add_argument(
        "file", nargs="+", metavar="FILE", help="report files (RLHF_PATCHES_REPORT), one for each host"
    )
    add_output(command)


def _run(options: argparse.Namespace) -> int:
    command = given_command(options, "run")
    registered, _ = registry.load()
    names = [item.patch.name for item in registered]
    environment = dict(os.environ)
    for variable, value in (("ONLY", options.only), ("DISABLE", options.disable), ("ENABLE", options.enable)):
        if value is not None:
            settings.expand(settings.split(value), names, f"--{variable.lower()}")
            environment[settings.PREFIX + variable] = value
    if options.strict:
        environment[settings.PREFIX + "STRICT"] = "1"
    if options.log or options.quiet:
        environment[settings.PREFIX + "LOG"] = options.log or "off"
    if options.report:
        environment[settings.PREFIX + "REPORT"] = _writable(os.path.abspath(options.report))
    os.environ.clear()
    os.environ.update(environment)
    return supervised.end_as(run(command))


def run(command: list[str]) -> int:
    """Run a command under the site hook, with this process's variables, until the command ends.

    Returns:
        the command's exit status, or minus the number of the signal that ended it.

    Raises:
        UsageError: this environment has no hook.
        SettingsError: a variable is invalid.
    """
    registered, _ = registry.load()
    environment = dict(os.environ, RLHF_PATCHES_AUTOLOAD="1")
    watched = settings.split(os.environ.get(settings.PREFIX + "WATCH", ""))
    watched += [name for name in autoload.watch_list(registered) if name not in watched]
    if watched:
        environment[settings.PREFIX + "WATCH"] = ",".join(watched)
    os.environ.clear()
    os.environ.update(environment)
    settings.from_environment([item.patch.name for item in registered])
    settings.log_level()
    if not hook_files.active():
        raise UsageError(hook_files.NONE.format(", so the command would run unpatched"))
    # This environment's programs first: another environment's `python` has another hook, or none.
    folders = (sysconfig.get_path("scripts"), os.path.dirname(sys.executable), *os.get_exec_path())
    environment["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        output.complain(f"there is no command {command[0]!r}")
        return 127
    sys.stdout.flush()
    with tempfile.NamedTemporaryFile(prefix="rlhf-patches-run-") as mark:
        os.utime(mark.name, (0, 0))
        environment[settings.PREFIX + "RUN"] = mark.name
        try:
            status = supervised.run(program, command, environment)
        except supervised.CannotExecute as error:  # an unknown format, or a missing interpreter
            output.complain(f"{program} cannot be executed: {error}")
            return 126
        loaded = not os.path.exists(mark.name) or os.stat(mark.name).st_mtime > 0
    if not loaded:
        output.complain(
            f"NOT ACTIVE: no Python process of this run on this host loaded the hook of {sys.prefix}, so no patch was "
            f"applied. {program} runs another interpreter, in a container or on other hosts, with -S, or none"
        )
    return status


def _writable(path: str) -> str:
    """The report's path; checks before the run that it can be written."""
    from ..runs import report_file

    try:
        report_file.try_out(path)
    except OSError as error:
        raise UsageError(f"--report {path} cannot be written: {error.strerror or error}") from error
    return path


def _report(options: argparse.Namespace) -> int:
    from ..runs import report_reader

    try:
        summary = report_reader.summarize(options.file)
    except report_reader.ReportFileError as error:
        raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps(summary.to_dict(), indent=2))
    elif options.quiet:
        for problem in summary.problems:
            output.complain(problem)
    else:
        # Plain text, also on a terminal: users search, copy and mail its lines.
        print(output.printable_lines(str(summary)))
        if met := [name for name, (reached, _) in summary.reached.items() if reached.held]:
            print(
                output.printable_lines(f"Next: `rlhf-patches explain {met[0]}` shows what the bug did to earlier runs.")
            )
    return int(bool(summary.problems))
