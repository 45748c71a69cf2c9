"""The requirements that setup.py and setup.cfg have as text. Nothing is run."""

from __future__ import annotations

import ast
import configparser
import warnings
from collections.abc import Iterator

from .pins import Entry, PinsError, Unread, of_requirement

_LARGEST = 2**18
_NEXT = "run `pip freeze | rlhf-patches audit -` where it is installed"


def read(text: str, place: str, is_python: bool) -> Iterator[Entry]:
    """The requirements of the project and its extras.

    Raises:
        PinsError: the file is too long, or is no Python or no configuration.
    """
    if len(text) > _LARGEST:
        raise PinsError(f"{place} has more than 256 KiB, the limit for its format")
    try:
        yield from _of_python(text, place) if is_python else _of_cfg(text, place)
    except RecursionError as error:
        raise PinsError(f"{place} is nested too deeply") from error


def _of_cfg(text: str, place: str) -> Iterator[Entry]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise PinsError(f"{place} is not a valid configuration: {' '.join(str(error).split()):.200}") from error
    lists = [("", parser.get("options", "install_requires", fallback=""))]
    if parser.has_section("options.extras_require"):
        lists += [(f"extra {name}", value) for name, value in parser.items("options.extras_require")]
    numbers = {line.strip(): number for number, line in reversed([*enumerate(text.splitlines(), 1)])}
    for note, value in lists:
        for line in filter(None, map(str.strip, value.splitlines())):
            where = f"{place}:{numbers[line]}" if line in numbers else place
            if line.startswith("file:"):
                yield Unread(where, f"{line!r:.100} is not read: pass that file, too")
            else:
                yield from of_requirement(line, where, note)


def _of_python(text: str, place: str) -> Iterator[Entry]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PinsError(f"{place} is not valid Python: {error or type(error).__name__}") from error
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("setup"):
            for keyword in call.keywords:
                if keyword.arg in ("install_requires", "extras_require"):
                    yield from _of_value(keyword.value, names, place, "")
                elif keyword.arg is None:
                    yield Unread(f"{place}:{call.lineno}", f"setup(**...) is computed: {_NEXT}")


def _of_value(node: ast.expr, names: dict[str, ast.expr], place: str, note: str, depth: int = 0) -> Iterator[Entry]:
    """The requirements of a list, of a name for one, of a sum of lists, or of a dictionary of extras."""
    if isinstance(node, ast.Name) and node.id in names and depth < 8:
        yield from _of_value(names[node.id], names, place, note, depth + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        for line in filter(None, map(str.strip, node.value.splitlines())):
            yield from of_requirement(line, f"{place}:{node.lineno}", note)
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for item in node.elts:
            yield from _of_value(item, names, place, note, depth)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _of_value(node.left, names, place, note, depth)
        yield from _of_value(node.right, names, place, note, depth)
    elif isinstance(node, ast.Starred):
        yield from _of_value(node.value, names, place, note, depth)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            extra = f"extra {key.value!s}" if isinstance(key, ast.Constant) else "an extra"
            yield from _of_value(value, names, place, extra, depth)
    else:
        yield Unread(f"{place}:{node.lineno}", f"{ast.unparse(node)[:80]!r} is computed: {_NEXT}")
