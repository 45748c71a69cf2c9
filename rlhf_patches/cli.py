"""The command ``rlhf-patches``. Nothing here imports a framework: it works on a login node without a GPU.

Exit status: 0 all well, 1 a patch is refused or failed, a plugin is broken or the processes of a run differ, 2 the
command line, a setting, a release given to ``check`` or a file given to ``report`` is wrong.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from . import (
    __version__,
    autoload,
    confined,
    download,
    inspection,
    pages,
    plugins,
    releases,
    report_file,
    run_summary,
    settings,
)
from .plugins import PluginFailure, Registered
from .reporting import PatchReport, Report, Status
from .reporting import printable as _printable
from .rewriting import NoEffect, Unrecognised
from .sources import NotFound, Unreadable

_COLOURS = {
    Status.APPLIES: "green",
    Status.REFUSED: "bold red",
    Status.FAILED: "bold red",
    Status.DISABLED: "yellow",
    Status.UNAFFECTED: "blue",
    Status.ABSENT: "dim",
}


class UsageError(Exception):
    """The command line asks for something that cannot be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or pipe that knows ASCII only, say
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return int(options.action(options))
    except (UsageError, settings.SettingsError, autoload.AutoloadError, run_summary.ReportFileError) as error:
        print(f"rlhf-patches: {_printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `rlhf-patches list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# ------------------------------------------------------------------------------------------ the commands


def _list(options: argparse.Namespace) -> int:
    registered, failures = plugins.load()
    report = inspection.inspect(registered, failures)
    if options.json:
        return _print_json(report)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("PATCH", "STATUS", "AFFECTED RELEASES", "WHAT IT REPAIRS"):
        table.add_column(column, overflow="fold")
    for item, row in zip(registered, report, strict=True):
        texts = (str(item.patch.guard), item.patch.summary + plugins.credit(item.plugin))
        table.add_row(row.name, _coloured(row.status), *map(_printable, texts))
    _console().print(table)
    _complain_of(failures)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    registered, failures = plugins.load()
    report = inspection.inspect(registered, failures)
    bad = bool(report.problems or failures)
    if options.json:
        _print_json(report)
        return int(bad)
    if options.quiet:
        _complain_of_patches(report)
        _complain_of(failures)
        return int(bad)
    console = _console()
    console.print(_judgements(report))
    console.print()
    console.print(_printable(f"rlhf-patches {__version__}, Python {sys.version.split()[0]} ({sys.executable})"))
    console.print(_printable(_hook_state()), soft_wrap=True)
    for name in settings.KNOWN:
        value = os.environ.get(settings.PREFIX + name)
        if value is not None:
            console.print(_printable(f"{settings.PREFIX}{name}={value}"))
    _complain_of(failures)
    return int(bad)


def _check(options: argparse.Namespace) -> int:
    registered, failures = plugins.load()
    cache = Path(options.cache) if options.cache else download.default_cache()
    console = _console()
    rows: list[dict[str, object]] = []
    bad, unreadable = bool(failures), False
    for source in options.source:
        try:
            # What exists on disk is never looked for on an index.
            path = (
                source if os.path.lexists(source) or _looks_like_a_path(source) else str(download.fetch(source, cache))
            )
            checked = confined.check(path, registered, failures)
        except (download.DownloadError, releases.ReleaseError) as error:
            print(f"rlhf-patches: {_printable(str(error))}", file=sys.stderr)
            unreadable = True
            continue
        report = checked.report
        if not checked.is_patched:
            print(f"rlhf-patches: {_printable(source)} {_NOTHING_FOUND}", file=sys.stderr)
            unreadable = True
        bad = bad or bool(report.problems)
        rows += [{**row.to_dict(), "source": source} for row in report]
        if options.quiet:
            _complain_of_patches(report, f"{_printable(source)}: ")
        elif not options.json and checked.is_patched:
            _print_checked(console, source, report)
    if options.json:
        print(json.dumps(rows, indent=2))
    _complain_of(failures)
    return 2 if unreadable else int(bad)


_NOTHING_FOUND = (
    "has no package of any framework that a patch is for. A directory must be the one that holds the packages: the "
    "root of a checkout, or site-packages"
)


def _looks_like_a_path(source: str) -> bool:
    return os.sep in source or source.endswith((".whl", ".zip", ".tar.gz", ".tgz"))


def _print_checked(console: Console, source: str, report: Report) -> None:
    console.print(_printable(source), style="bold")
    there = [row for row in report if row.status is not Status.ABSENT]
    if there:
        console.print(_judgements(there))
    absent = len(report.patches) - len(there)
    if absent:
        other = "other modules" if there else "modules that it does not have"
        console.print(f"{absent} patches of {other}: absent", style="dim")
    console.print()


def _explain(options: argparse.Namespace) -> int:
    item = _patch(options.name)
    text = _printable_lines(pages.page(item.patch, item.plugin))
    console = _console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text, end="")
    return 0


