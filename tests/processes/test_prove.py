"""``prove``: a proof's ranks in processes of their own, with limits, of which nothing is left; by a plugin's proof."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_patches.cli import prove as prove_command

NAME = "toy-sum"
PLUGIN = """
from rlhf_patches import Guard, Patch, Rewrite, Variant, hookimpl

def patch(name, function):
    return Patch(
        name=name, summary="s", symptom="s", cause="c", repair="r", references=("r",), obsolete_when="r",
        variants=(Variant(Guard("toyframework", ">=1"), (Rewrite(f"toyframework:{function}", "$A - $B", "$A + $B"),)),),
    )
"""
OWN = "from toyplugin.base import patch\nPATCH = patch({!r}, {!r})\n"
PROOF = """
from rlhf_patches.proving.proof import Case, Proof, Row

CASE = Case("toyframework", "toy-sum", "two numbers", "the sum of two numbers")

def rows(reports):
    assert len(reports) == RANKS
    for report in reports[:1]:
        before, after, right = report["before"], report["after"], report["right"]
        said = str(before), str(after), f"sum {right}"
        unaffected = before == after == right
        yield Row(CASE, report["version"], *said, after == right != before, said, unaffected)

RANKS = 2
PROOF = Proof((CASE,), rows, ranks=RANKS)
"""
WORKER = """
import json, os, subprocess, sys, time
from pathlib import Path
from rlhf_patches.proving import states

