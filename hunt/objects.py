"""What a user holds, in words: types, identities and what hangs on them, so that two runs can be compared."""

from __future__ import annotations

from typing import Any

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def name_of(value: Any) -> str:
    """Its type, with the module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def described(held: dict[str, Any]) -> dict[str, str]:
    """One text for each object, and for each module of a model: its type, attributes, hooks, and bound functions."""
    found = {}
    for name, value in held.items():
        found[name] = _words(value)
        if hasattr(value, "named_modules"):
            found |= {f"{name}.{path}": _words(module) for path, module in value.named_modules() if path}
    return found


def identities(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Of each name: whether it is still the same object."""
    return {f"{name} is": str(before[name] is after.get(name)) for name in before}


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(map(name_of, value))}"
    own = vars(value) if hasattr(value, "__dict__") else {}
    hooks = {name: [_function(hook) for hook in own[name].values()] for name in HOOKS if own.get(name)}
    # What a method's place is taken by, `forward` above all, stands in the object's own dictionary.
    functions = {name: _function(item) for name, item in own.items() if callable(item) and not name.startswith("__")}
    return f"{name_of(value)}, attributes {sorted(own)}, hooks {hooks}, functions {sorted(functions.items())}"


def _function(value: Any) -> str:
    own = getattr(value, "__qualname__", None) or name_of(value)
    return f"{getattr(value, '__module__', '')}.{own}"
