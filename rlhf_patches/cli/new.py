"""``new``: write a plugin with one patch, for its author to complete."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..authoring import fix, plugin, upstream
from ..authoring.fix import Fix
from ..authoring.plugin import Plugin
from ..authoring.upstream import Owner, Upstream
from ..definitions import registry
from ..definitions.changes import Change, Replace, Rewrite, Wrap
from ..definitions.checks import check_name
from ..definitions.words import plural, printable
from ..guards import decision, fingerprints, patterns, rewriting, sources
from ..guards.edits import Unrecognized
from ..guards.places import FunctionNode, Source
from ..offline import inputs
from . import author, output
from .command_line import Commands, UsageError

_KINDS = ("rewrite", "wrap", "replace")
_OF_REWRITES = ("pattern", "replacement", "inside", "use")


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "new",
        _new,
        "write a plugin with a patch and its test, for you to complete",
        "rlhf-patches new trl-pad-order --target trl.trainer.utils:pad --in trl==1.14.2 --pattern 'len($A)'",
        wrong=(upstream.UpstreamError, plugin.PluginError, fix.FixError, inputs.InputError),
    )
    command.add_argument("name", metavar="NAME", help="the patch's name, kebab-case, framework first")
    of = command.add_mutually_exclusive_group(required=True)
    of.add_argument("--target", metavar="MODULE:FUNC", help="the function that has the bug")
    of.add_argument(
        "--from-diff",
        metavar="FIX",
        help="upstream's fix, a unified diff: its hunks become rewrites; '-': standard input; needs unidiff",
    )
    command.add_argument("--in", dest="release", metavar="RELEASE", help=author.RELEASE)
    command.add_argument("--into", metavar="DIR", help="the new folder (default: ./NAME)")
    command.add_argument("--kind", choices=_KINDS, help="kind of change (default: rewrite)")
    command.add_argument(
        "--pattern", metavar="PATTERN", help="for a rewrite: an ast-grep pattern of the defective code"
    )
    command.add_argument("--replacement", metavar="REPLACEMENT", help="for a rewrite: the replacement")
    author.add_of_rewrite(command)


def _new(options: argparse.Namespace) -> int:
    if options.from_diff is not None:
        fix.check_it_can_be_read()
    _check_new(options.name)
    release = upstream.open_upstream(options.release)
    if options.from_diff is not None:
        return _from_diff(options, release)
    source, node = release.function(options.target)
    owner = release.owner(source)
    _write(Plugin(options.name, owner, (_change(options, owner, source, node),), {options.target: node}), options.into)
    if owner is None:
        _complain_of_no_owner(source)
    return 0


def _from_diff(options: argparse.Namespace, release: Upstream) -> int:
    given = [name for name in ("kind", *_OF_REWRITES) if getattr(options, name)]
    if given:
        raise UsageError(f"--{given[0]} requires --target: a diff already states the changes")
    drafted = fix.read(inputs.text(options.from_diff, fix.LARGEST), release)
    owners = dict.fromkeys(release.owner(source) for source in drafted.modules)
    if len(owners) > 1:
        raise UsageError(
            f"{options.from_diff} changes {' and '.join(str(owner or 'files without an owner') for owner in owners)}: "
            "expected one distribution; write a patch for each"
        )
    _print_result(drafted)
    left = [f"{hunk.label}: {reason}" for hunk in drafted.hunks for reason in hunk.open]
    if not drafted.rewrites:
        raise UsageError(f"no hunk of {options.from_diff} can be drafted as a Rewrite, so no file is written")
    changes = tuple(rewrite for rewrites in drafted.rewrites.values() for rewrite in rewrites)
    (owner,) = owners
    _write(Plugin(options.name, owner, changes, drafted.nodes, drafted.subject, tuple(left)), options.into)
    if left:
        undrafted = f"{plural(len(left), 'change')} {'is' if len(left) == 1 else 'are'} not drafted"
        output.complain(
            f"{undrafted}: the patch is refused until you have written {'it' if len(left) == 1 else 'them'}"
        )
    if owner is None:
        _complain_of_no_owner(drafted.modules[0])
    return 0


def _print_result(drafted: Fix) -> None:
    """Print the result for each hunk, and for each file without hunks."""
    for hunk in drafted.hunks:
        print(printable(hunk.label))
        for target in hunk.drafted:
            count = len(drafted.rewrites[target])
            print(printable(f"  drafted: {target}, {count} rewrite{'s' * (count > 1)}"))
        for reason in hunk.open:
            print(printable(f"  NOT DRAFTED: {reason}"))
        for note in hunk.notes:
            print(printable(f"  no change needed: {note}"))
    for file in drafted.skipped:
        print(printable(f"skipped: {file}"))


def _complain_of_no_owner(source: Source) -> None:
    output.complain(f"no metadata list {source.filename}: set the distribution yourself")


def _check_new(name: str) -> None:
    """Check the patch's name before any file is read."""
    check_name(name, "NAME")
    registered, failures = registry.listed()
    output.complain_of_plugins(failures)  # the names of their patches are unknown
    for patch, by in registered:
        if patch.name == name:
            whose = "a built-in patch" if by == registry.BUILT_IN else f"a patch of the plugin {by}"
            raise UsageError(f"{name} is {whose} already (`rlhf-patches explain {name}`): choose another name")


