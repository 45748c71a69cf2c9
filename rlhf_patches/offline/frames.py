"""The frames of a traceback in a log, as Python, IPython, Colab and rich print them; and whose function failed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_LONGEST_PATH = 500
_LONGEST_NAME = 200
_LONGEST_BOX = 1000
_PYTHON = re.compile(r'[\s|>]*File "([^"\n]+)", line \d+, in (\S+)')
# File /x/y.py:528, in GRPOTrainer.__init__(self, ...); /x/y.py in __init__(self); Colab has a link behind the path
_NOTEBOOK = re.compile(
    r"(?:File )?\[?((?:[A-Za-z]:)?[~/\\][^\s:()\]]{1,400}|<ipython-input[^>\s]{1,99}>)\]?(?:\(https?://[^\s)]{1,99}\))?"
    r"(?::\d{1,9})?,? in ([\w.<>]{1,200})"
)
_NOTEBOOK_MODULE = re.compile(r"File ((?:[A-Za-z]:)?[~/\\][^\s:()]{1,400}\.py):\d{1,9}$")
_CELL = re.compile(r"(?:Cell |Input )?In ?\[\d{1,6}\],? (?:line \d{1,9}|in )")
_BOX_FRAME = re.compile(r"(\S.{0,4000}?):\d{1,9} in (\S{1,200})$")
_STANDARD_LIBRARY = re.compile(r".*/lib(?:64)?/python\d[\d.]{0,5}t?/|/[A-Za-z]:/.*/Lib/")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")


# What these functions do not do themselves they pass on: the model within, or torch's own function.
_FORWARDS = ("__getattr__", "__torch_function__", "__torch_dispatch__")


class Frame(NamedTuple):
    """One line of a traceback or a stack."""

    file: str
    function: str


def shortened(file: str, function: str) -> Frame:
    """A frame of limited size."""
    return Frame(file[-_LONGEST_PATH:], function[:_LONGEST_NAME])


class Reader:
    """Reads the frames of one stream, of which rich may split one over several lines."""

    def __init__(self) -> None:
        self._begun = ""  # the beginning of a frame in a box

    def read(self, text: str, active: bool) -> Frame | None:
        """The frame that a line has or completes.

        Args:
            text: the line.
            active: whether a traceback has begun.
        """
        if 'File "' in text and (match := _PYTHON.match(text)):
            return shortened(match[1], match[2])
        if not active and not text.startswith("File "):
            return None
        match = _NOTEBOOK.match(text) if " in " in text else None
        match = match or (_NOTEBOOK_MODULE.match(text) if text.startswith("File ") else None)
        if match:
            return shortened(match[1], match[2] if match.lastindex == 2 else "<module>")
        if _CELL.match(text):
            return Frame("<cell>", "<module>")
        return self._of_box(text)

    def _of_box(self, text: str) -> Frame | None:
        begun, self._begun = self._begun, ""
        text = text.rstrip()
        if not text.startswith(("│ ", "| ")) or not text.endswith(("│", "|")):
            return None
        boxed = text[2:-1].strip()[:_LONGEST_BOX] if text[2:3] != " " else ""
        for line in (f"{begun}{boxed}", f"{begun} {boxed}"):
            if line[:1] in ("/", "~") and (match := _BOX_FRAME.match(line)):
                return shortened(match[1], match[2])
        if not begun and boxed[:1] in ("/", "~"):
            self._begun = boxed
        return None


def is_at(target: str, frame: Frame) -> bool:
    """Whether a frame is in a function, ``module:qualified.name``."""
    name = target.partition(":")[2]
    function = frame.function.replace(".<locals>", "")  # IPython's has its class, Python's has not
    same = function == name if "." in function else function == name.rpartition(".")[2]
    return same and is_of_module(target, frame)


def is_of_module(target: str, frame: Frame) -> bool:
    """Whether a frame is in the module of a function."""
    path = "/" + target.partition(":")[0].replace(".", "/")
    return ("/" + frame.file.replace("\\", "/")).endswith((f"{path}.py", f"{path}/__init__.py"))


def through(targets: Iterable[str], frames: Sequence[Frame]) -> bool:
    """Whether one of the frames is in one of the functions."""
    return any(is_at(target, frame) for target in targets for frame in frames)


def failing(frames: Sequence[Frame], neutral: Collection[str] = ("torch",)) -> Frame | None:
    """The innermost frame that is neither a neutral package's nor the standard library's; the outermost comes first."""
    return next((frame for frame in reversed(frames) if not _is_neutral(frame, neutral)), None)


def fails_within(targets: Iterable[str], frames: Sequence[Frame]) -> bool:
    """Whether one of the functions failed, by itself or in its own package, and not in other code that it called.

    torch and the standard library do not count as other code: they raise what their caller does wrong.
    """
    for target in targets:
        places = [number for number, frame in enumerate(frames) if is_at(target, frame)]
        last = failing(frames[places[-1] + 1 :]) if places else None
        if places and (last is None or is_of(target, last)):
            return True
    return False


def is_of(target: str, frame: Frame) -> bool:
    """Whether a frame is in the package of a function."""
    package = target.partition(":")[0].partition(".")[0]
    file = "/" + frame.file.replace("\\", "/")
    installed = _INSTALLED.match(file)
    return installed[1] == package if installed else f"/{package}/" in file


def _is_neutral(frame: Frame, packages: Collection[str]) -> bool:
    if frame.function.rpartition(".")[2] in _FORWARDS:
        return True
    file = "/" + frame.file.replace("\\", "/")
    installed = _INSTALLED.match(file)
    package = installed[1] if installed else file.split("/", 2)[1]  # py-spy's path begins with the package
    return package in packages or (
        installed is None and (file.startswith("/<frozen ") or _STANDARD_LIBRARY.match(file) is not None)
    )
