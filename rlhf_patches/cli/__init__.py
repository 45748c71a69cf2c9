"""The command ``rlhf-patches``. It imports no framework, so it works on a login node without a GPU.

``prove`` imports frameworks in child processes only.

Exit status: 0: no problem. 1: a patch is refused or failed, a plugin is broken, the processes of a run differ,
``audit`` detected a bug or could not look up every entry, ``survey`` detected a wrong range, or ``prove`` a patch that
does not repair its bug. 2: the command line, a setting, a release given to ``check`` or read by ``survey``, or a file
given to ``report`` or ``audit`` is invalid, or ``prove`` could not run a requested proof.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from .. import settings
from .._version import __version__
from ..definitions.errors import DefinitionError
from . import output
from .command_line import INTERRUPTED, Commands, UsageError

# The module that declares each command. Only that module is loaded: loading all takes longer than most commands run.
_MODULES = {
    "list": "catalogue",
    "explain": "catalogue",
    "diff": "catalogue",
    "doctor": "judge",
    "check": "judge",
    "audit": "audit",
    "diagnose": "diagnose",
    "prove": "prove",
    "rehearse": "rehearse",
    "run": "run",
    "report": "run",
    "autoload": "environment",
    "ray-env": "environment",
    "try": "author",
    "fingerprint": "author",
    "new": "new",
    "survey": "survey",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Args:
        arguments: the command line's arguments; None means those of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(arguments)
    if not arguments:
        parser.print_help()
        return 0
    if arguments[0] not in _MODULES and not arguments[0].startswith("-"):
        output.complain(f"there is no command {arguments[0]!r}{settings.nearest(arguments[0], list(_MODULES))}")
        return 2
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # for example a terminal or pipe that supports ASCII only
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(options.action(options))
        sys.stdout.flush()  # here, where a closed pipe is not an error
        return status
    except (UsageError, DefinitionError, settings.SettingsError, *options.wrong) as error:
        output.complain(str(error))
        return 2
    except (RecursionError, MemoryError) as error:  # raised by a parser
        what = "is nested too deeply" if isinstance(error, RecursionError) else "exceeds the available memory"
        output.complain(f"{arguments[0]}: the input {what}")
        return 2
    except KeyboardInterrupt:  # commands write their files atomically, at the end
        output.complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `rlhf-patches list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``arguments`` begin with and of its module; all commands without a known one."""
    parser = argparse.ArgumentParser(
        prog="rlhf-patches",  # as `python -m rlhf_patches`, too
        description="Repairs known bugs of RLHF training frameworks at run time.",
        epilog="examples:\n"
        "  rlhf-patches doctor                                 what each patch would do here, and why\n"
        "  rlhf-patches diff trl-resume-order                  the change to your installed source\n"
        "  rlhf-patches check verl==0.9.1                      the same as doctor, for any release\n"
        "  rlhf-patches audit requirements.txt uv.lock         known bugs of the pinned versions\n"
        "  rlhf-patches prove                                  run each patch here: without it, then with it\n"
        "  rlhf-patches diagnose train.log                     the known bug behind an error\n"
        "  rlhf-patches rehearse -- python train.py            check the gradient of this run\n"
        "  rlhf-patches run -- torchrun --nproc-per-node 8 train.py\n"
        "  rlhf-patches report run.jsonl                       check that all processes of a run agree\n"
        "  rlhf-patches autoload on                            patch every process, for example in a container image\n"
        "  rlhf-patches try trl.trainer.utils:pad 'len($A)'    for your own patch: where a pattern matches\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlhf-patches {__version__}")
    commands = Commands(parser)
    wanted = [_MODULES[name] for name in arguments[:1] if name in _MODULES] or dict.fromkeys(_MODULES.values())
    for module in wanted:
        importlib.import_module(f".{module}", __name__).add(commands)
    return parser
