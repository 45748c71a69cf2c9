"""``new``: a plugin with one patch, for its author to complete."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..authoring import plugin, upstream
from ..authoring.plugin import Plugin
from ..authoring.upstream import Owner
from ..definitions import registry
from ..definitions.patch import Change, Replace, Rewrite, Wrap, check_name
from ..definitions.status import printable
from ..guards import decision, rewriting, sources
from ..guards.rewriting import Unrecognised
from ..guards.sources import FunctionNode, Source
from . import author, output
from .command_line import Commands, UsageError

_KINDS = ("rewrite", "wrap", "replace")


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "new",
        _new,
        "a plugin with a patch, its test included, for you to complete",
        "rlhf-patches new trl-pad-order --target trl.trainer.utils:pad --in trl==1.14.2 --pattern 'len($A)'",
    )
    command.add_argument("name", metavar="NAME", help="the patch, kebab-case, framework first")
    command.add_argument("--target", metavar="MODULE:FUNC", required=True, help="the function that has the bug")
    command.add_argument("--in", dest="release", metavar="RELEASE", help=author.RELEASE)
    command.add_argument("--into", metavar="DIR", help="the new folder (default: ./NAME)")
    command.add_argument("--kind", choices=_KINDS, default="rewrite", help="of change (default: rewrite)")
    command.add_argument("--pattern", metavar="PATTERN", help="of a rewrite: an ast-grep pattern of what is wrong")
    command.add_argument("--replacement", metavar="REPLACEMENT", help="of a rewrite: what becomes of it")
    author.add_of_rewrite(command)


def _new(options: argparse.Namespace) -> int:
    _check_new(options.name)
    found = upstream.open_upstream(options.release)
    source, node = found.function(options.target)
    owner = found.owner(source)
    change = _change(options, owner, source, node)
    made = Plugin(options.name, owner, (change,), {options.target: node})
    _write(made, options.into)
    if owner is None:
        output.complain(f"no metadata list {source.filename}: which distribution it is of is for you to say")
    return 0


def _check_new(name: str) -> None:
    """Check a patch's name before anything is read."""
    check_name(name, "NAME")
    registered, _ = registry.listed()
    for patch, by in registered:
        if patch.name == name:
            whose = "a built-in patch" if by == registry.BUILT_IN else f"a patch of the plugin {by}"
            raise UsageError(f"{name} is {whose} already (`rlhf-patches explain {name}`): choose another name")


def _write(made: Plugin, into: str | None) -> None:
    """Write the plugin and say what comes next."""
    folder = Path(into or made.name)
    files = made.files()
    plugin.write(files, folder)
    of = f" of {made.owner}" if made.owner else ""
    print(printable(f"wrote a patch for {', '.join(made.nodes)}{of}"))
    for name in sorted(files):
        print(printable(f"  {folder / name}"))
    print(printable(f"next: write what is marked {plugin.MARK} in them, and in {folder}"))
    print("  python -m pip install -e '.[test]'\n  rlhf-patches doctor\n  python -m pytest")


def _change(options: argparse.Namespace, owner: Owner | None, source: Source, node: FunctionNode) -> Change:
    if options.kind == "rewrite":
        return _rewrite(options, source, node)
    given = [name for name in ("pattern", "replacement", "inside", "use") if getattr(options, name)]
    if given:
        raise UsageError(f"--{given[0]} is of a rewrite: a {options.kind} calls a function of yours")
    try:
        decision.check_kind(rewriting.code_of(rewriting.compile_module(source.text, source.filename), node), node.name)
    except (decision.CannotApply, Unrecognised) as error:
        raise UsageError(f"a {options.kind} is not possible: {error}") from error
    implementation = f"{plugin.package_of(options.name)}.repair:{node.name.strip('_') or 'repair'}"
    read = owner.version if owner and owner.version else "the one that was read"
    kind = Wrap if options.kind == "wrap" else Replace
    return kind(options.target, implementation, {sources.fingerprint_of(node): read})


def _rewrite(options: argparse.Namespace, source: Source, node: FunctionNode) -> Rewrite:
    if options.pattern is None:
        if options.replacement is not None or options.inside is not None or options.use:
            raise UsageError("--replacement, --inside and --use need --pattern: what they belong to")
        return Rewrite(options.target, plugin.NO_PATTERN, plugin.NO_REPLACEMENT)
    matches = len(rewriting.lines_of_matches(source, node, options.pattern, options.inside))
    if not matches:
        complaint = rewriting.no_python(options.pattern)
        why = f"it {complaint}" if complaint else f"`rlhf-patches try {options.target}` shows its lines"
        raise UsageError(f"{options.target} does not contain {options.pattern!r} ({source.filename}): {why}")
    if options.replacement is None:
        options.replacement = plugin.NO_REPLACEMENT
        return author.rewrite_of(options, matches)
    rewrite = author.rewrite_of(options, matches)
    author.edits_of(rewrite, source)
    return rewrite
