"""``make mutants``: wrong versions of this project, each with the test that has to notice it.

They are data: tests/mutations/AREA.toml, one table for each,

    [[mutation]]
    name = "one-holder-is-enough"       # unique
    file = "patches/_vocab_parallel/ownership.py"
    old = "return HELD"                 # occurs once in the file
    new = "return None"
    test = "test_whoever_holds_them"    # its name, or FILE.py::NAME, or a list; [PARAMETERS] may follow
    why = "what a user would have of it"

and further keys where they are needed: ``environment`` ("engine" unless given, "frameworks", "trl" or "vllm"),
``seconds`` (its time limit), ``hangs = true`` (the test does not end: the time limit is how it is noticed), and
``survives`` in place of ``test``: why no test can notice it.

``--few`` runs the same few each time, of every folder that is mutated a fortieth, and one at least: `make test-rest`.

Of exhaustive tests those count that CI runs, and those that are named with their parameters. Each mutation runs in a
copy of the tree, with environments in which that copy is what is imported: the working tree is never touched. The named
tests are run in the copy without any mutation first: one that fails there proves nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.harness import effort, failures  # noqa: E402

DATA = Path(__file__).parent / "mutations"
ENVIRONMENTS = ("engine", "frameworks", "trl", "vllm")
SECONDS = 300.0
CATALOGUE = "patches/catalogue.py"
#: What a changed patch tells of itself, as `make docs` lists it.
WRITE_CATALOGUE = f"""
import sys
sys.path.insert(0, "tools")
import derive
text = derive.catalogue(derive.paths(derive.ROOT / "patches"))
(derive.ROOT / {CATALOGUE!r}).write_text(text, encoding="utf-8")
"""


@dataclass(frozen=True)
class Mutation:
    """One table of the data; ``area`` is the name of its file."""

    area: str
    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...] = ()
    environment: str = "engine"
    seconds: float = SECONDS
    hangs: bool = False
    survives: str | None = None

    @property
    def folder(self) -> str:
        """That the file is in; empty for the root."""
        return self.file.rpartition("/")[0]

    def mutated(self, text: str) -> str:
        """The file's text with the mutation.

        Raises:
            ValueError: the data is stale: the old text does not occur exactly once.
        """
        times = text.count(self.old)
        if times != 1:
            raise ValueError(f"{self.file} contains its old text {times} times, expected 1")
        return text.replace(self.old, self.new)


def load() -> list[Mutation]:
    """All of them."""
    import tomllib  # Python 3.11; the engine's tests run on 3.10, too

    found = []
    for path in sorted(DATA.glob("*.toml")):
        for table in tomllib.loads(path.read_text())["mutation"]:
            tests = table.pop("test", [])
            found.append(Mutation(path.stem, tests=(tests,) if isinstance(tests, str) else tuple(tests), **table))
    return found


def few(mutations: Iterable[Mutation]) -> list[Mutation]:
    """Of each folder a fortieth, and one at least, by digests of the names: a new mutation moves one other at most."""

    def drawn(mutation: Mutation) -> tuple[bool, str]:
        return mutation.hangs, hashlib.sha256(mutation.name.encode()).hexdigest()  # what hangs takes its time limit

    by_folder: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        if mutation.survives is None:
            by_folder.setdefault(mutation.folder, []).append(mutation)
    return [one for found in by_folder.values() for one in sorted(found, key=drawn)[: max(1, len(found) // 40)]]


@functools.cache
def _tests() -> dict[str, list[str]]:
    """Where each test function is: name -> node ids without parameters."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        tree = ast.parse(path.read_text())
        for prefix, body in [("", tree.body), *((f"{c.name}::", c.body) for c in tree.body if type(c) is ast.ClassDef)]:
            for function in body:
                if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.name.startswith("test_"):
                    found.setdefault(function.name, []).append(f"{path.relative_to(ROOT)}::{prefix}{function.name}")
    return found


def node_id(test: str) -> str:
    """The node id of a test as the data names it.

    Raises:
        ValueError: there is none of that name, or several are.
    """
    plain, bracket, parameters = test.partition("[")
    file, _, name = plain.rpartition("::")
    places = [
        place for place in _tests().get(name, []) if not file or f"/{place.partition('::')[0]}".endswith(f"/{file}")
    ]
    if len(places) != 1:
        raise ValueError(f"{len(places)} tests are called {plain}, expected 1: {', '.join(places)}")
    return places[0] + bracket + parameters


# ------------------------------------------------------------------------------------------ a copy to run in


_running: set[int] = set()


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    _running.discard(group)


