"""What a launcher starts on each rank: ``torchrun_rank.py MODULE ARGUMENTS``, with the module's ``main``.

It ends as the fork of a fork server does: after a failure gloo may be in the middle of a collective, whose threads
abort a process that shuts down.

In a fresh interpreter ``tests`` may not be importable, and nothing may be put on sys.path: see `bind`.
"""

from __future__ import annotations

import sys


def main() -> None:
    from forkserver_process import bind, call, finish

    sys.path.pop(0)  # this folder
    bind("tests")
    del sys.argv[0]
    finish(lambda: call(sys.argv[0]))


if __name__ == "__main__":
    main()
