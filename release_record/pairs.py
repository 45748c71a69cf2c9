"""Which releases fail at an import beside which others: ``rlhf_patches/offline/pairs.json``, by ``make pairs``.

Of every release of a caller the names that its entry points import from another distribution while they are imported,
against what each release of that one has: `from X import name`, read from wheels, nothing run. Whatever cannot be told
counts as there (a condition, a `try` that catches the failure, a module that makes its own names), so a row is a
failure that is known, and the absence of one says nothing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import record
from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from survey import CACHE

from rlhf_patches.offline import index, pairs
from rlhf_patches.offline.pairs import Row

PATH = Path(__file__).parents[1] / "rlhf_patches" / "offline" / "pairs.json"
OLDEST = {"trl": "0.9.6", "peft": "0.11.0", "accelerate": "0.31.0", "verl": "0.2.0", "ms-swift": "3.0.0"}
"""The oldest release that is read, beside those of reviewed.toml: from the middle of 2024 on."""
CALLERS = {
    "trl": (r"trl", r"trl\.trainer\.\w+_trainer", r"trl\.scripts\.\w+"),
    "peft": (r"peft",),
    "accelerate": (r"accelerate",),
    "verl": (r"verl", r"verl\.trainer\.(main_ppo|fsdp_sft_trainer|sft_trainer)", r"verl\.workers\.\w+_workers"),
    "ms-swift": (
        r"swift",
        r"swift\.llm",
        r"swift\.trainers",
        r"swift\.(trainers\.)?rlhf_trainers?\.\w+_trainer",
        r"swift\.cli\.(sft|rlhf|rollout)",
    ),
}
"""Of each distribution the modules that users import or run, as patterns."""
OTHERS = ("transformers", "accelerate", "peft", "trl")
_CATCHES = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "RuntimeError", "AttributeError"}


class Needed(NamedTuple):
    """``from MODULE import NAME``; no name where the module alone is imported."""

    module: str
    name: str


# ----------------------------------------------------------------------------------------------- a wheel


class Wheel:
    """The modules of a wheel, as text and trees."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._files: dict[str, str] = {}
        # Of this wheel alone: a release's trees take a hundred times the memory of its file.
        self.text = functools.cache(self._text)
        self.tree = functools.cache(self._tree)
        self.bound = functools.cache(self._bound)
        self.quoted = functools.cache(self._quoted)
        for file in self._zip.namelist():
            if file.endswith(".py"):
                module = file.removesuffix(".py").replace("/", ".")
                self._files[module.removesuffix(".__init__")] = file
            elif file.endswith(".dist-info/METADATA"):
                self._metadata = file

    @property
    def modules(self) -> Iterable[str]:
        """Their names."""
        return self._files

    def is_package(self, module: str) -> bool:
        """Whether it has modules of its own."""
        return self._files.get(module, "").endswith("/__init__.py")

    def _text(self, module: str) -> str:
        """Its text; empty where there is none."""
        file = self._files.get(module)
        return self._zip.read(file).decode("utf-8", "replace") if file else ""

    def _tree(self, module: str) -> ast.Module:
        """Its tree; an empty one where it cannot be parsed."""
        try:
            return ast.parse(self.text(module))
        except SyntaxError:
            return ast.Module([], [])

    def _bound(self, module: str) -> frozenset[str]:
        """Names that a module's own statements bind, whatever the conditions."""
        found: set[str] = set()
        waiting: list[ast.AST] = [*self.tree(module).body]
        while waiting:
            node = waiting.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            else:
                waiting += ast.iter_child_nodes(node)
        return frozenset(found)

    def _quoted(self) -> frozenset[str]:
        """Every name that stands in quotes where a lazy package may read it."""
        texts = (self.text(module) for module in self.modules)
        return frozenset(name for text in texts if "__all__" in text for name in re.findall(r"[\"'](\w+)[\"']", text))

    def requires(self) -> dict[str, SpecifierSet]:
        """What its metadata allow of other distributions, without extras."""
        found: dict[str, SpecifierSet] = {}
        raw, _ = parse_email(self._zip.read(self._metadata))
        for text in raw.get("requires_dist", ()):
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker is None or "extra" not in str(requirement.marker):
                name = canonicalize_name(requirement.name)
                found[name] = found.get(name, SpecifierSet()) & requirement.specifier
        return found


# ------------------------------------------------------------------------------- what an import executes


def needed(wheel: Wheel, entry: str, others: Iterable[str]) -> set[Needed]:
    """What of the other packages is imported for certain while a module is."""
    found: set[Needed] = set()
    seen: set[str] = set()
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        parts = module.split(".")
        for number in range(1, len(parts) + 1):  # its packages run before it does
            name = ".".join(parts[:number])
            if name not in seen and wheel.text(name):
                seen.add(name)
                for target, names in _imports(wheel.tree(name).body, name, wheel.is_package(name)):
                    package = target.partition(".")[0]
                    if package == parts[0]:
                        waiting += _executed(wheel, target, names)
                    elif package in others:
                        found |= {Needed(target, each) for each in names}
    return found


