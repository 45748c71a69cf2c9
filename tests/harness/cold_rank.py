"""What a launcher starts on each rank: ``cold_rank.py MODULE ARGUMENTS``, with the function ``main`` of that module.

It ends as the fork of a warm process does: after a failure gloo may be in the middle of a collective, whose threads
abort a process that shuts down.

In a fresh interpreter ``tests`` may not be importable, and nothing may be put on sys.path: see `bind`.
"""

from __future__ import annotations

import sys


def main() -> None:
    from warm_server import bind, call, finish

    sys.path.pop(0)  # this folder
    bind("tests")
    del sys.argv[0]
    finish(lambda: call(sys.argv[0]))


if __name__ == "__main__":
    main()