def _write(made: Plugin, into: str | None) -> None:
    """Write the plugin and print the next steps."""
    folder = Path(into or made.name)
    files = made.files()
    plugin.write(files, folder)
    of = f" of {made.owner}" if made.owner else ""
    print(printable(f"wrote a patch for {', '.join(made.nodes)}{of}"))
    for name in sorted(files):
        print(printable(f"  {folder / name}"))
    print(printable(f"next: complete the parts marked {plugin.MARK}, then in {folder}"))
    print("  python -m pip install -e '.[test]'\n  rlhf-patches doctor\n  python -m pytest")
    print(printable(f"  rlhf-patches survey {made.name}"))


def _change(options: argparse.Namespace, owner: Owner | None, source: Source, node: FunctionNode) -> Change:
    if options.kind in (None, "rewrite"):
        return _rewrite(options, source, node)
    given = [name for name in _OF_REWRITES if getattr(options, name)]
    if given:
        raise UsageError(f"--{given[0]} is for a rewrite: a {options.kind} calls your function")
    try:
        module_code = rewriting.compile_module(source.text, source.filename)
        decision.check_kind(rewriting.code_of(module_code, sources.place_of(node)), node.name)
    except (decision.CannotApply, Unrecognized) as error:
        raise UsageError(f"a {options.kind} is not possible: {error}") from error
    implementation = f"{plugin.package_of(options.name)}.repair:{node.name.strip('_') or 'repair'}"
    read = owner.version if owner and owner.version else "the release that was read"
    kind = Wrap if options.kind == "wrap" else Replace
    return kind(options.target, implementation, {fingerprints.fingerprint_of(node): read})


def _rewrite(options: argparse.Namespace, source: Source, node: FunctionNode) -> Rewrite:
    if options.pattern is None:
        if options.replacement is not None or options.inside is not None or options.use:
            raise UsageError("--replacement, --inside and --use require --pattern")
        return Rewrite(options.target, plugin.NO_PATTERN, plugin.NO_REPLACEMENT)
    matches = len(patterns.matches(source, node, options.pattern, options.inside))
    if not matches:
        complaint = patterns.no_python(options.pattern)
        why = f"it {complaint}" if complaint else f"`rlhf-patches try {options.target}` shows its lines"
        raise UsageError(f"{options.target} does not contain {options.pattern!r} ({source.filename}): {why}")
    if options.replacement is None:
        options.replacement = plugin.NO_REPLACEMENT
        return author.rewrite_of(options, matches)
    rewrite = author.rewrite_of(options, matches)
    author.edits_of(rewrite, source)
    return rewrite
