"""Upstream's own tests, as released and with every patch on: ``python tests/upstream/compare.py [NAME ...]``.

Each test has to end alike. The tests are those of the sdist of the very release that is installed, fetched from PyPI;
of these the files in ``chosen.toml``, which says why. Each file runs in a process of its own, in folders that hold
nothing but tests, so that what they import is what is installed. A test that ends differently runs twice more on each
side: one that does so as released, too, is named and does not count. Status 1 if any other differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import tomllib

from rlhf_patches.offline import index

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "sdists"
Files = Mapping[str, list[str]]
SIDES = RELEASED, PATCHED = "as released", "with every patch on"
PROBLEMS = ("refused", "failed")
TESTS_RAN = (0, 1)  # pytest's status: all passed, some did not


class Problem(Exception):
    """The comparison would say nothing: no test, no patch, or something else than what is installed."""


class Upstream(NamedTuple):
    """A distribution's tests.

    Attributes:
        name: of the distribution.
        module: what it installs.
        files: which of its test files, or of their classes, each with the arguments that pytest has for it besides.
        plugins: of pytest, beside its own.
    """

    name: str
    module: str
    files: Files
    plugins: tuple[str, ...] = ()


class Ended(NamedTuple):
    """How one side ended.

    Attributes:
        tests: how each test did.
        problems: what is to be said of each file that pytest could not run.
    """

    tests: Mapping[str, str]
    problems: list[str]


class Found(NamedTuple):
    """What a comparison found.

    Attributes:
        released: how each test ended as released.
        different: what is to be said of each test that ends differently because of the patches.
        flaky: the same of each that ends differently as released, too.
        applied: the patches that were on.
        problems: what is to be said of each file of which nothing was compared.
    """

    released: Mapping[str, str]
    different: list[str]
    flaky: list[str]
    applied: list[str]
    problems: list[str]


def chosen(path: Path = HERE / "chosen.toml") -> dict[str, Upstream]:
    """The distributions whose tests are run, by name."""
    return {
        name: Upstream(
            name,
            entry["module"],
            {file: entry.get("only", {}).get(file, []) for file in entry["files"]},
            tuple(entry.get("plugins", ())),
        )
        for name, entry in tomllib.loads(path.read_text()).items()
    }


# ------------------------------------------------------------------------------------------- one distribution


def tests_of(name: str, version: str) -> Path:
    """A folder with the tests of a release, and nothing else of it."""
    place = CACHE / f"{name}-{version}"
    if place.is_dir():
        return place
    release = index.Index().release(name, version)
    if release is None or release.sdist is None:
        raise Problem(f"{name} {version} has no sdist on PyPI")
    with tempfile.TemporaryDirectory(dir=_made(CACHE)) as incoming:
        with tarfile.open(index.Index().fetch(release.sdist, CACHE)) as archive:
            inside = [member for member in archive.getmembers() if member.name.split("/")[1:2] == ["tests"]]
            archive.extractall(incoming, inside, filter="data")
        found = list(Path(incoming).iterdir())
        if len(found) != 1:
            raise Problem(f"the sdist of {name} {version} has no tests")
        # What a test imports from beside it; empty files like this one are missing from some sdists.
        (found[0] / "tests" / "__init__.py").touch()
        os.rename(found[0], place)
    return place


def compare(upstream: Upstream, tests: Path, at_start: str, seconds: float) -> Found:
    """Run the tests in a folder on both sides.

    Args:
        upstream: whose they are, and which.
        tests: the folder that has the folder ``tests``.
        at_start: what a process runs at its start to have the patches on.
        seconds: the limit for each file.

    Raises:
        Problem: nothing was compared.
    """
    with tempfile.TemporaryDirectory(prefix="upstream-") as temporary:
        folder = Path(temporary)
        for side in SIDES:
            shutil.copytree(tests, _work(folder, side), ignore=shutil.ignore_patterns("__pycache__"))
            (_work(folder, side) / "pytest.ini").write_text("[pytest]\n")  # upstream's wants plugins, for coverage say
        (_made(folder / "start") / "sitecustomize.py").write_text(at_start)
        rounds = [_both(upstream, folder, upstream.files, seconds)]
        released, patched = (rounds[0][side].tests for side in SIDES)
        if not released:
            raise Problem("\n".join([f"{upstream.name}: no test ran", *rounds[0][RELEASED].problems]))
        differing = [test for test in sorted({*released, *patched}) if released.get(test) != patched.get(test)]
        if differing:
            again = {file: more for file, more in upstream.files.items() if file in map(_file, differing)}
            rounds += [_both(upstream, folder, again, seconds) for _ in range(2)]
        different: list[str] = []
        flaky: list[str] = []
        for test in differing:
            how = {side: [str(each[side].tests.get(test, "not there")) for each in rounds] for side in SIDES}
            said = "; ".join(f"{', '.join(how[side])} {side}" for side in SIDES)
            (flaky if len(set(how[RELEASED])) > 1 else different).append(f"{test}: {said}")
        problems = [problem for side in SIDES for problem in rounds[0][side].problems]
        return Found(released, different, flaky, _applied(folder, upstream), problems)


def _both(upstream: Upstream, folder: Path, files: Files, seconds: float) -> dict[str, Ended]:
    """How each test of these files ended, by side; the two sides at a time."""
    with ThreadPoolExecutor(2) as pool:
        running = {side: pool.submit(_run, upstream, folder, side, files, seconds) for side in SIDES}
    return {side: how.result() for side, how in running.items()}


def _run(upstream: Upstream, folder: Path, side: str, files: Files, seconds: float) -> Ended:
    """How each test of these files ended on one side: passed, skipped, or what was raised."""
    out = Path(tempfile.mkdtemp(dir=folder))
    reports = {file: out / f"{file.replace('/', '.')}.xml" for file in files}
    plugins = [part for name in upstream.plugins for part in ("-p", name)]
    always = ["-q", "--tb=line", "-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider", *plugins]
    logs = {file: report.with_suffix(".log") for file, report in reports.items()}
    runs = [
        {"arguments": [*always, "--junit-xml", str(reports[file]), file, *more], "log": str(logs[file])}
        for file, more in files.items()
    ]
    jobs = out / "jobs.json"
    jobs.write_text(json.dumps({"module": upstream.module, "seconds": seconds, "runs": runs}))
    done = subprocess.run(
        [sys.executable, str(HERE / "each_file.py"), str(jobs)],
        cwd=_work(folder, side),
        env=_environment(folder, side),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Problem(f"{upstream.name}, {side}: {done.stderr[-3000:]}")
    problems, found = [], {}
    ended = json.loads(done.stdout.splitlines()[-1])
    for (file, report), status in zip(reports.items(), ended, strict=True):
        if status not in TESTS_RAN or not report.exists():
            said = logs[file].read_text(errors="replace")[-2000:]
            problems.append(f"{upstream.name}, {file} {side}: status {status}\n{said}")
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            found[f"{file}: {case.get('classname')}.{case.get('name')}"] = _ended(case)
    return Ended(found, problems)


def _environment(folder: Path, side: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_PATCHES_")}
    environment |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # No network, and nothing that the user has or will miss; threads would only get into each other's way.
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home" / side),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    if side == PATCHED:
        path = [str(folder / "start"), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        environment |= {"RLHF_PATCHES_AUTOLOAD": "1", "RLHF_PATCHES_REPORT": str(folder / "patches.jsonl")}
    return environment


def _ended(case: ElementTree.Element) -> str:
    """Which exception it is, if any: messages differ from run to run, by addresses and paths."""
    kinds = []
    for child in case:
        if child.tag in ("failure", "error"):
            raised = (child.get("message") or "").partition(":")[0]
            kinds.append(f"{child.tag} ({raised if re.fullmatch(r'[A-Za-z_.]+', raised) else 'assert'})")
        elif child.tag == "skipped":
            kinds.append(child.tag)
    return " and ".join(kinds) or "passed"


def _applied(folder: Path, upstream: Upstream) -> list[str]:
    """The patches that were on in the processes of the patched side."""
    report = folder / "patches.jsonl"
    lines = report.read_text().splitlines() if report.exists() else []
    patches = [patch for line in lines if line.strip() for patch in json.loads(line)["patches"]]
    wrong = sorted({f"{patch['name']}: {patch['reason']}" for patch in patches if patch["status"] in PROBLEMS})
    if wrong:
        raise Problem(f"{upstream.name}: patches were refused or failed:\n" + "\n".join(wrong))
    applied = sorted({patch["name"] for patch in patches if patch["status"] == "applied"})
    if not applied:
        raise Problem(f"{upstream.name}: no patch was on in any of {len(lines)} processes")
    return applied


def _file(test: str) -> str:
    return test.partition(": ")[0]


def _work(folder: Path, side: str) -> Path:
    return folder / "work" / side


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ------------------------------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    known = chosen()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=900, help="the limit for each file (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no tests are chosen of {', '.join(unknown)}")
    # As in an environment where the wheel is installed: what its .pth file has Python run.
    at_start = (ROOT / "site_hook" / "rlhf_patches.pth").read_text()
    wrong = False
    for name in options.names or known:
        started = time.monotonic()
        version = importlib.metadata.version(name)
        try:
            found = compare(known[name], tests_of(name, version), at_start, options.seconds)
        except Problem as problem:
            print(f"{name} {version}: NOT COMPARED: {problem}", flush=True)
            wrong = True
            continue
        for said in found.problems:
            print(f"NOT COMPARED: {said}")
        for test in found.different:
            print(f"DIFFERS {test}")
        for test in found.flaky:
            print(f"flaky as released, does not count: {test}")
        files = {file.partition("::")[0] for file in known[name].files}
        kinds = Counter(how.partition(" ")[0] for how in found.released.values())
        counts = ", ".join(f"{count} {how}" for how, count in kinds.most_common())
        print(
            f"{name} {version}: {len(found.released)} tests of {len(files)} files ({counts}); "
            f"{len(found.different)} differ {PATCHED}, in {time.monotonic() - started:.0f} s\n"
            f"    on: {', '.join(found.applied)}",
            flush=True,
        )
        wrong |= bool(found.different or found.problems)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
