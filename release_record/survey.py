"""Look at every release of every patched framework, and record what each patch's shape guard finds: `make releases`.

Releases are fetched without dependencies into ``.cache/releases`` and read as text. What the record has already, from
the same file and for the same changes, is not looked at again, so an interrupted survey goes on where it was, and
a later one shows what changed upstream since. Frameworks that live in git need a clone:
``--git Megatron-LM=~/Megatron-LM``.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compatibility
import parts
import record
import shipped
import texts
from packaging.utils import canonicalize_name
from packaging.version import Version
from record import Entry, Record
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.guards import memory
from rlhf_patches.offline import archive, facts, index
from rlhf_patches.offline.facts import Code

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "releases"
WORKERS = 4  # half of the time is waiting for the index

Found = tuple[Entry, dict[str, texts.Facts]]
"""One release, and by top-level package the facts of its texts."""


def main() -> int:
    """Returns 1 if a guard and the record disagree, or if something has to be reviewed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="distributions (default: all that patches name)")
    parser.add_argument("--git", action="append", default=[], metavar="NAME=FOLDER", help="a clone: its tags and main")
    parser.add_argument("--index", default=index.PYPI, metavar="URL", help="another index than PyPI")
    parser.add_argument("--again", action="store_true", help="look at all releases anew, whatever the record has")
    parser.add_argument("--offline", action="store_true", help="look at nothing new, only write what is derived")
    options = parser.parse_args()
    patches = record.built_in()
    console = Console(highlight=False)
    before = {(item.name, item.in_git): item for item in record.load_all()}
    if not options.offline:
        known = sorted({canonicalize_name(patch.distribution) for patch in patches})
        names = [canonicalize_name(name) for name in options.names]
        if not set(names) <= set(known):
            parser.error(f"expected names among {', '.join(known)}, which patches are for")
        for clone in options.git:
            name, _, folder = clone.partition("=")
            if name not in REPOSITORIES or not folder:
                parser.error(f"--git {clone}: expected NAME=FOLDER, with NAME one of {', '.join(REPOSITORIES)}")
            survey_git(name, folder, patches, console, options.again)
        for name in names or ([] if options.git else known):
            survey_index(name, options.index, patches, console, options.again)
    after = record.load_all()
    for item in after:
        for line in changes(before.get((item.name, item.in_git)), item, record.patches_of(item.distribution, patches)):
            console.print(line, markup=False, soft_wrap=True)
    for package, one in texts.of_record(after, patches).items():
        texts.save(package, one)
    (ROOT / "docs" / "compatibility.md").write_text(compatibility.page(after, patches), encoding="utf-8")
    offline = ROOT / "rlhf_patches" / "offline"
    (offline / shipped.PATH.name).write_text(shipped.text(after, patches), encoding="utf-8")
    (offline / shipped.VERSIONS.name).write_text(shipped.versions(after, patches), encoding="utf-8")
    console.print(compatibility.figures(after, patches))
    notes = record.reviewed()
    complaints = [
        *(str(item) for item in record.disagreements(after, patches) if not notes.accepts(item)),
        *record.loose_bounds(after, patches),
        *record.unreviewed(after, patches, notes),
        *record.outdated(after, patches),
    ]
    for complaint in complaints:
        console.print(f"look at this: {complaint}", style="bold red", markup=False, soft_wrap=True)
    return int(bool(complaints))


# ----------------------------------------------------------------------------------------- from an index


def survey_index(name: str, url: str, patches: list[KnownBug], console: Console, again: bool = False) -> None:
    """Bring the record of one distribution up to date."""
    own = record.patches_of(name, patches)
    reviewed = record.reviewed()
    oldest = Version(reviewed.oldest.get(name, {}).get("version", "0.dev0"))
    chosen = [release.file for release in index.Index(url).releases(name) if release.version >= oldest]
    wanted = {file.filename: file for file in chosen if file is not None}
    _survey(
        Record(name, False, name, {}, []),
        own,
        {each: file.hashes.get("sha256", "") for each, file in wanted.items()},
        lambda file: (_look_up_parts if name in reviewed.parts else _look_up, name, wanted[file], own),
        console,
        again,
    )


