"""What the groups of commands share: how a command is declared, and what a wrong command line raises."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

INTERRUPTED = 130
"""The status after Ctrl-C, as shells have it."""


class UsageError(Exception):
    """The command line asks for something that cannot be."""


class Commands:
    """The parser's commands, each with its help and an example."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        self,
        name: str,
        action: Callable[[argparse.Namespace], int],
        text: str,
        example: str,
        wrong: tuple[type[Exception], ...] = (),
    ) -> argparse.ArgumentParser:
        """Add a command.

        Args:
            name: what the user types.
            action: runs it with the parsed options; returns the exit status.
            text: what it does, a phrase.
            example: a line for its help.
            wrong: what it raises, besides what every command may, where the user's input is wrong: a message.

        Returns:
            its parser, for its arguments.
        """
        command = self._commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(action=action, wrong=wrong)
        return command


def add_command(command: argparse.ArgumentParser) -> None:
    """Let a command end with one of the user's."""
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def given_command(options: argparse.Namespace, name: str) -> list[str]:
    """The user's command, of `add_command`.

    Raises:
        UsageError: there is none after ``name``.
    """
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError(f"{name} needs a command: rlhf-patches {name} -- torchrun --nproc-per-node 8 train.py")
    return command


def add_output(command: argparse.ArgumentParser, formats: Sequence[str] = ()) -> None:
    """Give a command ``--json`` and ``--quiet``; with ``formats``, whose first is the default, ``--format`` too."""
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="in JSON, see docs/cli.md")
    form.add_argument("--quiet", action="store_true", help="nothing but what is wrong, on standard error")
    if formats:
        form.add_argument("--format", choices=formats, default=formats[0], help="see docs/cli.md; json is --json")