def _diff(options: argparse.Namespace) -> int:
    patch = _patch(options.name).patch
    try:
        text = inspection.diff(patch)
    except NotFound as error:
        raise UsageError(
            f"{patch.name}: nothing to show, {patch.guard.distribution} is not installed here ({error})"
        ) from error
    except (NoEffect, Unrecognised, Unreadable) as error:
        raise UsageError(f"{patch.name} would change nothing here: {error}") from error
    console = _console()
    if console.is_terminal:
        console.print(Syntax(_printable_lines(text), "diff", background_color="default", word_wrap=True))
    else:
        # As it is, for the command patch is to take it.
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"the diff is no {sys.stdout.encoding} text: set PYTHONIOENCODING=utf-8") from error
        print(text, end="")
    return 0


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("run needs a command: rlhf-patches run -- torchrun --nproc-per-node 8 train.py")
    registered, _ = plugins.load()
    names = [item.patch.name for item in registered]
    environment = dict(os.environ, RLHF_PATCHES_AUTOLOAD="1")
    for variable, value in (("ONLY", options.only), ("DISABLE", options.disable)):
        if value is not None:
            settings.expand(settings.split(value), names, f"--{variable.lower()}")
            environment[settings.PREFIX + variable] = value
    if options.strict:
        environment[settings.PREFIX + "STRICT"] = "1"
    if options.log or options.quiet:
        environment[settings.PREFIX + "LOG"] = options.log or "off"
    if options.report:
        environment[settings.PREFIX + "REPORT"] = _writable(os.path.abspath(options.report))
    watched = settings.split(os.environ.get(settings.PREFIX + "WATCH", ""))
    watched += [name for name in autoload.watch_list(registered) if name not in watched]
    if watched:
        environment[settings.PREFIX + "WATCH"] = ",".join(watched)
    os.environ.clear()
    os.environ.update(environment)
    settings.read(names)
    settings.log_level()
    if not autoload.hook_file():
        raise UsageError(
            "this environment has no site hook, so the command would run unpatched (an editable install ships none): "
            "run `rlhf-patches autoload on` once, or install the wheel"
        )
    program = shutil.which(command[0])
    if program is None:
        print(f"rlhf-patches: there is no command {command[0]!r}", file=sys.stderr)
        return 127
    sys.stdout.flush()
    # exec: signals and the exit status are the command's own.
    try:
        os.execve(program, command, environment)
    except OSError as error:  # no format that the system knows, an interpreter that is not there
        print(f"rlhf-patches: {_printable(program)} cannot be executed: {error.strerror}", file=sys.stderr)
        return 126


def _report(options: argparse.Namespace) -> int:
    summary = run_summary.summarise(options.file)
    if options.json:
        print(json.dumps(summary.to_dict(), indent=2))
    elif options.quiet:
        for problem in summary.problems:
            print(f"rlhf-patches: {_printable(problem)}", file=sys.stderr)
    else:
        # Plain text, for a terminal too: lines that can be searched for, copied, and mailed.
        print(_printable_lines(str(summary)))
    return int(bool(summary.problems))


def _autoload(options: argparse.Namespace) -> int:
    state = {"on": autoload.on, "off": autoload.off, "status": autoload.status}[options.switch]()
    print(_printable_lines(str(state)))
    return 0


def _ray_env(options: argparse.Namespace) -> int:
    from . import ray

    text = options.base
    try:
        if text == "-":
            text = sys.stdin.read() if sys.stdin else ""  # None where it is closed
        base = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise UsageError(f"the runtime environment is no JSON ({error}): {text[:200]!r}") from error
    made = ray.runtime_env(base)
    if callable(made.get("worker_process_setup_hook")):
        raise UsageError(
            f"the runtime environment has a worker_process_setup_hook, {base['worker_process_setup_hook']}, and JSON "
            "cannot hold two: leave it out, and call rlhf_patches.site_hook.setup_ray_worker() in it, or merge the two "
            "in Python with rlhf_patches.ray.runtime_env()"
        )
    print(json.dumps(made))
    return 0


# --------------------------------------------------------------------------------------------- helpers


def _patch(name: str) -> Registered:
    registered, failures = plugins.load()
    for item in registered:
        if item.patch.name == name:
            return item
    nearest = settings.nearest(name, [item.patch.name for item in registered])
    raise UsageError(f"there is no patch {name!r}{nearest}{plugins.hint(failures)}")


def _print_json(report: Report) -> int:
    print(json.dumps([row.to_dict() for row in report], indent=2))
    _complain_of(report.plugin_failures)
    return 0


def _writable(path: str) -> str:
    """The report's path, if it can be written here: found out before the run, not after it."""
    try:
        report_file.try_out(path)
    except OSError as error:
        raise UsageError(f"--report {path} cannot be written: {error.strerror or error}") from error
    return path


def _complain_of_patches(report: Report, where: str = "") -> None:
    for row in report.problems:
        print(f"rlhf-patches: {where}{row.name} {row.status}: {row.why}", file=sys.stderr)


def _complain_of(failures: Sequence[PluginFailure]) -> None:
    for failure in failures:
        print(f"rlhf-patches: {_printable(str(failure))}", file=sys.stderr)


