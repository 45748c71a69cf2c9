"""By which names a model's forward reaches what a rewrite puts into it.

The text of a rewrite imports what it uses by a call of `__import__`, which torch.compile cannot trace: a forward that
compiled with `fullgraph=True` would no longer. There the function's globals have it, as they have what counts.
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
    """The edits of a function; a forward's with names that its globals now have."""
    if function.__code__.co_name != _TRACED:
        return [*edits]

    def named(call: re.Match[str]) -> str:
        module, attribute = call.groups()
        name = f"_rlhf_patches_{module}_{attribute}".replace(".", "_")
        function.__globals__[name] = _reached(module, attribute)
        return name

    return [edit._replace(text=_IMPORTED.sub(named, edit.text)) for edit in edits]


def _reached(module: str, attribute: str) -> Any:
    """The function; or one that imports it when it is called, as the text would: what it needs may not be there yet."""
    found = getattr(sys.modules.get(module), attribute, None)
    if found is not None:
        return found
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(_LATER.format(module=module, attribute=attribute), __file__, "exec"), scope)
    return scope[attribute]
