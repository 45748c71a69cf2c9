"""The command ``rlhf-patches``. No framework is imported: it works on a login node without a GPU.

What ``prove`` tries imports them, in processes of its own.

Exit status: 0 all well, 1 a patch is refused or failed, a plugin is broken, the processes of a run differ, ``audit``
has found a bug or could not look up all that was named, ``survey`` has found a range that is wrong, ``prove`` a patch
that does not repair, 2 the command line, a setting, a release given to ``check`` or looked at by ``survey``, or a file
given to ``report`` or ``audit`` is wrong, or ``prove`` could not try what it was asked to.
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

# Which module declares a command: only that one is loaded, for all of them take longer than what most commands do.
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
        arguments: those of the command line; None means this process's.
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
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or pipe that knows ASCII only, say
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(options.action(options))
        sys.stdout.flush()  # here, where a reader that has gone is not an error
        return status
    except (UsageError, DefinitionError, settings.SettingsError, *options.wrong) as error:
        output.complain(str(error))
        return 2
    except (RecursionError, MemoryError) as error:  # of a parser's: of what was read no more can be said
        what = "is nested too deeply" if isinstance(error, RecursionError) else "takes more memory than there is"
        output.complain(f"{arguments[0]}: what was read {what}")
        return 2
    except KeyboardInterrupt:  # a command that writes puts its files in place at once, at its end
        output.complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `rlhf-patches list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """With the command that these begin with, and its neighbours; with all of them where they begin with none."""
    parser = argparse.ArgumentParser(
        prog="rlhf-patches",  # as `python -m rlhf_patches`, too
        description="Repairs known bugs of RLHF training stacks at run time.",
        epilog="examples:\n"
        "  rlhf-patches doctor                                 what would be patched here, and why\n"
        "  rlhf-patches diff megatron-core-forward-pre-hook-reentry the change, in your own installed source\n"
        "  rlhf-patches check verl==0.9.1                      the same for a release that is not installed\n"
        "  rlhf-patches audit requirements.txt uv.lock         which known bugs these versions have\n"
        "  rlhf-patches prove                                  try each of them here: without it, then with it\n"
        "  rlhf-patches diagnose train.log                     which known bug an error is\n"
        "  rlhf-patches rehearse -- python train.py            is the gradient of this very run right?\n"
        "  rlhf-patches run -- torchrun --nproc-per-node 8 train.py\n"
        "  rlhf-patches report run.jsonl                       was it the same in all of its processes?\n"
        "  rlhf-patches autoload on                            patch every process of this environment (images)\n"
        "  rlhf-patches try trl.trainer.utils:pad 'len($A)'    for a patch of your own: where its code is\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlhf-patches {__version__}")
    commands = Commands(parser)
    wanted = [_MODULES[name] for name in arguments[:1] if name in _MODULES] or dict.fromkeys(_MODULES.values())
    for module in wanted:
        importlib.import_module(f".{module}", __name__).add(commands)
    return parser
