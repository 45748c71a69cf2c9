"""The names by which a model's forward uses the objects of a rewrite.

The text of a rewrite imports its objects by a call of `__import__`, which torch.compile cannot trace: a forward that
compiles with `fullgraph=True` would fail. For a forward, the function's globals hold the objects instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from ..guards.edits import Edit

_TRACED = "forward"
_IMPORTED = re.compile(r'__import__\("([\w.]+)", fromlist=\("\*",\)\)\.(\w+)(?=\()')
_LATER = """\
def {attribute}(*arguments, **options):
    from {module} import {attribute}
    return {attribute}(*arguments, **options)
"""


def by_name(function: FunctionType, edits: Iterable[Edit]) -> list[Edit]:
    """Return the edits of a function; for a forward, with names that are added to its globals."""
    if function.__code__.co_name != _TRACED:
        return [*edits]

    def named(call: re.Match[str]) -> str:
        module, attribute = call.groups()
        name = f"_rlhf_patches_{module}_{attribute}".replace(".", "_")
        function.__globals__[name] = _reached(module, attribute)
        return name

    return [edit._replace(text=_IMPORTED.sub(named, edit.text)) for edit in edits]


def _reached(module: str, attribute: str) -> Any:
    """Return the function; or one that imports it on call, since its module may not be importable yet."""
    value = getattr(sys.modules.get(module), attribute, None)
    if value is not None:
        return value
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(_LATER.format(module=module, attribute=attribute), __file__, "exec"), scope)
    return scope[attribute]
