"""Code objects that pass a call on to our implementation, for `Replace` and `Wrap`.

A trampoline has the parameters of the function that it replaces, so defaults, ``inspect.signature`` and bound arguments
do not change. It looks up our implementation under a private name in the function's globals (a constant would be
faster, but torch.compile cannot trace it). The name stays there after a revert: another thread may have entered the
trampoline before the lookup.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from ..guards import decision

_numbers = itertools.count(1)


def build(
    function: FunctionType,
    code: CodeType,
    implementation: Callable[..., Any],
    *,
    wraps: bool,
    binding: str,
    by: str,
    first: str = "",
) -> CodeType:
    """Build a trampoline's code for ``function``, and put its implementation into the function's globals.

    Args:
        function: the function whose ``__code__`` the result replaces.
        code: the code that a `Wrap` wraps: the function's own, with its patches.
        implementation: called with the same arguments (`Replace`), or as ``(wrapped, instance, args, kwargs)``.
        wraps: whether the implementation is a `Wrap`'s.
        binding: ``function``, ``method``, ``classmethod`` or ``staticmethod``.
        by: the patch's name, shown in tracebacks.
        first: the first statement of the trampoline.

    Raises:
        CannotApply: it is an asynchronous generator.
    """
    decision.check_kind(code, function.__qualname__)
    name = f"__rlhf_patches_{next(_numbers)}"
    parameters, positional, keywords = _parameters(code)
    namespace = function.__globals__
    if wraps:
        original = namespace[f"{name}_original"] = _copy(function, code)
        namespace[f"{name}_original_of_none"] = functools.partial(original, None)
        wrapped, instance, positional = _bound(f"{name}_original", positional, binding)
        call = f"{name}({wrapped}, {instance}, ({''.join(f'{p}, ' for p in positional)}), {{{', '.join(keywords)}}})"
    else:
        call = f"{name}({', '.join([*positional, *(k if k.startswith('**') else _as_argument(k) for k in keywords)])})"
    if code.co_flags & inspect.CO_GENERATOR:
        call = f"(yield from {call})"
    elif code.co_flags & inspect.CO_COROUTINE:
        call = f"await {call}"
    namespace[name] = implementation
    return _compile(function, code, name, parameters, call, by, first)


def _parameters(code: CodeType) -> tuple[str, list[str], list[str]]:
    """Return the parameter list, the positional arguments to pass on, and keyword arguments as items of a dict."""
    names = code.co_varnames
    count, only = code.co_argcount, code.co_kwonlyargcount
    plain, keyword_only = list(names[:count]), list(names[count : count + only])
    rest = list(names[count + only :])
    parameters, positional = list(plain), list(plain)
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        star = "*" + rest.pop(0)
        parameters.append(star)
        positional.append(star)
    elif keyword_only:
        parameters.append("*")
    parameters += keyword_only
    keywords = [f'"{name}": {name}' for name in keyword_only]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        double = "**" + rest.pop(0)
        parameters.append(double)
        keywords.append(double)
    return ", ".join(parameters), positional, keywords


def _as_argument(item: str) -> str:
    name = item.partition(":")[2].strip()
    return f"{name}={name}"


def _copy(function: FunctionType, code: CodeType) -> FunctionType:
    """Return the original as a separate function object: the swapped one would call the trampoline."""
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(original, function)
    del original.__wrapped__  # type: ignore[attr-defined]
    return original


def _bound(original: str, positional: list[str], binding: str) -> tuple[str, str, list[str]]:
    """Return as source text the bound original, the instance, and the positional arguments without the instance."""
    if binding not in ("method", "classmethod"):
        return original, "None", positional
    first, *rest = positional
    if first.startswith("*"):  # def method(*args)
        first, rest = f"{first[1:]}[0]", [f"{first}[1:]"]
    # A method that is called on its class may receive None, which cannot be bound. Not types.MethodType, which
    # torch.compile cannot trace.
    wrapped = f"({original}.__get__({first}) if {first} is not None else {original}_of_none)"
    return wrapped, first, rest


def _compile(
    function: FunctionType, code: CodeType, name: str, parameters: str, call: str, by: str, first: str
) -> CodeType:
    prefix = "async def" if code.co_flags & inspect.CO_COROUTINE else "def"
    identifier = code.co_name if code.co_name.isidentifier() else "trampoline"
    lines = [f"def enclosing({', '.join(code.co_freevars)}):", f"    {prefix} {identifier}({parameters}):"]
    if code.co_freevars:
        # The same free variables: otherwise assigning __code__ would bind the wrong cells. Never executed.
        lines.append(f"        if 0: {', '.join(code.co_freevars)}")
    lines += [f"        {first}"] * bool(first)
    lines.append(f"        return {call}")
    text = "\n".join(lines) + "\n"
    filename = f"<rlhf_patches {by}: {function.__module__}:{function.__qualname__} {name[len('__rlhf_patches_') :]}>"
    # Tracebacks and inspect.getsource then show the trampoline with the patch's name.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module_code = compile(text, filename, "exec", dont_inherit=True)
    (enclosing,) = (c for c in module_code.co_consts if isinstance(c, CodeType))
    (trampoline,) = (c for c in enclosing.co_consts if isinstance(c, CodeType))
    changes: dict[str, Any] = {"co_name": code.co_name}
    if hasattr(code, "co_qualname"):
        changes["co_qualname"] = code.co_qualname
    return trampoline.replace(**changes)