def _look_up(name: str, file: index.File, patches: list[KnownBug]) -> Found:
    return _looked_at_file(index.Index().fetch(file, CACHE / name), file, patches)


def _look_up_parts(name: str, file: index.File, patches: list[KnownBug]) -> Found:
    modules = {module for patch in patches for module in patch.modules}
    return _looked_at_file(parts.fetch(file, modules, CACHE / name), file, patches)


def _looked_at_file(place: Path, file: index.File, patches: list[KnownBug]) -> Found:
    release = archive.open_release(str(place))
    ((_, version),) = release.claims
    return _looked_at(release, version or "", file.filename, file.hashes.get("sha256", ""), patches)


def _looked_at(release: archive.Release, version: str, file: str, sha256: str, patches: list[KnownBug]) -> Found:
    with memory.parsed_once(kept=20):
        codes = {patch.name: facts.examine(release, patch) for patch in patches}
        digests, found = texts.of_release(release, patches)
    return Entry(version, file, sha256, codes, digests), found


# -------------------------------------------------------------------------------------------- from git


@dataclass(frozen=True)
class Repository:
    """A framework that is used from a checkout.

    Attributes:
        distribution: what its patches' guards name.
        tags: which tags are releases.
        version: a file in it, and a function from its text to the version that an installed copy calls itself.
    """

    distribution: str
    tags: re.Pattern[str]
    version_file: str
    version: Callable[[str], str]


def _package_info(text: str) -> str:
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.isupper()
        and isinstance(node.value, (ast.Constant, ast.List))
    }
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values['PRE_RELEASE']}"


