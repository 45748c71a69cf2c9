"""`rlhf-patches rehearse` on a script as people have it, with its launcher, and on what it cannot rehearse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT, LOOP = (str(EXAMPLES / f"tiny_{name}.py") for name in ("trainer", "loop"))
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
exhaustive = pytest.mark.exhaustive


def rehearse(installed: Any, folder: Path, *arguments: str, **settings: str) -> Any:
    command = ("-m", "rlhf_patches", "rehearse", *arguments)
    return installed.run(installed.python, *command, cwd=folder, **QUIET, **settings)


def test_without_the_patches_then_with_them(installed, tmp_path):
    options = ("--without", "--json", "found.json", "--html", "page.html")
    done = rehearse(installed, tmp_path, *options, "--", "python", SCRIPT, "t5")
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == 1, done.stdout + done.stderr
    assert "weights 0x" not in done.stdout
    (first, *_) = found["relations"]
    assert (first["relation"], first["verdict"]) == ("micro-batch weights", "deviates")
    assert first["text"] == "4.000 x the mean over micro-batches"
    assert found["with"]["status"] == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="label" title=') == 5  # of the first row
    assert found["with"]["repaired"] == ["transformers-accumulation-scale"]
    assert "holds with the patches (transformers-accumulation-scale): micro-batch weights, duplicated" in done.stdout


@exhaustive
@pytest.mark.parametrize(("kind", "status"), [("bert", 0), ("gpt2", 0)])
def test_ranks(installed, tmp_path, kind, status):
    port = str(ranks.free_port())
    launcher = (
        "python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
    )
    done = rehearse(installed, tmp_path, "--json", "found.json", "--", *launcher, SCRIPT, kind)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == status, done.stdout + done.stderr
    assert done.stdout.count("rlhf-patches rehearse:") == 1
    assert "4 micro-batches on each of 2 ranks" in done.stdout


@exhaustive
def test_a_run_that_goes_on(installed, tmp_path):
    done = rehearse(installed, tmp_path, "--go-on", "--", "python", SCRIPT, "bert")
    alone = installed.run(installed.python, SCRIPT, "bert", cwd=tmp_path, RLHF_PATCHES_AUTOLOAD="1", **QUIET)
    trained = [line for line in alone.stdout.splitlines() if line.startswith("weights 0x")]
    assert len(trained) == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("weights 0x")] == trained
    assert done.returncode == 0


@pytest.mark.parametrize(
    "arguments", [("--never-cleared",), pytest.param((), marks=exhaustive), pytest.param(None, marks=exhaustive)]
)
def test_a_loop(installed, tmp_path, arguments):
    """None is one that goes on."""
    options = ("--go-on",) if arguments is None else ()
    done = rehearse(installed, tmp_path, *options, "--json", "found.json", "--", "python", LOOP, *(arguments or ()))
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == (1 if arguments else 0), done.stdout + done.stderr
    (first, *_) = found["relations"]
    assert first["relation"] == "gradient used"
    assert first["verdict"] == ("deviates" if arguments else "holds")
    assert ("weights 0x" in done.stdout) == (arguments is None)
    if arguments is None:
        alone = installed.run(installed.python, LOOP, cwd=tmp_path, RLHF_PATCHES_AUTOLOAD="1", **QUIET)
        assert alone.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


@exhaustive
def test_a_loop_on_ranks(installed, tmp_path):
    port = str(ranks.free_port())
    launcher = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    command = (*launcher, "--master-port", port, LOOP)
    done = rehearse(installed, tmp_path, "--json", "found.json", "--", *command)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == 0, done.stdout + done.stderr
    assert done.stdout.count("rlhf-patches rehearse:") == 1
    assert "parameters across ranks" in [each["relation"] for each in found["relations"]]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ((), "rehearse needs a command"),
        (("--without", "--go-on", "--", "python", "-c", ""), "use one of them"),
        (("--save", "--go-on", "--", "python", "-c", ""), "use one of them"),
        (("--against", "TP=1", "--go-on", "--", "python", "-c", ""), "use one of them"),
        (
            ("--against", "TP", "--", "python", "-c", ""),
            "--against: the layout is 'TP': expected sizes of TP, PP, EP or ETP",
        ),
        (("--time-limit", "0", "--", "python", "-c", ""), "expected a number of seconds above 0"),
        (("--json", "no/such/file", "--", "python", "-c", ""), "there is no folder"),
        (
            ("--", "python", "-c", "pass"),
            "before a training loop had taken a step",
        ),
        (("--", "python", "-c", "raise SystemExit(3)"), "ended with status 3 before"),
    ],
)
def test_what_cannot_be_rehearsed(installed, tmp_path, command, says):
    done = rehearse(installed, tmp_path, *command)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_word_that_is_none(installed, tmp_path):
    done = installed.run(
        installed.python, "-c", "import rlhf_patches; rlhf_patches.apply()", RLHF_PATCHES_REHEARSE="ja"
    )
    assert done.returncode != 0
    words = "1, go-on, without, save, memory=low or time-limit=SECONDS"
    assert f"RLHF_PATCHES_REHEARSE has 'ja': expected {words}" in done.stderr


def test_a_limit_of_time(installed, tmp_path):
    done = rehearse(installed, tmp_path, "--time-limit", "0.01", "--json", "found.json", "--", "python", SCRIPT, "bert")
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == 2, done.stdout + done.stderr
    (row,) = found["relations"]
    assert (row["relation"], row["verdict"]) == ("first window", "not checked")
    assert row["text"] == "the time limit of 0.01 s ended the rehearsal here"


@exhaustive
def test_little_memory(installed, tmp_path):
    done = rehearse(installed, tmp_path, "--memory", "low", "--json", "found.json", "--", "python", SCRIPT, "bert")
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == 0, done.stdout + done.stderr
    left = [each["relation"] for each in found["relations"] if "with --memory low" in each["text"]]
    assert left == ["duplicated micro-batch", "directional derivative", "swapped rows"]


@exhaustive
def test_a_checkpoint(installed, tmp_path):
    done = rehearse(installed, tmp_path, "--save", "--json", "found.json", "--", "python", SCRIPT, "bert")
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == found["status"] == 0, done.stdout + done.stderr
    (row,) = [each for each in found["relations"] if each["relation"] == "checkpoint"]
    assert row["verdict"] == "holds"
    assert "weights 0x" not in done.stdout
