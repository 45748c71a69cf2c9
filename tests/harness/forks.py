"""An interpreter that has loaded something once and forks for each question: fresh processes, at the cost of a fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

_SERVER = """\
import json, os, sys
code = compile(sys.argv[1], "<forked>", "exec")
exec(sys.argv[2], globals())
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        folder, *sys.argv[1:] = json.loads(line)
        os.chdir(folder)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(f"\\n{status}", flush=True)
    print("END", flush=True)
else:
    sys.exit()
sys.stdin = open(os.devnull)
exec(code, globals())
"""


class Answer(NamedTuple):
    """What became of a process, and what it printed, on standard error as well."""

    status: int
    said: str


class Forks:
    """Runs ``code`` in forks of an interpreter that has run ``first``; each has arguments of its own.

    What hangs has to end itself: ``code`` sets its limits, a ``signal.alarm`` among them.
    """

    def __init__(self, first: str, code: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, code, first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> Answer:
        """One process, in the working directory of this one."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([os.getcwd(), *arguments]) + "\n")
        self._server.stdin.flush()
        lines: list[str] = []
        while (line := self._server.stdout.readline()) != "END\n":
            assert line, f"the interpreter itself has ended: {''.join(lines)}"
            lines.append(line)
        return Answer(int(lines[-1]), "".join(lines[:-1]).removesuffix("\n"))

    def close(self) -> None:
        """End the interpreter."""
        self._server.communicate()
