"""Follows a function's arguments and their parts through its code, to assignments to them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..guards.places import FunctionNode
from . import reach
from .reach import Module

_MUTATES = {
    *("append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault", "appendleft", "popleft"),
    *("__setattr__", "__setitem__", "__delattr__", "__delitem__"),
}
_WITHIN = {
    *("modules", "named_modules", "children", "named_children", "parameters", "named_parameters", "buffers"),
    *("items", "values", "get", "get_base_layer", "get_submodule", "get_parameter"),
}
"""Methods that return an object's contents."""
_THROUGH = {"getattr", "vars"}
_COLLECTS = {"enumerate", "zip", "reversed", "sorted", "iter", "list", "tuple", "set", "dict"}
"""Functions that create a new object with the contents of their arguments."""
_TAKES = {"get", "pop", "popitem", "popleft", "setdefault"}


def parameters(function: FunctionNode) -> list[str]:
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    parameters += [each for each in (function.args.vararg, function.args.kwarg) if each is not None]
    return [each.arg for each in parameters]


class Follower:
    """Follow the names in a function that refer to the user's objects or their parts."""

    def __init__(self, module: Module, given: set[str]) -> None:
        self.module, self.given = module, given
        self.holding: set[str] = set()  # the function's own containers of such objects
        self.writes: list[tuple[ast.expr | ast.stmt, str]] = []
        self.called: list[tuple[tuple[Module, FunctionNode], frozenset[str]]] = []

    def run(self, body: list[ast.stmt]) -> None:
        for node in body:
            self.statement(node)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            before = set(self.given)
            self.given -= set(parameters(node))
            self.run(node.body)
            self.given = before
            return
        if isinstance(node, ast.ClassDef):
            return
        for each in _expressions(node):
            self.expression(each)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign_value(target, node.value, node)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.assign_value(node.target, node.value, node)
        elif isinstance(node, ast.AugAssign):
            if not isinstance(node.target, ast.Name):
                self.assign(node.target, False, node)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self.assign(target, False, node)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self.assign(node.target, self.is_given(node.iter) or self.holds(node.iter), node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, self.is_given(item.context_expr), node)
        for part in ("body", "orelse", "finalbody"):
            self.run(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            self.run(handler.body)

    def assign_value(self, target: ast.expr, value: ast.expr, node: ast.stmt) -> None:
        is_given, holds = self.is_given(value), self.holds(value)
        if isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self.assign_value(one, other, node)
                return
            is_given = is_given or holds
        self.assign(target, is_given, node)
        if isinstance(target, ast.Name):
            (self.holding.add if holds and not is_given else self.holding.discard)(target.id)
        elif (is_given or holds) and isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.holding |= {target.value.id} - self.given

    def assign(self, target: ast.expr, is_given: bool, node: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            (self.given.add if is_given else self.given.discard)(target.id)
            self.holding.discard(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.assign(each, is_given, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, is_given, node)
        elif isinstance(target, (ast.Attribute, ast.Subscript)) and self.is_given(target.value):
            self.writes.append((node, f"`{ast.unparse(target)}` is assigned to, which belongs to an argument"))

    def expression(self, node: ast.expr) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.comprehension) and (self.is_given(each.iter) or self.holds(each.iter)):
                self.assign(each.target, True, ast.Pass())
        for each in ast.walk(node):
            if not isinstance(each, ast.Call):
                continue
            if isinstance(each.func, ast.Attribute) and self.is_given(each.func.value):
                name = each.func.attr
                if name in _MUTATES or re.fullmatch(r"[a-z]\w*[a-z0-9]_", name):
                    self.writes.append((each, f"`{ast.unparse(each)}` changes an argument"))
            called = reach.definition(self.module, each.func.id) if isinstance(each.func, ast.Name) else None
            if called is not None:
                names = parameters(called[1])
                given = {name for name, value in zip(names, each.args, strict=False) if self.is_given(value)}
                given |= {word.arg for word in each.keywords if word.arg in names and self.is_given(word.value)}
                if given:
                    self.called.append((called, frozenset(given)))

    def is_given(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.given
        if isinstance(node, ast.Subscript) and self.holds(node.value):
            return not isinstance(node.slice, ast.Slice)
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.NamedExpr)):
            return self.is_given(node.value)
        if isinstance(node, ast.IfExp):
            return self.is_given(node.body) or self.is_given(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self.is_given, node.values))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                taken = node.func.id == "next" and any(map(self.holds, node.args))
                return taken or (node.func.id in _THROUGH and any(map(self.is_given, node.args)))
            if isinstance(node.func, ast.Attribute):
                of_its_own = node.func.attr in _TAKES and self.holds(node.func.value)
                return of_its_own or (node.func.attr in _WITHIN and self.is_given(node.func.value))
        return False

    def holds(self, node: ast.expr | None) -> bool:
        """Whether the expression is a new container of given objects."""
        if isinstance(node, ast.Name):
            return node.id in self.holding
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(self.is_given(each) or self.holds(each) for each in node.elts)
        if isinstance(node, ast.Dict):
            return any(self.is_given(each) or self.holds(each) for each in node.values)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self.is_given(node.elt) or self.holds(node.elt)
        if isinstance(node, ast.DictComp):
            return self.is_given(node.value) or self.holds(node.value)
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Slice) and self.holds(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id in _COLLECTS and any(self.is_given(each) or self.holds(each) for each in node.args)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in ("items", "values") and self.holds(node.func.value)
        return False


def _expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement itself, not of the statements within it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr
