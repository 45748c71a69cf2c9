"""Static checks of a patch's code: unbounded waits, and writes to the user's objects.

A comment justifies an exception, on the line, the line above, or the function's ``def``: ``# waits: ...``,
``# writes: ...``. A decision by names, a stack or autograd's graph needs ``# known: ...`` with the reason, or the
module ``# known here: ...``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..definitions.bug import KnownBug
from ..definitions.changes import Wrap
from ..guards import sources
from ..guards.places import FunctionNode
from . import arguments, reach
from .reach import Module


@dataclass(frozen=True, order=True)
class Finding:
    """A place in the code and its problem."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def waits(patch: KnownBug) -> list[Finding]:
    """The places where a patch's code may wait forever without a comment that justifies it."""
    pieces = reach.pieces(patch)
    locks = {name for piece in pieces for name in _locks(piece.node)}
    modules = {piece.module.source.filename: piece.module for piece in pieces}.values()
    locks |= {name for module in modules for n in _all(module) for name in _locks(n)}
    contexts = {name for module in modules for n in _all(module) for name in _made_by(n, {"ContextVar"})}
    return sorted(
        {
            Finding(piece.module.source.filename, node.lineno, what)
            for piece in pieces
            for node in ast.walk(piece.node)
            for what in _waits_in(node, locks, contexts)
            if isinstance(node, (ast.expr, ast.stmt)) and not _explained(piece.module, node, "waits")
        }
    )


def writes(patch: KnownBug) -> list[Finding]:
    """The places where a patch's code may write to its arguments without a comment that justifies it."""
    findings = {
        Finding(piece.module.source.filename, node.lineno, what)
        for piece in reach.pieces(patch)
        for node in ast.walk(piece.node)
        if isinstance(node, (ast.expr, ast.stmt)) and (what := _known_to_write(node))
        if not _explained(piece.module, node, "writes")
    }
    return sorted(findings | _to_what_is_given(patch))


def inferences(patch: KnownBug) -> list[Finding]:
    """The places where a patch's code decides by a name, a signature, a stack or autograd's graph.

    None of these is certain: code without a name may do the same under another name.
    """
    return sorted({finding for finding, _ in _inferences(patch)})


def unknown(patch: KnownBug) -> list[Finding]:
    """The `inferences` without a comment that justifies them."""
    return sorted({finding for finding, is_explained in _inferences(patch) if not is_explained})


def _inferences(patch: KnownBug) -> Iterator[tuple[Finding, bool]]:
    for piece in reach.pieces(patch):
        of_all = re.search(r"(?m)^# known here: \S+ \S", piece.module.source.text) is not None
        for node in ast.walk(piece.node):
            if isinstance(node, ast.expr) and (what := _inferred_from(node)):
                finding = Finding(piece.module.source.filename, node.lineno, what)
                yield finding, of_all or _explained(piece.module, node, "known")