def main():
    options = states.parser().parse_args()
    notes = Path(__file__).parents[3] / "notes"  # no variable of the command's gets here
    (notes / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    (notes / f"seen{os.environ['RANK']}").write_text(json.dumps([sys.path[0], os.getcwd(), dict(os.environ)]))
    gpu = [os.environ.get(name) for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]
    (notes / f"gpu{os.environ['RANK']}").write_text(json.dumps(gpu))
    kind = (notes / "kind").read_text()
    if kind == "fails":
        raise KeyError("what is wrong")
    if kind == "port taken" and not (notes / "taken").exists():
        if os.environ["RANK"] == "0":
            (notes / "taken").write_text("")
            raise OSError("EADDRINUSE")
        time.sleep(600)
    if kind == "says nothing":
        return
    if kind == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (notes / f"pid{os.environ['RANK']}-child").write_text(str(child.pid))
        time.sleep(600)
    if kind == "grows":
        kept = bytearray(os.urandom(2**20)) * 400
        time.sleep(600)
    from toyframework import add
    states.report("toy-sum", lambda: add(2, 3) if kind != "right" else 5, options.out)
    file = options.out / f"rank{os.environ['RANK']}.json"
    report = json.loads(file.read_text())
    file.write_text(json.dumps({**report, "right": 6 if kind == "another sum" else 5}))
"""


@pytest.fixture
def site(tmp_path):
    """A folder with a framework, and a plugin for it with three patches, of which two have a proof."""
    folder = tmp_path / "site"
    files = {
        "toyframework/__init__.py": "def add(a, b):\n    return a - b\n\ndef sum(a, b):\n    return a - b\n",
        "toyframework-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toyframework\nVersion: 1.0\n",
        "toyframework-1.0.dist-info/RECORD": "toyframework/__init__.py,,\n",
        "toyplugin/__init__.py": "from rlhf_patches import hookimpl\nfrom toyplugin import another, more, sum\n"
        "@hookimpl\ndef rlhf_patches():\n    return [sum.PATCH, more.PATCH, another.PATCH]\n",
        "toyplugin/base.py": PLUGIN,
        "toyplugin/sum.py": OWN.format("toy-sum", "add"),
        "toyplugin/more.py": OWN.format("toy-more", "sum"),
        "toyplugin/another.py": OWN.format("toy-another", "gone").replace(">=1", ""),
        "toyplugin/proofs/__init__.py": "",
        "toyplugin/proofs/sum.py": PROOF,
        "toyplugin/proofs/sum_ranks.py": WORKER,
        "toyplugin-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toyplugin\nVersion: 1.0\n",
        "toyplugin-1.0.dist-info/entry_points.txt": "[rlhf_patches]\ntoy = toyplugin\n",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def command(site, *arguments):
    return [sys.executable, "-m", "rlhf_patches", "prove", *arguments]


def environment(site, kind="", **settings):
    home, notes, temporary = (site.parent / name for name in ("home", "notes", "temporary"))
    for folder in (home, notes, temporary):
        folder.mkdir(exist_ok=True)
    (notes / "kind").write_text(kind)
    given = {"PYTHONPATH": str(site), "HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **given, **settings}


@pytest.fixture
def prove(site):
    """Runs the command in an empty folder; returns status, standard output and error."""

    def run(*arguments, **settings):
        done = subprocess.run(
            command(site, *arguments),
            env=environment(site, **settings),
            cwd=site.parent / "home",
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    (site.parent / "home").mkdir()
    return run


def test_without_it_with_it_and_what_it_is_held_against(prove, site):
    status, said, complained = prove(NAME)
    assert (status, complained) == (0, "")
    lines = [line.split() for line in said.splitlines()]
    assert lines[0][:2] == ["PATCH", "VERDICT"]
    assert lines[1][:-1] == [NAME, "repaired", "1.0", "two", "numbers", "-1", "5", "sum", "5"]
    assert said.endswith("1 case: 1 repaired\n")


def test_as_json(prove):
    status, said, _ = prove(NAME, "--json")
    (row,) = json.loads(said)
    assert row.pop("seconds") > 0
    assert (status, row) == (
        0,
        {
            "patch": NAME,
            "verdict": "repaired",
            "release": "1.0",
            "case": "the sum of two numbers",
            "without": "-1",
            "with": "5",
            "held_against": "sum 5",
            "reason": "",
            "on": "cpu",
        },
    )


def test_what_is_not_repaired(prove):
    status, said, _ = prove(NAME, kind="another sum")
    assert status == 1
    assert "NOT repaired" in said


@pytest.mark.one_python
def test_a_case_that_is_right_as_released(prove):
    """A release may have the bug in other cases alone."""
    status, said, _ = prove(NAME, kind="right")
    assert status == 0
    assert said.endswith("1 case: 1 unaffected\n")


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("fails", (), "rank 0 ended with status 1: KeyError: 'what is wrong'"),
        ("says nothing", (), "wrote no report"),
        ("hangs", ("--seconds", "3"), "it exceeded the limit of 3 seconds (--seconds)"),
        pytest.param(
            *("grows", ("--memory", "0.3"), "a rank exceeded the limit of 0.3 GiB (--memory)"),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="memory is read in /proc"),
        ),
    ],
)
def test_what_could_not_be_tried(prove, site, kind, options, reason):
    status, said, _ = prove(NAME, *options, kind=kind)
    assert status == 2
    assert "not tried" in said
    assert reason in " ".join(said.split()).replace("rank 1 ended", "rank 0 ended")
    assert not any(map(alive, pids(site)))


@pytest.mark.one_python
def test_a_port_that_was_taken_in_between(prove):
    """It is chosen before the ranks start: where other processes are many, one of them may have it by then."""
    status, said, _ = prove(NAME, kind="port taken")
    assert status == 0, said


def test_each_proof_is_told_as_it_ends_and_ctrl_c_keeps_what_was_done(monkeypatch, capsys):
    """Three proofs of 5, 5 and 20 s as declared; the last one is interrupted."""
    runs = [
        (SimpleNamespace(name=name), SimpleNamespace(proof=SimpleNamespace(seconds=seconds, gpu=False)))
        for name, seconds in (("first", 5), ("second", 5), ("third", 20))
    ]

    def outcomes(row, *_):
        if row.name == "third":
            raise KeyboardInterrupt
        yield prove_command._Outcome(row.name, "1.0", None, 1.0)

    clock = iter([0.0, 4.0, 8.0])
    monkeypatch.setattr(prove_command, "_outcomes", outcomes)
    monkeypatch.setattr(prove_command.time, "monotonic", lambda: next(clock))
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(prove_command._run(runs, SimpleNamespace(seconds=1, gpu=False, jobs=1), 1))
    assert [row.name for row, _ in found] == ["first", "second"]
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3: first: not tried; about 20 s left",
        "2 of 3: second: not tried; about 16 s left",
    ]


@pytest.mark.parametrize(("options", "most"), [({"jobs": 2}, 2), ({"gpu": True, "jobs": None}, 1)])
def test_proofs_run_beside_each_other(monkeypatch, options, most):
    """On a GPU, which all of them would share, one by one."""
    runs = [
        (SimpleNamespace(name=str(number)), SimpleNamespace(proof=SimpleNamespace(seconds=5, gpu=False)))
        for number in range(6)
    ]
    now, seen = [], []

    def outcomes(row, *_):
        now.append(row.name)
        seen.append(len(now))
        time.sleep(0.05)
        now.remove(row.name)
        return ()

    monkeypatch.setattr(prove_command, "_outcomes", outcomes)
    chosen = SimpleNamespace(**{"seconds": 1, "gpu": False, **options})
    found = {row.name for row, _ in prove_command._run(runs, chosen, 1)}
    assert (found, max(seen)) == (set("012345"), most)


@pytest.mark.one_python
def test_by_default_all_that_apply_here(prove):
    status, said, _ = prove()
    assert NAME in said
    assert "toy-more" not in said
    assert "patches that apply here have no proof; see their pages" in said
    assert status == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("toy-more", "it has no proof: no reason is given"),
        ("toy-another", "refused: "),
        ("trl-grpo-dapo-scale", "absent"),
    ],
)
def test_a_name_that_cannot_be_tried(prove, name, reason):
    status, said, _ = prove(name)
    assert status == 2
    assert reason in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("toy-sun",), "there is no patch 'toy-sun'; did you mean 'toy-sum'?"),
        (("--seconds", "0"), "--seconds and --memory are limits: expected numbers above 0"),
        (("--memory", "-1", NAME), "--seconds and --memory are limits: expected numbers above 0"),
        (("--seconds", "soon"), "invalid float value: 'soon'"),
        (("--jobs", "0"), "--jobs is a number of proofs: expected 1 or more"),
    ],
)
def test_wrong_input(prove, arguments, message):
    status, said, complained = prove(*arguments)
    assert (status, said) == (2, "")
    assert message in " ".join(complained.split())


@pytest.mark.one_python
def test_a_proof_that_is_none(prove, site):
    (site / "toyplugin" / "proofs" / "sum.py").write_text("PROOF = 1\n")
    status, _, complained = prove(NAME)
    assert status == 2
    assert "toyplugin.proofs.sum.PROOF is 1: expected a Proof with a case of toy-sum" in " ".join(complained.split())


def test_ranks_have_their_own_settings_and_leave_nothing_behind(prove, site):
    """A user's site hook would have patched the framework before it was looked at as released."""
    launchers = {
        **{
            "RANK": "7",
            "TORCHELASTIC_RUN_ID": "1",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "TORCH_DISTRIBUTED_DEBUG": "1",
        },
        **{"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "GLOO_SOCKET_IFNAME": "none", "NCCL_DEBUG": "INFO"},
        **{"PYTHONWARNINGS": "always", "PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "2", "A_NAME_THAT_NOBODY_KNOWS": "1"},
    }
    status, _, _ = prove(NAME, RLHF_PATCHES_LOG="off", RLHF_PATCHES_REPORT=str(site.parent / "report"), **launchers)
    assert status == 0
    for rank in range(2):
        first, folder, seen = json.loads((site.parent / "notes" / f"seen{rank}").read_text())
        assert first == str(site), "neither the folder that it is started in nor that of its own file"
        assert not Path(folder).exists()
        assert {name: seen[name] for name in seen if name.startswith("RLHF_PATCHES_")} == {"RLHF_PATCHES_AUTOLOAD": "0"}
        assert {name: seen[name] for name in launchers if name in seen} == {"RANK": str(rank), "OMP_NUM_THREADS": "1"}
        assert seen["HOME"] == str(site.parent / "home")
    for name in ("home", "temporary"):
        assert list((site.parent / name).iterdir()) == []
    assert not (site.parent / "report").exists()


AUTOLOAD_IS_ON = "from rlhf_patches.site_hook import install\ninstall('1', ('toyframework',))\n"
APPLIED_BY_THE_SITE = "import rlhf_patches\nrlhf_patches.apply(only='toy-sum')\n"


@pytest.mark.one_python
def test_where_autoload_is_on(prove, site):
    """As in a container's image: the hook takes a variable that is not set for 1."""
    (site / "sitecustomize.py").write_text(AUTOLOAD_IS_ON)
    status, said, _ = prove(NAME)
    assert status == 0
    assert said.endswith("1 case: 1 repaired\n")


@pytest.mark.one_python
@pytest.mark.parametrize("late", [False, True])
def test_what_is_not_as_released_is_not_tried(prove, site, late):
    """Be it before the worker begins, or by what imports the framework."""
    where = site / ("toyframework/__init__.py" if late else "sitecustomize.py")
    where.write_text((where.read_text() if late else "") + APPLIED_BY_THE_SITE)
    status, said, _ = prove(NAME)
    assert status == 2
    assert f"RuntimeError: not as released: {NAME} applied already" in " ".join(said.split())


NO_GPU = """
def get_device_name(number):
    raise RuntimeError("No CUDA GPUs are available")
"""
A_GPU = """
import os

def get_device_name(number):
    return f"GPU {os.environ['CUDA_VISIBLE_DEVICES']} of a stand-in"
"""


@pytest.fixture
def cuda(site):
    """Writes a stand-in for torch.cuda."""

    def write(text):
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text("from . import cuda\n")
        (site / "torch" / "cuda.py").write_text(text)

    return write


def gpus(site):
    return [json.loads((site.parent / "notes" / f"gpu{rank}").read_text()) for rank in range(2)]


@pytest.mark.one_python
@pytest.mark.parametrize(("visible", "first"), [({}, "0"), ({"CUDA_VISIBLE_DEVICES": "3,1"}, "3")])
def test_on_a_gpu(prove, site, cuda, visible, first):
    """All ranks on the first that the command sees, as many as there are: two would need NCCL and a GPU each."""
    cuda(A_GPU)
    proof = site / "toyplugin" / "proofs" / "sum.py"
    proof.write_text(proof.read_text().replace("ranks=RANKS", "ranks=RANKS, gpu=True"))
    status, said, complained = prove(NAME, "--gpu", **visible)
    assert (status, complained) == (0, "")
    assert said.endswith(f"1 case: 1 repaired\non GPU {first} of a stand-in: {NAME}; the others on the CPU\n")
    assert gpus(site) == [["0", first, None]] * 2
    assert json.loads(prove(NAME, "--gpu", "--json", **visible)[1])[0]["on"] == "gpu"


@pytest.mark.one_python
def test_a_proof_that_is_for_the_cpu(prove, site, cuda):
    cuda(A_GPU)
    status, said, _ = prove(NAME, "--gpu")
    assert (status, gpus(site)) == (0, [["0", "", ""], ["1", "", ""]])
    assert said.endswith("on GPU 0 of a stand-in: none\n")


@pytest.mark.one_python
def test_no_gpu_where_one_is_asked_for(prove, site, cuda):
    """It is not tried on the CPU instead: the answer would be another's."""
    cuda(NO_GPU)
    status, said, complained = prove(NAME, "--gpu")
    assert (status, said) == (2, "")
    assert (
        "--gpu: torch has no GPU here (RuntimeError: No CUDA GPUs are available); "
        "without --gpu every proof runs on the CPU" in " ".join(complained.split())
    )
    assert not pids(site)


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGHUP, -1), (signal.SIGKILL, -9)]
)
def test_what_ends_the_command_ends_its_ranks_and_removes_its_folder(site, sent, status):
    """And what the ranks have started."""
    settings = environment(site, kind="hangs")
    process = subprocess.Popen(
        command(site, NAME),
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # SIGINT is ignored in a shell's background, SIGHUP under nohup.
        preexec_fn=lambda: sent is signal.SIGKILL or signal.signal(sent, signal.SIG_DFL),
    )
    try:
        until = time.monotonic() + 60
        while len(pids(site)) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        ranks = pids(site)
        assert len(ranks) == 4
        assert all(map(alive, ranks))
        process.send_signal(sent)
        assert process.wait(30) == status
        if sent is signal.SIGINT:
            assert f"interrupted; not run: {NAME}" in process.stdout.read().decode()
        until = time.monotonic() + 10
        temporary = site.parent / "temporary"
        while (any(map(alive, ranks)) or [*temporary.iterdir()]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(alive, ranks))
        assert not [*temporary.iterdir()]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.one_python
def test_folders_of_commands_that_are_gone_are_removed(prove, site):
    """Where a job was killed as a whole. Of one that runs, maybe in another container, the folder stays."""
    temporary = site.parent / "temporary"
    for name in ("gone", "runs", "starts"):
        (temporary / f"rlhf-patches-prove-{name}").mkdir(parents=True)
    (temporary / "rlhf-patches-prove-gone" / "running").touch()
    with open(temporary / "rlhf-patches-prove-runs" / "running", "wb") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        assert prove(NAME)[0] == 0
    assert {path.name for path in temporary.iterdir()} == {"rlhf-patches-prove-runs", "rlhf-patches-prove-starts"}


def pids(site):
    """Those that have been noted whole."""
    texts = [file.read_text() for file in (site.parent / "notes").glob("pid*")]
    return [int(text) for text in texts if text]


def alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
