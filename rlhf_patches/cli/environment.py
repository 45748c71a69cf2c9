"""``autoload`` and ``ray-env``: the patches in every process of an environment or of a Ray job."""

from __future__ import annotations

import argparse
import json
import sys

from .. import autoload
from . import output
from .command_line import Commands, UsageError


def add(commands: Commands) -> None:
    """Declare the commands."""
    command = commands.add(
        "autoload",
        _autoload,
        "switch the site hook on or off for this whole environment",
        "RUN rlhf-patches autoload on  # in a Dockerfile",
        wrong=(autoload.AutoloadError,),
    )
    command.add_argument("switch", choices=("on", "off", "status"))
    command = commands.add(
        "ray-env",
        _ray_env,
        "print the runtime environment for `ray job submit`, as JSON",
        'ray job submit --runtime-env-json "$(rlhf-patches ray-env "$RUNTIME_ENV_JSON")" -- python3 train.py',
    )
    command.add_argument(
        "base", nargs="?", default="{}", metavar="JSON", help="the runtime environment to extend; '-': standard input"
    )


def _autoload(options: argparse.Namespace) -> int:
    state = {"on": autoload.on, "off": autoload.off, "status": autoload.status}[options.switch]()
    print(output.printable_lines(str(state)))
    return 0


def _ray_env(options: argparse.Namespace) -> int:
    from .. import ray  # loads the engine, which no other command needs

    text = options.base
    try:
        if text == "-":
            text = sys.stdin.read() if sys.stdin else ""  # None where it is closed
        base = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise UsageError(f"the runtime environment is not JSON ({error}): {text[:200]!r}") from error
    made = ray.runtime_env(base)
    if callable(made.get("worker_process_setup_hook")):
        raise UsageError(
            f"the runtime environment already has a worker_process_setup_hook, {base['worker_process_setup_hook']}, "
            "and JSON cannot hold two: remove it here and call rlhf_patches.site_hook.setup_ray_worker() in the hook, "
            "or merge the two in Python with rlhf_patches.ray.runtime_env()"
        )
    print(json.dumps(made))
    return 0