def attributes(patch: KnownBug) -> set[str]:
    """The names of attributes that a patch's code sets on objects other than ``self``."""
    names = set()
    for piece in reach.pieces(patch):
        for node in ast.walk(piece.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _last(node.value) not in _OWN:
                names.add(node.attr)
            elif isinstance(node, ast.Call) and _last(node.func) == "setattr" and len(node.args) == 3:
                names |= _constants(piece.module, node.args[1])
    return names


def _constants(module: Module, node: ast.expr) -> set[str]:
    """The text of an expression, or of the module's constant with this name."""
    named = module.defined.get(node.id, []) if isinstance(node, ast.Name) else []
    values = [each.value for each in named if isinstance(each, (ast.Assign, ast.AnnAssign))]
    return {each.value for each in (node, *values) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _all(module: Module) -> Iterator[ast.stmt]:
    for each in module.defined.values():
        yield from each


_NAMES = {"__name__", "__qualname__", "__module__"}
_CODE = re.compile(r"__code__|co_(names|varnames|consts|freevars)|_getframe|f_back|grad_fn|next_functions")
_INSPECTS = {"signature", "getsource", "getsourcelines", "getclosurevars", "currentframe", "stack"}


def _inferred_from(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        asked = _CODE.fullmatch(node.attr) or (node.attr in _INSPECTS and _last(node.value) == "inspect")
        return f"`{ast.unparse(node)}` is asked" if asked else None
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and _last(node.func) in ("startswith", "endswith", "match", "fullmatch"):
        sides = [node]
    names = {each.attr for side in sides for each in ast.walk(side) if isinstance(each, ast.Attribute)} & _NAMES
    return f"`{ast.unparse(node)}` goes by a name" if names else None


def _explained(module: Module, node: ast.expr | ast.stmt, word: str) -> bool:
    explanation = re.compile(rf"#\s*{word}:\s*\S+ \S")
    lines = module.source.text.split("\n")
    around = [
        each
        for each in ast.walk(sources.parse(module.source))
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
        if each.lineno <= node.lineno <= (each.end_lineno or each.lineno)
    ]
    for place in [node, *sorted(around, key=lambda each: -each.lineno)[:1]]:
        first = min([place.lineno, *(each.lineno for each in getattr(place, "decorator_list", []))])
        last = place.end_lineno or place.lineno
        if isinstance(place, (ast.With, ast.AsyncWith, ast.For, ast.FunctionDef, ast.AsyncFunctionDef)):
            last = place.body[0].lineno - 1  # without its body
        above = lines[first - 2].strip() if first > 1 else ""
        if above.startswith("#") and explanation.search(above):
            return True
        if any(map(explanation.search, lines[place.lineno - 1 : max(last, place.lineno)])):
            return True
    return False


# ---------------------------------------------------------------------------------------------------- waiting

_LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "FileLock"}
_LOCK_NAME = re.compile(r"(^|_)(r?lock|mutex|semaphore)$|[a-z](Lock|Mutex|Semaphore)$")


def _locks(node: ast.AST) -> set[str]:
    return _made_by(node, _LOCKS)


def _made_by(node: ast.AST, makers: Collection[str]) -> set[str]:
    """The names and attributes to which a statement, or one within it, assigns the result of one of these makers."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
            made = {_last(part) for part in ast.walk(each.value) if isinstance(part, (ast.Name, ast.Attribute))}
            if isinstance(each.value, (ast.Call, ast.Tuple)) and made & set(makers):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                names |= {_last(part) for target in targets for part in ast.walk(target)}
    return names - {"", "self", "cls"}


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _waits_in(node: ast.AST, locks: Collection[str], contexts: Collection[str]) -> Iterator[str]:
    if isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            name = _last(item.context_expr)
            bounded = isinstance(item.context_expr, ast.Call) and _has_a_bound(item.context_expr, 2)
            if (name in locks or _LOCK_NAME.search(name)) and not bounded:
                yield f"`with {ast.unparse(item.context_expr)}` waits without a bound"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        call, owner = node.func.attr, node.func.value
        without = {
            "acquire": not _has_a_bound(node, 2) and not _is_false(node),
            "wait": not _has_a_bound(node, 1),
            "wait_for": not _has_a_bound(node, 2) and _last(owner) != "asyncio",
            "join": not _has_a_bound(node, 1),
            "result": not _has_a_bound(node, 1),
            "communicate": not _has_a_bound(node, 2),
            "get": not _has_a_bound(node, 1) and not _is_false(node) and _last(owner) not in contexts,
        }
        if without.get(call):
            yield f"`{ast.unparse(node)}` waits without a bound"


def _has_a_bound(call: ast.Call, position: int) -> bool:
    """Whether a call has this many arguments, or a timeout, other than None."""
    given = [each.value for each in call.keywords if each.arg == "timeout" or each.arg is None]
    given += call.args[position - 1 : position]
    return any(ast.unparse(each) not in ("None", "-1") for each in given)


def _is_false(call: ast.Call) -> bool:
    given = [*call.args[:1], *(each.value for each in call.keywords if each.arg in ("block", "blocking"))]
    return any(isinstance(each, ast.Constant) and each.value is False for each in given)


# ---------------------------------------------------------------------------------------------------- writing

_WRITERS = re.compile(
    r"unwrap_model|extract_model_from_parallel|requires_grad_|register_\w*hook|register_buffer|register_parameter"
    r"|register_module|add_module|load_state_dict|set_adapter|(en|dis)able_adapters?(_layers)?"
)
_CASTS = {"to", "half", "float", "double", "bfloat16", "cuda", "cpu", "type"}
"""Methods that change a module in place; a call whose result is not used has no other purpose."""
_OWN = ("self", "cls", "ctx")


def _known_to_write(node: ast.AST) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if isinstance(call.func, ast.Attribute) and call.func.attr in _CASTS:
            return f"`{ast.unparse(call)}` writes to its object"
    if not isinstance(node, ast.Call):
        return None
    name = _last(node.func)
    if isinstance(node.func, ast.Name):
        if name in ("setattr", "delattr") and node.args and _last(node.args[0]) not in _OWN:
            return f"`{ast.unparse(node)}` writes to an object"
        return f"`{name}()` may write to the model" if _WRITERS.fullmatch(name) else None
    if name in ("train", "eval") and len(node.args) + len(node.keywords) <= (name == "train"):
        return f"`{ast.unparse(node)}` sets the mode of every module below"
    if not _WRITERS.fullmatch(name) or _last(getattr(node.func, "value", node)) in ("detach", "clone"):
        return None
    return f"`{ast.unparse(node.func)}()` may write to its arguments"


def _to_what_is_given(patch: KnownBug) -> set[Finding]:
    """Assignments to attributes and items of the implementations' arguments, followed through calls."""
    wraps = {
        change.implementation for variant in patch.variants for change in variant.changes if isinstance(change, Wrap)
    }
    due: list[tuple[Module, FunctionNode, frozenset[str], frozenset[str]]] = []
    for path in patch.implementations:
        module_name, _, qualname = path.partition(":")
        module = reach.module_of(module_name)
        definition = reach.definition(module, qualname) if module is not None else None
        if definition is not None:
            names = arguments.parameters(definition[1])
            own = frozenset(names[:1] + names[3:4]) if path in wraps else frozenset()
            # A wrapper's `kwargs` is created for the call.
            due.append((*definition, frozenset(names) - own, own))
    findings: set[Finding] = set()
    seen = set()
    while due:
        module, function, given, own = due.pop()
        if (id(function), given) in seen:
            continue
        seen.add((id(function), given))
        follower = arguments.Follower(module, set(given))
        follower.run(function.body)
        for node, what in follower.writes:
            if not _explained(module, node, "writes"):
                findings.add(Finding(module.source.filename, node.lineno, what))
        due.extend((*called, names, frozenset()) for called, names in follower.called)
    return findings