def _setup_py(text: str) -> str:
    (version,) = re.findall(r"""^\s*version\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return str(version)


REPOSITORIES = {
    "Megatron-LM": Repository(
        "megatron-core", re.compile(r"core_[rv].*"), "megatron/core/package_info.py", _package_info
    ),
    "slime": Repository("slime", re.compile(r"v\d.*"), "setup.py", _setup_py),
    # Before v0.2.1 it was called nemo-reinforcer, and had none of the modules.
    "NeMo-RL": Repository("nemo-rl", re.compile(r"v(?!0\.1\.|0\.2\.0$)\d.*"), "nemo_rl/package_info.py", _package_info),
}


def survey_git(name: str, folder: str, patches: list[KnownBug], console: Console, again: bool = False) -> None:
    """Bring the record of a repository up to date, from a clone."""
    repository = REPOSITORIES[name]
    own = record.patches_of(repository.distribution, patches)
    commits = dict(_commits(folder, repository))
    _survey(
        Record(name, True, repository.distribution, {}, []),
        own,
        commits,
        lambda ref: (_look_up_tag, folder, ref, commits[ref], repository, own),
        console,
        again,
    )


def _commits(folder: str, repository: Repository) -> Iterator[tuple[str, str]]:
    for line in _git(
        folder, "for-each-ref", "--format=%(refname:short) %(objectname) %(*objectname)", "refs/tags"
    ).splitlines():
        tag, *commits = line.split()
        if repository.tags.fullmatch(tag):
            yield tag, commits[-1]
    yield "main", _git(folder, "rev-parse", "HEAD").strip()


def _look_up_tag(folder: str, ref: str, commit: str, repository: Repository, patches: list[KnownBug]) -> Found:
    modules = sorted({module for patch in patches for module in patch.modules})
    with tempfile.TemporaryDirectory() as tree:
        for path in [f"{module.replace('.', '/')}.py" for module in modules]:
            if _git(folder, "ls-tree", "--name-only", commit, path):
                (Path(tree) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(tree) / path).write_text(_git(folder, "show", f"{commit}:{path}"), encoding="utf-8")
        version = Version(repository.version(_git(folder, "show", f"{commit}:{repository.version_file}")))
        return _looked_at(archive.open_release(tree), str(version), ref, commit, patches)


def _git(folder: str, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git -C {folder} {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


# ------------------------------------------------------------------------------------------- the survey


def _survey(
    fresh: Record,
    patches: list[KnownBug],
    sums: dict[str, str],
    job: Callable[[str], tuple[Any, ...]],
    console: Console,
    again: bool,
) -> None:
    """Look up what is not in the record yet, and save as it comes in.

    Args:
        fresh: the record to be filled, empty.
        patches: those of its distribution.
        sums: per file (or tag) its checksum (or commit): an entry with the same one is kept.
        job: for a file, a function that makes its entry, and the arguments.
        console: for the progress bar.
        again: whether to look up everything.
    """
    fresh.digests = {patch.name: record.digest(patch) for patch in patches}
    if fresh.path.exists() and not again:
        old = record.load(fresh.path)
        if old.digests == fresh.digests:
            known, shipped = texts.known_texts(), {entry.file for entry in texts.kept(old)}
            fresh.entries = [
                entry
                for entry in old.entries
                if sums.get(entry.file) == entry.sha256
                and (
                    entry.file not in shipped
                    or all((module.partition(".")[0], digest) in known for module, digest in entry.texts.items())
                )
            ]
    done = {entry.file for entry in fresh.entries}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed = []
    found: dict[str, texts.Facts] = {}
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(WORKERS) as pool:
        bar = progress.add_task(fresh.name, total=len(sums), completed=len(done))
        futures = [pool.submit(_attempt, file, *job(file)) for file in sums if file not in done]
        try:
            for future in as_completed(futures):
                entry = future.result()
                if isinstance(entry, str):
                    failed.append(entry)
                else:
                    fresh.entries.append(entry[0])
                    for package, one in entry[1].items():
                        found.setdefault(package, texts.load(package)).add(one)
                progress.update(bar, advance=1)
                if len(fresh.entries) % 20 == 0:
                    _save(fresh, found)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            _save(fresh, found)
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(sums)} releases could not be looked at:", *failed]))


def _save(fresh: Record, found: dict[str, texts.Facts]) -> None:
    for package, one in found.items():
        texts.save(package, one)
    record.save(fresh)


def _attempt(file: str, look_up: Callable[..., Found], *arguments: Any) -> Found | str:
    # As text, because not every exception survives the way back from a process of the pool.
    try:
        return look_up(*arguments)
    except Exception as error:
        return f"{file}: {type(error).__name__}: {error}"


def changes(old: Record | None, new: Record, patches: list[KnownBug]) -> Iterator[str]:
    """What is new upstream since the last survey, patch by patch, for people."""
    known = {entry.file for entry in old.entries} if old else set()
    entries = sorted(new.entries, key=lambda entry: entry.order)
    for previous, entry in zip([None, *entries[:-1]], entries, strict=True):
        if entry.file in known or not known:
            continue
        for patch in patches:
            was, now = record.code(patch, previous) if previous else Code(facts.NO_MODULE), record.code(patch, entry)
            if was == now:
                news = f"as before: {now.state}"
            elif was.state == now.state == facts.DEFECT:
                news = "the function changed, and still has the defect"
            elif was.state == facts.DEFECT:
                news = (
                    f"no longer has the defect ({now.state} {now.why}): end the range before it, and say "
                    "so in obsolete_when"
                )
            else:
                news = f"{was.state} -> {now.state} {now.why}".rstrip()
            yield f"new: {new.name} {entry.version}, {patch.name}: {news}"
    gone = known - {entry.file for entry in entries}
    yield from (f"gone: {new.name} {file}" for file in sorted(gone))


if __name__ == "__main__":
    sys.exit(main())
