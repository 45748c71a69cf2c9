"""As much of YAML as the configuration files of a run have: mappings in blocks, a scalar a line. The rest is refused.

PyYAML is no dependency; and where a file means something else than it seems to, a bug would be hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_KEY = re.compile(r"""( *)(?:([A-Za-z_][\w./-]*)|"([\w./ -]+)"|'([\w./ -]+)')\s*:(?:[ \t]+(.*))?""", re.ASCII)
_QUOTED = re.compile(r"""(?:"([^"\\]*)"|'([^']*)')(?:\s+#.*)?""")
_WHOLE = re.compile(r"(0|[1-9][0-9]{0,9})(?:\.0)?")
_UNCLEAR = re.compile(r"[-+.0-9].*|~|null|Null|NULL")


class RunConfigError(Exception):
    """A configuration file cannot be read; the message says which, where and why."""


@dataclass
class _Open:
    """A key whose mapping or list is being read: where it begins, and where what is within it does."""

    indent: int
    key: str
    within: int | None = None
    is_list: bool = False


def read(text: str, place: str) -> Iterator[tuple[str, str | int | None, int]]:
    """Each key with its dots, its value and its line; None for a value that is no plain word or whole number.

    Raises:
        RunConfigError: a line is something else.
    """
    stack = [_Open(-1, "")]
    seen = set[str]()
    is_text = False  # these are text
    skipped = -1  # lines that are indented more belong to a value that is not read
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        indent = len(line) - len(line.lstrip(" "))
        if not bare or bare.startswith("#") or (number == 1 and bare == "---"):
            continue
        if 0 <= skipped < indent:
            if not is_text and not _ends_in_its_line(bare):
                raise _refused(place, number, bare)
            continue
        is_text = False
        item = bare.startswith("- ")
        # A list may begin where its key does.
        while stack[-1].indent >= indent + item:
            stack.pop()
        above = stack[-1]
        if above.within is None:
            above.within, above.is_list = indent, item and len(stack) > 1
        found = _KEY.fullmatch(line.rstrip())
        fits = above.within == indent and above.is_list == item
        if fits and item and _ends_in_its_line(bare):
            skipped = indent
            continue
        skipped = -1
        key = (found[2] or found[3] or found[4]) if found else ""
        name = ".".join([*(each.key for each in stack[1:]), key])
        if found is None or item or not fits or name in seen:
            raise _refused(place, number, bare)
        seen.add(name)
        value = re.split(r"(?:^|[ \t])#", found[5] or "", maxsplit=1)[0].strip()
        if value[:1] in "\"'" and value:
            value = (found[5] or "").strip()
        if not value:
            stack.append(_Open(indent, key))
            continue
        if value[0] in "|>":
            skipped, is_text = indent, True
        elif not _ends_in_its_line(value):
            raise _refused(place, number, bare)
        yield name, _scalar(value), number


def _refused(place: str, number: int, line: str) -> RunConfigError:
    return RunConfigError(
        f"{place}:{number}: {line[:100]!r} is not read: expected YAML with a key and a plain value a line, each once; "
        "give the file as JSON (python -c 'import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)' "
        "< FILE)"
    )


def _ends_in_its_line(text: str) -> bool:
    """Whether no quotation and no bracket goes on, which may at any indent."""
    quote, brackets, before, escaped = "", 0, "", False
    for character in text:
        if escaped:
            escaped = False
        elif quote:
            escaped = character == "\\" and quote == '"'
            quote = "" if character == quote else quote
        elif character in "\"'" and not before.isalnum():
            quote = character
        else:
            brackets += (character in "[{") - (character in "]}")
        before = character
    return not quote and not brackets


def _scalar(text: str) -> str | int | None:
    quoted = _QUOTED.fullmatch(text)
    if quoted is not None:
        return quoted[1] if quoted[1] is not None else quoted[2]
    number = _WHOLE.fullmatch(text)
    if number is not None:
        return int(number[1])
    return None if text[0] in "\"'[{|>&*!%@`?," or _UNCLEAR.fullmatch(text) else text