def _imports(body: Sequence[ast.stmt], module: str, is_package: bool) -> Iterator[tuple[str, list[str]]]:
    """Modules and names of the imports that run, whatever the conditions come to that are not understood."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, [""]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield _absolute(node, module, is_package), [alias.name for alias in node.names]
        elif isinstance(node, ast.ClassDef):
            yield from _imports(node.body, module, is_package)
        elif isinstance(node, (ast.With, ast.Try)):
            if not (isinstance(node, ast.Try) and any(_catches(handler) for handler in node.handlers)):
                yield from _imports(node.body, module, is_package)
            if isinstance(node, ast.Try):
                yield from _imports(node.finalbody, module, is_package)
        elif isinstance(node, ast.If):
            holds = _holds(node.test)
            if holds is not None:
                yield from _imports(node.body if holds else node.orelse, module, is_package)
            elif _ends(node.body):
                return


def _ends(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Raise) for node in body)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *filter(None, [node.module])])


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(isinstance(node, ast.Name) and node.id in _CATCHES for node in ast.walk(handler.type))


def _holds(test: ast.expr) -> bool | None:
    """Whether a condition holds at run time; None where that is not known: `is_peft_available()` may want a version."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(test.operand)
        return None if inner is None else not inner
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    if name == "TYPE_CHECKING":
        return False
    return None


def _executed(wheel: Wheel, target: str, names: Iterable[str]) -> Iterator[str]:
    """The caller's own modules that such an import runs: the module, and where a name of it lies that is lazy."""
    yield target
    for name in names:
        if wheel.text(f"{target}.{name}"):
            yield f"{target}.{name}"
        elif "_LazyModule" in wheel.text(target):
            yield from (f"{target}.{module}" for module in _lazy(wheel, target).get(name, ()))