def _judgements(rows: Iterable[PatchReport]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("PATCH", "STATUS", "VERSION", "WHY"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.name, _coloured(row.status), _printable(row.version or "-"), row.why)
    return table


def _printable_lines(text: str) -> str:
    """`_printable`, of text whose lines and tabs are to stay."""
    return "\n".join("\t".join(map(_printable, line.split("\t"))) for line in text.split("\n"))


def _coloured(status: Status) -> Text:
    return Text(str(status), style=_COLOURS.get(status, ""))


def _console() -> Console:
    # No markup and no emoji names: most of what is printed comes from outside.
    # Piped output is read by programs and logs: no wrapping at 80 columns.
    return Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False, highlight=False)


def _hook_state() -> str:
    file = autoload.hook_file()
    if file is None:
        return "site hook: none (editable install); `rlhf-patches autoload on` writes one"
    problems = autoload.problems(file)
    if problems:
        return f"site hook: {file}, but {'; '.join(problems)}"
    if autoload.status().switched_on:
        return f"site hook: on for every process of this environment ({file})"
    return f"site hook: installed, active where RLHF_PATCHES_AUTOLOAD=1 ({file})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf-patches",
        description="Repairs known bugs of RLHF training stacks at run time.",
        epilog="examples:\n"
        "  rlhf-patches doctor                                 what would be patched here, and why\n"
        "  rlhf-patches diff megatron-forward-pre-hook-reentry the change, in your own installed source\n"
        "  rlhf-patches check verl==0.9.1                      the same for a release that is not installed\n"
        "  rlhf-patches run -- torchrun --nproc-per-node 8 train.py\n"
        "  rlhf-patches report run.jsonl                       was it the same in all of its processes?\n"
        "  rlhf-patches autoload on                            patch every process of this environment (images)\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlhf-patches {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, action: object, text: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(action=action)
        return command

    def add_output(command: argparse.ArgumentParser) -> None:
        form = command.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="in JSON, see docs/cli.md")
        form.add_argument("--quiet", action="store_true", help="nothing but what is wrong, on standard error")

    command = add("list", _list, "all patches, built-in and from plugins", "rlhf-patches list --json")
    command.add_argument("--json", action="store_true", help="a JSON list of objects, see docs/cli.md")
    command = add(
        "doctor",
        _doctor,
        "what each patch would do in this environment, and why",
        "rlhf-patches doctor || echo 'look above'",
    )
    add_output(command)
    command = add(
        "check",
        _check,
        "what each patch would do in a release, from its text alone; nothing of it is imported or run",
        "rlhf-patches check verl==0.9.1 megatron_core-0.16.1-cp311-cp311-linux_x86_64.whl ~/Megatron-LM",
    )
    command.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a wheel, an sdist, a directory, or NAME==VERSION (fetched with pip)",
    )
    add_output(command)
    command.add_argument("--cache", metavar="DIR", help="where fetched wheels stay (default: ~/.cache/rlhf-patches)")
    command = add("explain", _explain, "a patch's page", "rlhf-patches explain megatron-forward-pre-hook-reentry")
    command.add_argument("name", metavar="NAME")
    command = add(
        "diff", _diff, "what a patch changes in the source installed here", "rlhf-patches diff verl-no-sync-reentry"
    )
    command.add_argument("name", metavar="NAME")
    command = add(
        "run",
        _run,
        "run a command with the patches, in all of its Python processes",
        "rlhf-patches run --strict -- torchrun --nproc-per-node 8 train.py",
    )
    command.add_argument("--only", metavar="NAMES", help="names or globs, comma-separated: apply nothing else")
    command.add_argument("--disable", metavar="NAMES", help="names or globs, comma-separated: do not apply these")
    command.add_argument("--strict", action="store_true", help="a refused or failed patch stops the process")
    said = command.add_mutually_exclusive_group()
    said.add_argument(
        "--log",
        metavar="LEVEL",
        help="debug, info, warning, error, off; ':all' for every rank (default: one line, if anything is wrong)",
    )
    said.add_argument("--quiet", action="store_true", help="the same as --log off")
    command.add_argument("--report", metavar="FILE", help="each process keeps a line of JSON in this file")
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    command = add(
        "report",
        _report,
        "what became of the patches in all processes of a run, and which of them differ",
        "rlhf-patches run --report run.jsonl -- torchrun train.py; rlhf-patches report run.jsonl",
    )
    command.add_argument("file", nargs="+", metavar="FILE", help="what RLHF_PATCHES_REPORT named, of every host")
    add_output(command)
    command = add(
        "autoload",
        _autoload,
        "switch the site hook for this whole environment",
        "RUN rlhf-patches autoload on  # in a Dockerfile",
    )
    command.add_argument("switch", choices=("on", "off", "status"))
    command = add(
        "ray-env",
        _ray_env,
        "the runtime environment for `ray job submit`, as JSON",
        'ray job submit --runtime-env-json "$(rlhf-patches ray-env "$RUNTIME_ENV_JSON")" -- python3 train.py',
    )
    command.add_argument("base", nargs="?", default="{}", metavar="JSON", help="one to add to; '-' reads it from stdin")
    return parser


if __name__ == "__main__":
    sys.exit(main())