class Copy:
    """The tree once more, and environments in which it is the one that is installed."""

    def __init__(self, folder: Path, pythons: dict[str, str]) -> None:
        self.folder = folder
        self.tree = folder / "tree"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        self.pythons = {name: self._environment(name, python) for name, python in pythons.items()}

    def _environment(self, name: str, python: str) -> str:
        """An environment that has what ``python``'s has, with this tree in place of ours."""
        of_base = "import sys, sysconfig; print(sys.prefix, sysconfig.get_path('purelib'), *sys.path, sep='\\n')"
        asked = subprocess.run([python, "-c", of_base], check=True, capture_output=True, text=True, cwd=self.folder)
        base, site, *path = asked.stdout.splitlines()
        new = self.folder / name
        subprocess.run([python, "-m", "venv", "--without-pip", str(new)], check=True)
        (new_site,) = new.glob("lib/python*/site-packages")
        # A path line adds a folder without running the .pth files in it: the editable install there stays out.
        (new_site / "zz_base.pth").write_text("\n".join(entry for entry in path if entry.endswith("site-packages")))
        for installed in Path(site).glob("*rlhf_patches*"):
            for file in installed.rglob("*") if installed.is_dir() else [installed]:
                if file.is_file():
                    to = new_site / file.relative_to(site)
                    to.parent.mkdir(exist_ok=True)
                    to.write_text(file.read_text().replace(str(ROOT), str(self.tree)))
        for script in Path(base, "bin").iterdir():
            to = new / "bin" / script.name
            if not to.exists() and script.is_file() and script.read_bytes()[:2] == b"#!":
                to.write_text(script.read_text().replace(str(Path(base, "bin")), str(new / "bin")))
                to.chmod(0o755)
        if Path(base, "side-by-side").is_dir():
            (new / "side-by-side").symlink_to(Path(base, "side-by-side").resolve())
        made = str(new / "bin" / "python")
        look = "import rlhf_patches, rlhf_patches.patches as p; print(rlhf_patches.__file__, p.__file__, sep='\\n')"
        seen = subprocess.run([made, "-c", look], check=True, capture_output=True, text=True, cwd=self.folder)
        expected = [str(self.tree / "rlhf_patches" / "__init__.py"), str(self.tree / "patches" / "__init__.py")]
        if seen.stdout.splitlines() != expected:
            raise SystemExit(f"{made} imports {seen.stdout.split()}, expected {expected}: install the project with -e")
        return made

    def pytest(self, environment: str, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Exit status of pytest, None where it did not end in time; and what it printed."""
        left_out = ("RLHF_PATCHES_", "PYTHON", "PYTEST_", failures.FILE, effort.OF_FILES)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        python = self.pythons[environment]
        kept["PATH"] = f"{Path(python).parent}{os.pathsep}{kept['PATH']}"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={self.folder / 'tmp'}"]
        if not any("[" in argument for argument in arguments):
            command += ["--part", effort.OF_CI]
        with tempfile.TemporaryFile() as output:
            # A session of its own, so that what the tests have started can be ended with them.
            process = subprocess.Popen(
                [*command, *arguments], cwd=self.tree, env=kept, stdout=output, stderr=output, start_new_session=True
            )
            _running.add(process.pid)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process.pid)
                process.wait()
            output.seek(0)
            return status, output.read().decode(errors="replace")

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """While the file is another."""
        file, catalogue = self.tree / mutation.file, self.tree / CATALOGUE
        text, listed = file.read_text(), catalogue.read_text()
        try:
            _put(file, mutation.mutated(text))
            if mutation.file.startswith("patches/"):
                # A list that is stale would fail every test; where the patch cannot be imported, that is what is said.
                python = next(iter(self.pythons.values()))
                subprocess.run([python, "-c", WRITE_CATALOGUE], cwd=self.tree, capture_output=True)
            yield
        finally:
            _put(file, text)
            _put(catalogue, listed)


def _put(file: Path, text: str) -> None:
    file.write_text(text)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):  # one of the same second would still count
        compiled.unlink()


# ------------------------------------------------------------------------------------------ runs


def _without(copy: Copy, environment: str, tests: Sequence[str]) -> dict[str, str]:
    """What is wrong with tests where nothing is mutated: node id -> the end of the output."""
    results = copy.folder / "results.xml"
    arguments = [f"--junitxml={results}", "-o", "junit_family=xunit1", *tests]
    status, output = copy.pytest(environment, arguments, SECONDS + 60 * len(tests))
    outcomes: dict[tuple[str, str], list[str]] = {}
    with contextlib.suppress(OSError, ElementTree.ParseError):
        for case in ElementTree.parse(results).iter("testcase"):
            said = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            outcomes.setdefault((str(case.get("file")), str(case.get("name"))), []).append(said)
        results.unlink()
    wrong = {}
    for test in tests:
        file, name = test.partition("::")[0], test.rpartition("::")[2]
        own = [
            said
            for (of_file, case), all_said in outcomes.items()
            if of_file == file
            if case in (name, name + "[") or ("[" not in name and case.startswith(name + "["))
            for said in all_said
        ]
        if "passed" not in own or "failure" in own or "error" in own:
            wrong[test] = f"{', '.join(sorted(set(own))) or 'not run'} (status {status})\n{_tail(output)}"
    return wrong


def _with(copy: Copy, mutation: Mutation) -> str | None:
    """What is wrong with a mutation; None if it was noticed."""
    with copy.mutated(mutation):
        status, output = copy.pytest(mutation.environment, ["-x", *map(node_id, mutation.tests)], mutation.seconds)
    if status == 0:
        return f"SURVIVED {', '.join(mutation.tests)}. Why it matters: {mutation.why}"
    if status is None and not mutation.hangs:
        return f"did not end within {mutation.seconds:.0f} s; if that is how it is noticed, say hangs = true"
    if status is not None and status > 1:  # 2 to 5: interrupted, internal error, usage, nothing collected
        return f"broke pytest itself (status {status}), which proves nothing:\n{_tail(output)}"
    return None


def _tail(output: str) -> str:
    return "\n".join("    " + line for line in output.splitlines()[-15:])


def _each(pool: ThreadPoolExecutor, run: Callable[[Any], Any], work: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    futures = [(one, pool.submit(run, one)) for one in work]
    try:
        for one, future in futures:
            yield one, future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for group in list(_running):  # Ctrl-C does not reach them
            _end(group)
        raise


def main() -> int:
    """Run the chosen ones; 1 if any is not noticed, or cannot be judged."""
    parser = argparse.ArgumentParser(description="Run mutants; see the head of tests/mutants.py.")
    parser.add_argument("names", nargs="*", help="parts of names, areas, files; by default all")
    for environment in ENVIRONMENTS:
        parser.add_argument(f"--{environment}", metavar="PYTHON", help=f"the interpreter of the {environment}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--few", action="store_true", help="the same few each time, of every mutated folder some")
    parser.add_argument("--anyway", action="store_true", help="run also what is said to survive, if it names a test")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in (few(load()) if options.few else load())
        if not options.names
        or any(part in f"{mutation.area}/{mutation.name} {mutation.file}" for part in options.names)
    ]
    wrong: dict[str, str] = {}
    due = []
    for mutation in chosen:
        try:
            mutation.mutated((ROOT / mutation.file).read_text())
            tests = [node_id(test) for test in mutation.tests]
        except (OSError, ValueError) as error:
            wrong[mutation.name] = f"stale: {error}"
            continue
        if mutation.survives is None or (options.anyway and tests):
            due.append(mutation)
    pythons = {name: getattr(options, name) for name in {mutation.environment for mutation in due}}
    for name in [name for name, python in pythons.items() if python is None]:
        parser.error(f"some need --{name} PYTHON: choose others, or run this as `make mutants`")
    pythons = {name: os.path.abspath(python) for name, python in pythons.items()}  # not realpath: it is a venv's
    if not chosen:
        parser.error("no mutation is called that")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(options.jobs):
            folder = Path(temporary, str(number))
            folder.mkdir()
            copies.put(Copy(folder, pythons))

        def in_a_copy(run: Callable[[Copy], Any]) -> Any:
            copy = copies.get()
            try:
                return run(copy)
            finally:
                copies.put(copy)

        together: dict[tuple[str, str], set[str]] = {}
        for mutation in due:
            for test in map(node_id, mutation.tests):
                # A few of each are run as one: frameworks are loaded once.
                file = "all of these" if options.few else test.partition("::")[0]
                together.setdefault((mutation.environment, file), set()).add(test)
        print(f"{len(due)} mutations; first, their tests without any", flush=True)
        failing: dict[tuple[str, str], str] = {}
        for (environment, file), found in _each(
            pool, lambda key: in_a_copy(lambda copy: _without(copy, key[0], sorted(together[key]))), together
        ):
            failing |= {(environment, test): text for test, text in found.items()}
            print(
                f"  {environment} {file}: {'as they should be' if not found else f'{len(found)} do not pass'}",
                flush=True,
            )

        def judge(mutation: Mutation) -> str | None:
            for test in map(node_id, mutation.tests):
                if (mutation.environment, test) in failing:
                    return f"{test} does not pass without it: {failing[mutation.environment, test]}"
            found: str | None = in_a_copy(lambda copy: _with(copy, mutation))
            return found

        for mutation, found in _each(pool, judge, due):
            if found is not None:
                wrong[mutation.name] = found
            print(f"  {mutation.area}/{mutation.name}: {'noticed' if found is None else found}", flush=True)
    print()
    areas = Counter(mutation.area for mutation in chosen)
    bad = Counter(mutation.area for mutation in chosen if mutation.name in wrong)
    stated = Counter(mutation.area for mutation in chosen if mutation not in due and mutation.name not in wrong)
    print(f"{'area':<20}{'mutations':>10}{'noticed':>10}{'stated':>10}{'wrong':>10}")
    for area in [*areas, None]:
        total, states, fails = ((c[area] if area else c.total()) for c in (areas, stated, bad))
        print(f"{area or 'all':<20}{total:>10}{total - states - fails:>10}{states:>10}{fails:>10}")
    for name, text in wrong.items():
        print(f"\n{name}: {text}")
        failures.note(f"{name}: {text}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{time.monotonic() - started:.0f} s on the clock, {used.ru_utime + used.ru_stime:.0f} CPU seconds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
