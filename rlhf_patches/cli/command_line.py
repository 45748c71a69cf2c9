"""Shared by the groups of commands: how to declare a command, and the exception for a wrong command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""


class UsageError(Exception):
    """The command line is invalid."""


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
            action: runs the command with the parsed options; returns the exit status.
            text: what the command does, a phrase.
            example: a line for the command's help.
            wrong: exceptions that this command, unlike others, raises for invalid input; each has a message for users.

        Returns:
            the command's parser, to add arguments to.
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
    """Let the command line end with a command of the user."""
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def given_command(options: argparse.Namespace, name: str) -> list[str]:
    """The user's command; see `add_command`.

    Raises:
        UsageError: no command follows ``name``.
    """
    command: list[str] = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError(f"{name} needs a command: rlhf-patches {name} -- torchrun --nproc-per-node 8 train.py")
    return command


def add_output(command: argparse.ArgumentParser, formats: Sequence[str] = ()) -> None:
    """Add ``--json`` and ``--quiet``; with ``formats``, the first of which is the default, also ``--format``."""
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, see docs/cli.md")
    form.add_argument("--quiet", action="store_true", help="print problems only, on standard error")
    if formats:
        form.add_argument(
            "--format", choices=formats, default=formats[0], help="see docs/cli.md; json is the same as --json"
        )
