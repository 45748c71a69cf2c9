"""What goes wrong on clusters, made to go wrong: a rank without the package, another version, killed ranks, a rush."""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rlhf_patches.offline import download
from tests.harness import ranks, toy_slime
from tests.harness.installed import Installed

WORKER = Path(ranks.__file__).with_name("verify_ranks.py")
CACHE = Path(__file__).parents[2] / ".cache" / "rlhf-patches"
BY_ITSELF = {"RLHF_PATCHES_AUTOLOAD": "1", "RLHF_PATCHES_VERIFY": "1"}
PATCH = "trl-chunked-nll-zero3"


@pytest.mark.parametrize("without", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_rank_without_the_package(installed, tmp_path, without):
    bare = Installed.create(tmp_path / "bare")
    python = {rank: bare.python if rank == without else installed.python for rank in range(3)}
    with ranks.store_of_a_launcher() as port:  # the rank that is done at once must not take it away
        ended = ranks.run(WORKER, ("init_only", "15"), 3, port=port, python=python, settings=BY_ITSELF)
    assert [rank.said["there"] for rank in ended] == [rank != without for rank in range(3)]
    assert ended[without].said["init"] is None
    others = [rank for rank in range(3) if rank != without]
    (text,) = {ended[rank].said["init"] for rank in others}
    assert text.startswith(f"VerifyError: rank {without} of 3 has not called rlhf_patches.verify() within 15 s: ")
    assert "without rlhf_patches" in text
    assert f"Present: ranks {others[0]}" in text


def release(version: str, folder: Path) -> str:
    """A published wheel of TRL in a folder, to be first on PYTHONPATH."""
    wheel = download.fetch(f"trl=={version}", CACHE)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return str(folder)


def told(ended: list[ranks.Ended]) -> list[str]:
    """What all ranks are told of the patch when their group is initialized, by lines."""
    (text,) = {rank.said["init"] for rank in ended}
    return text.split(f"{PATCH}:\n")[1].splitlines()


def test_ranks_with_other_versions_of_the_framework(installed, tmp_path):
    """On disk only: nothing of it has been imported when the group is initialized, and it is found all the same."""
    own = {
        0: {"PYTHONPATH": release("1.14.2", tmp_path / "ours")},
        1: {"PYTHONPATH": release("1.15.0", tmp_path / "newer")},
        2: {"PYTHONPATH": release("1.6.0", tmp_path / "older")},
    }
    lines = told(ranks.run(WORKER, ("init_only",), 3, python=installed.python, settings=BY_ITSELF, own=own))
    assert re.search(r"^  rank 0 on .*: pending \(trl 1\.14\.2, code [0-9a-f]{16}\)$", lines[0])
    assert "  rank 1 on " in lines[1]
    assert lines[1].endswith("): unaffected (trl 1.15.0 is not affected (affected: >=1.4.0,<1.15.0))")
    assert re.search(r"^  rank 2 on .*: pending \(trl 1\.6\.0, code [0-9a-f]{16}\)$", lines[2])


def test_a_file_that_was_edited_on_one_host(forkserver, tmp_path):
    folder = Path(release("1.14.2", tmp_path / "edited"))
    module = folder / "trl" / "trainer" / "sft_trainer.py"
    text = module.read_text()
    assert "loss = loss + chunk_loss" in text
    module.write_text(text.replace("loss = loss + chunk_loss", "loss = loss + 1.0 * chunk_loss"))
    own = {
        0: {"PYTHONPATH": release("1.14.2", tmp_path / "plain")},
        1: {"PYTHONPATH": str(folder)},
    }
    arguments, settings = ("init_only", "60", "apply"), {"RLHF_PATCHES_VERIFY": "1"}
    lines = told(ranks.run_forked(forkserver, tmp_path / "ranks", WORKER, arguments, settings=settings, own=own))
    codes = [re.search(r": pending \(trl 1\.14\.2, code ([0-9a-f]{16})\)$", line)[1] for line in lines[:2]]
    assert codes[0] != codes[1]


@pytest.fixture
def killed(forkserver, slime, tmp_path):
    """Three ranks, of which one kills itself in verify()."""

    def run(when: str, seconds: int, victim: int, **options: Any) -> list[ranks.Ended]:
        settings = {"PYTHONPATH": str(slime), "VICTIM": str(victim)}
        ended = ranks.run_forked(
            forkserver, tmp_path, WORKER, ("killed", when, str(seconds)), 3, settings=settings, **options
        )
        assert ended[victim].status == -9
        return ended

    return run


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_verify(killed, victim):
    ended = killed("before", 10, victim, store_of_a_launcher=True)
    for rank in (0, 1, 2):
        if rank != victim:
            text = ended[rank].said["verify"]
            assert text.startswith(f"VerifyError: rank {victim} of 3 has not called rlhf_patches.verify() within 10 s")
            assert "killed" in text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_after_it_was_counted(killed, victim):
    """The others have all that they need, whoever was to compare: they agree, and go on."""
    ended = killed("after", 15, victim, store_of_a_launcher=True)
    assert [rank.said["verify"] for rank in ended if rank.status == 0] == [None, None], ended


def test_the_rank_with_the_store_is_killed(killed):
    """Without a launcher the store lives in rank 0; with it goes what could be said of single ranks."""
    _, *others = killed("before", 60, victim=0)
    for rank, ended in enumerate(others, start=1):
        text = ended.said["verify"]
        assert text.startswith(f"VerifyError: rank {rank} has lost the store of the process group during verify(). ")
        assert "store's process (rank 0" in text
        assert "DistNetworkError: " in text


@pytest.mark.exhaustive
def test_hundreds_of_processes_start_at_once(make_installed, slime, tmp_path):
    """One site-packages for all, without bytecode, the hook on: as when a job starts on a shared file system."""
    number = 200
    environment = make_installed()
    package = environment.site / "rlhf_patches"
    for folder in package.rglob("__pycache__"):
        shutil.rmtree(folder)
    report = tmp_path / "report.jsonl"
    code = f"import sys; sys.stdin.readline(); {toy_slime.LOOK}"
    settings = {"RLHF_PATCHES_AUTOLOAD": "1", "RLHF_PATCHES_LOG": "off", "RLHF_PATCHES_REPORT": str(report)}
    read, write = os.pipe()  # all wait for it, so that they are there before the first goes on
    with (tmp_path / "output").open("w+") as output:
        processes = [
            subprocess.Popen(
                [environment.python, "-c", code],
                cwd=slime,
                env=environment.environment(settings),
                stdin=read,
                stdout=output,
                stderr=output,
            )
            for _ in range(number)
        ]
        os.close(read)
        os.close(write)  # the end of the file: it wakes all of them
        assert {process.wait(timeout=500) for process in processes} == {0}
        output.seek(0)
        assert output.read().split() == ["applied"] * number
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert {line["pid"] for line in lines} == {process.pid for process in processes}
    for line in lines:
        assert {row["name"]: row["status"] for row in line["patches"]}[toy_slime.PATCH] == "applied"
    compiled = list(package.rglob("*.pyc"))
    assert {Path(importlib.util.source_from_cache(str(file))).stem for file in compiled} >= {"engine", "plugin"}
    for file in compiled:
        marshal.loads(file.read_bytes()[16:])
