"""Run a command as a child process: forward signals to it, and end as it ends.

The child is in the same process group and session, so a terminal's signals reach it directly. If this process is
killed, the child is killed too (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Mapping
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80  # sent by a terminal, which sends it to the child, too
# Signals that cannot be caught, and signals that the system sends because of a process's own actions.
_OWN = {"SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCONT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}


class CannotExecute(Exception):
    """The system cannot execute the command; the message has the reason."""


def run(program: str, command: list[str], environment: Mapping[str, str]) -> int:
    """Run a command until it ends.

    Args:
        program: the command's file.
        command: the command's arguments, including argument zero.
        environment: all environment variables of the command.

    Returns:
        the command's exit status, or minus the number of the signal that ended it.

    Raises:
        CannotExecute: the file is not executable.
    """
    if not hasattr(signal, "sigwaitinfo"):  # not Linux: the command takes this process's place
        try:
            os.execve(program, command, environment)
        except OSError as error:
            raise CannotExecute(error.strerror) from error
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the exit status is lost
    forwarded = {int(number) for number in signal.valid_signals() if _name(number) not in _OWN}
    # Wait for signals instead of handling them: none is lost between two calls. The child gets the original mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    try:
        end, other = os.pipe()  # a successful exec closes both
        parent, child = os.getpid(), os.fork()
        if not child:
            os.close(end)
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
            _execute(other, parent, program, command, environment, mask)
        os.close(other)
        with open(end) as pipe:
            problem = pipe.read()
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            _forward(child, forwarded)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if problem:
        raise CannotExecute(problem)
    return os.waitstatus_to_exitcode(status)


def end_as(status: int) -> int:
    """End this process as its child ended: by the same signal, or with the returned status."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _execute(
    pipe: int, parent: int, program: str, command: list[str], environment: Mapping[str, str], mask: Iterable[int]
) -> NoReturn:
    try:
        with contextlib.suppress(OSError, AttributeError):  # not Linux
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(program, command, environment)
    except OSError as error:
        os.write(pipe, (error.strerror or str(error)).encode())
    finally:
        os._exit(126)


def _forward(child: int, forwarded: set[int]) -> None:
    """Wait for a signal: the child's end, or one to forward."""
    got = signal.sigwaitinfo(forwarded)
    if got.si_signo != signal.SIGCHLD and got.si_code != _SI_KERNEL:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, got.si_signo)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