def _lazy(wheel: Wheel, package: str) -> dict[str, list[str]]:
    """Where the names of a lazy package lie, as the dictionary in its text says."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(wheel.tree(package)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.List):
                    for each in value.elts:
                        if isinstance(each, ast.Constant):
                            found.setdefault(str(each.value), []).append(str(key.value))
    return found


# ------------------------------------------------------------------------------------ what a release has


def lacks(wheel: Wheel, wanted: Needed) -> bool:
    """Whether a release has neither the name nor anything that could make it."""
    if not wheel.text(wanted.module):
        return not _mentioned(wheel, wanted.module)
    if wanted.name in ("", "*") or f"{wanted.module}.{wanted.name}" in wheel.modules:
        return False
    return not _has(wheel, wanted.module, wanted.name, frozenset())


def _mentioned(wheel: Wheel, module: str) -> bool:
    """Whether it may be made at run time: an alias in ``sys.modules``, a package without a file."""
    package, _, last = module.rpartition(".")
    if not package:
        return False
    if any(name.startswith(f"{module}.") for name in wheel.modules):
        return True
    words = [wheel.text(name) for name in (package, package.partition(".")[0])]
    return any(re.search(rf"\b{re.escape(last)}\b", text) for text in words) or (
        "." in package and not wheel.text(package) and _mentioned(wheel, package)
    )


def _has(wheel: Wheel, module: str, name: str, seen: frozenset[str]) -> bool:
    text = wheel.text(module)
    if not wheel.tree(module).body or name in wheel.bound(module):
        return True  # the first: of another distribution, or not understood
    if "_LazyModule" in text:
        made = "define_import_structure" in text and name in wheel.quoted()
        return made or bool(re.search(rf"\b{re.escape(name)}\b", text))
    if re.search(r"globals\(\)|sys\.modules\[|def __getattr__|setattr\(", text):
        return True
    package = module.partition(".")[0]
    return any(
        star.partition(".")[0] != package or (star not in seen and _has(wheel, star, name, seen | {module}))
        for star in _stars(wheel, module)
    )


def _stars(wheel: Wheel, module: str) -> tuple[str, ...]:
    return tuple(
        _absolute(node, module, wheel.is_package(module))
        for node in ast.walk(wheel.tree(module))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    )


# ------------------------------------------------------------------------------------------- all of them


class Caller(NamedTuple):
    """One release of a caller: what each entry needs, and what its metadata allow."""

    needs: dict[str, set[Needed]]
    requires: dict[str, SpecifierSet]


def releases(name: str) -> dict[Version, index.File]:
    """The wheels of the final releases that nobody has withdrawn, oldest first."""
    oldest = Version(record.reviewed().oldest.get(name, {}).get("version", OLDEST.get(name, "0")))
    found = {}
    for each in sorted(index.Index().releases(name), key=lambda each: each.version):
        file = each.file
        if each.version >= oldest and not each.version.is_prerelease and not each.yanked and file and not file.is_sdist:
            found[each.version] = file
    return found


def _wheel(name: str, file: index.File) -> Wheel:
    return Wheel(index.Index().fetch(file, CACHE / name))


def _of_caller(name: str, file: index.File) -> Caller:
    wheel = _wheel(name, file)
    entries = [module for module in wheel.modules if any(re.fullmatch(each, module) for each in CALLERS[name])]
    others = [other for other in OTHERS if other != name]
    found = {entry: needed(wheel, entry, others) for entry in sorted(entries)}
    return Caller({entry: needs for entry, needs in found.items() if needs}, wheel.requires())


def _of_other(name: str, file: index.File, wanted: Sequence[Needed]) -> set[Needed]:
    wheel = _wheel(name, file)
    return {each for each in wanted if lacks(wheel, each)}


def rows(callers: dict[str, dict[Version, Caller]], missing: dict[str, dict[Version, set[Needed]]]) -> list[Row]:
    """What is known to fail, of pairs that the callers' metadata allow.

    Args:
        callers: of each distribution its releases.
        missing: of each distribution, and each of its releases, what callers want and it lacks.
    """
    found: dict[tuple[str, str, str, str, tuple[str, ...], str], list[Needed]] = {}
    for (caller, versions), (other, lacking) in itertools.product(callers.items(), missing.items()):
        for need in sorted(set().union(*lacking.values())):
            for span in _stretches(lacking, functools.partial(_lacking, lacking, need)):
                for users, entries in _users(versions, other, need, span):
                    pin = _pin(lacking, span, [versions[user] for user in users], other)
                    key = (caller, _range(versions, users), other, _range(lacking, span), entries, pin)
                    found.setdefault(key, []).append(need)
    return [
        Row(*key[:4], needs[0].module, needs[0].name, *key[4:])
        for key, needs in sorted(found.items(), key=lambda item: item[0])
    ]


def _lacking(lacking: dict[Version, set[Needed]], need: Needed, version: Version) -> bool:
    return need in lacking[version]


def _stretches(versions: Iterable[Version], holds: Callable[[Version], object]) -> Iterator[list[Version]]:
    """Releases, one after the other, of which the same holds, if that is anything."""
    for found, group in itertools.groupby(versions, holds):
        if found:
            yield list(group)


def _users(
    versions: dict[Version, Caller], other: str, need: Needed, span: Sequence[Version]
) -> Iterator[tuple[list[Version], tuple[str, ...]]]:
    """Releases that need it in the same entries, and may stand beside one of the span."""

    def entries(version: Version) -> tuple[str, ...]:
        caller = versions[version]
        if not any(_allows(caller, other, each) for each in span):
            return ()
        return tuple(entry for entry, needs in caller.needs.items() if need in needs)

    for users in _stretches(versions, entries):
        yield users, entries(users[0])


def _allows(caller: Caller, other: str, version: Version) -> bool:
    return other not in caller.requires or version in caller.requires[other]


def _range(versions: Iterable[Version], span: Sequence[Version]) -> str:
    after = next((version for version in versions if version > span[-1]), None)
    return f">={span[0]},<={span[-1]}" if after is None else f">={span[0]},<{after}"


def _pin(versions: Iterable[Version], span: Sequence[Version], users: Sequence[Caller], other: str) -> str:
    allowed = [each for each in versions if all(_allows(user, other, each) for user in users)]
    if any(version < span[0] for version in allowed):
        return f"<{span[0]}"
    after = next((version for version in allowed if version > span[-1]), None)
    return f">={after}" if after else ""


def main() -> None:
    """Write the file anew, or of some callers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CALLERS)} (default: all)")
    chosen = parser.parse_args().names or list(CALLERS)
    if not set(chosen) <= set(CALLERS):
        parser.error(f"expected names among {', '.join(CALLERS)}")
    kept = [row for row in pairs.record() if row.caller in {*CALLERS} - {*chosen}] if PATH.exists() else []
    with ProcessPoolExecutor(2) as pool:
        files = {name: releases(name) for name in {*chosen, *OTHERS}}
        callers = {}
        for name in chosen:
            made = pool.map(_of_caller, itertools.repeat(name), files[name].values())
            callers[name] = dict(zip(files[name], made, strict=True))
            print(f"{name}: {len(files[name])} releases", flush=True)
        needs = {
            need for each in callers.values() for one in each.values() for need in set().union(*one.needs.values())
        }
        missing = {}
        for name in OTHERS:
            wanted = sorted(need for need in needs if need.module.partition(".")[0] == name)
            made = pool.map(_of_other, itertools.repeat(name), files[name].values(), itertools.repeat(wanted))
            missing[name] = dict(zip(files[name], made, strict=True))
            print(f"{name}: {len(wanted)} names looked up in {len(files[name])} releases", flush=True)
    found = sorted([*kept, *rows(callers, missing)])
    lines = ",\n".join(f" {json.dumps(row._asdict())}" for row in found)
    PATH.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(found)} ranges of pairs that are known to fail at an import")


if __name__ == "__main__":
    main()
