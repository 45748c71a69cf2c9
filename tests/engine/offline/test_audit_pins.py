"""``rlhf-patches audit`` of pins where people have them: images, scripts, setup.py, conda's names, misspelled ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from rlhf_patches import cli
from rlhf_patches.definitions import registry
from rlhf_patches.offline import allowed, audit, base_images, names, pin_files, pins
from rlhf_patches.offline.pins import Pin, PinsError

REGISTERED = registry.load()[0]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The pins of the first of some files, given as texts by name, and what of it counts as not understood."""
    monkeypatch.chdir(tmp_path)

    def reading(files):
        for name, text in files.items():
            Path(name).write_text(text)
        found = pin_files.read(next(iter(files)))
        pins = [(pin.name, pin.version, pin.place) for pin in found.pins]
        return pins, [(each.place, each.why) for each in audit.that_count(found.unread, REGISTERED)]

    return reading


SETUP = """import warnings; "\\d"
LATER = ["peft==0.19.0"]
setuptools.setup(name="x", install_requires=["trl==1.5.1", *LATER] + ['x'], extras_require={"a": ["verl==0.5.0"]})
"""
STAGES = """ARG TRL=1.5.1
FROM python AS base
ARG TRL
ENV PEFT 0.19.0
FROM base
RUN --mount=type=cache,target=/x set -e; \\
    # a comment
    pip install trl==$TRL \\
      "peft==${PEFT}"
"""
PINS = {
    "ARG and ENV, stages, lines": (
        {"Dockerfile": STAGES},
        [("trl", "1.5.1", "Dockerfile:8"), ("peft", "0.19.0", "Dockerfile:9")],
    ),
    "a copied file": (
        {
            "Dockerfile": "FROM x\nCOPY a/ b.txt /tmp/\nRUN pip install -r /tmp/b.txt\n",
            "b.txt": "x==1\ntrl==1.5.1\n",
        },
        [("x", "1", "b.txt:1"), ("trl", "1.5.1", "b.txt:2")],
    ),
    "a bound file": (
        {
            "Dockerfile": "FROM x\nRUN --mount=type=bind,source=b.txt,target=c.txt pip install -r c.txt\n",
            "b.txt": "trl==1\n",
        },
        [("trl", "1", "b.txt:1")],
    ),
    "a copied file, relative": (
        {"Dockerfile": "FROM x\nWORKDIR /a\nCOPY b.txt ./\nRUN cd c && pip install -r ../b.txt\n", "b.txt": "trl==1\n"},
        [("trl", "1", "b.txt:1")],
    ),
    "a copied folder": (
        {"Dockerfile": "FROM x\nCOPY . /app\nRUN pip install -r /app/b.txt\n", "b.txt": "trl==1.5.1\n"},
        [("trl", "1.5.1", "b.txt:1")],
    ),
    "a script of the Dockerfile": (
        {"Dockerfile": "FROM x\nCOPY i.sh /i.sh\nRUN bash /i.sh\n", "i.sh": "V=1.5.1\npip install trl==$V\n"},
        [("trl", "1.5.1", "i.sh:2")],
    ),
    "a document": (
        {"Dockerfile": "FROM x\nRUN <<EOF\nif a; then\n pip install \\\n trl==1.5.1\nfi\nEOF\nRUN pip install x==1"},
        [("trl", "1.5.1", "Dockerfile:5"), ("x", "1", "Dockerfile:8")],
    ),
    "a script": (
        {
            "install.sh": "set -e\npip install trl==1.5.1 \\\n  peft==0.19.0 # x==1\nsource more.sh\n",
            "more.sh": "pip install y==2\n",
        },
        [("trl", "1.5.1", "install.sh:2"), ("peft", "0.19.0", "install.sh:3"), ("y", "2", "more.sh:1")],
    ),
    "a script by its first line": (
        {"install": "#!/usr/bin/env bash\nuv pip install trl==1.5.1\n"},
        [("trl", "1.5.1", "install:2")],
    ),
    "conda install": (
        {"i.sh": "conda install -y -c x pytorch=2.5.1 trl\n"},
        [("torch", "2.5.1", "i.sh:1"), ("trl", None, "i.sh:1")],
    ),
    "setup.py": (
        {"setup.py": SETUP},
        [
            ("trl", "1.5.1", "setup.py:3"),
            ("peft", "0.19.0", "setup.py:2"),
            ("x", None, "setup.py:3"),
            ("verl", "0.5.0", "setup.py:3"),
        ],
    ),
    "setup.cfg": (
        {"setup.cfg": "[options]\ninstall_requires =\n  trl==1.5.1\n[options.extras_require]\na = peft==0.19.0\n"},
        [("trl", "1.5.1", "setup.cfg:3"), ("peft", "0.19.0", "setup.cfg")],
    ),
    "uv's lists": (
        {"pyproject.toml": "[tool.uv]\noverride-dependencies=['trl==1.5.1']\nconstraint-dependencies=['peft==0.19.0']"},
        [("trl", "1.5.1", "pyproject.toml"), ("peft", "0.19.0", "pyproject.toml")],
    ),
    "a range of one": ({"a.txt": "trl>=1.5.1,<=1.5.1\n"}, [("trl", "1.5.1", "a.txt:1")]),
    "conda list": ({"a.txt": "# Name  Version  Build\npytorch  2.5.1  py_0\n"}, [("torch", "2.5.1", "a.txt:2")]),
    "environment.yml": ({"e.yml": "dependencies:\n- pytorch=2.5.1\n"}, [("torch", "2.5.1", "e.yml:2")]),
    "an image": (
        {"Dockerfile": "FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel\n"},
        [("torch", "2.5.1", "Dockerfile:1")],
    ),
    "an image by ARG": (
        {"Dockerfile": "ARG T=2.5.1\nFROM pytorch/pytorch:${T}-devel as b\nFROM b\n"},
        [("torch", "2.5.1", "Dockerfile:2")],
    ),
}


@pytest.mark.parametrize("case", PINS)
def test_pins_that_are_there(read, case):
    files, expected = PINS[case]
    pins, unread = read(files)
    assert (pins, unread) == (expected, [])


SAID = {
    "a script that is not there": ("RUN bash install.sh", "runs 'install.sh', which is not there: pass that script"),
    "a file of the image": ("RUN pip install -r /tmp/x.txt", "'/tmp/x.txt', which is not there: pass that file"),
    "an image without versions": ("FROM nvcr.io/nvidia/pytorch:25.01-py3", "contains torch and transformer-engine"),
    "an image that nobody names": ("FROM ${BASE}", "FROM '${BASE}' has no value here: name the image"),
    "conda's name": ("COPY pytorch /x", "COPY 'pytorch /x' is not read"),
    "a file of another folder": ("RUN cd y && pip install -r a.txt", "'a.txt', which is not there: pass that file"),
    "a file that is not copied": ("RUN pip install -r a.txt", "'a.txt', which is not there: pass that file, too"),
    "no shell": ("RUN pip install trl==1 'x", "is not a shell command"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_cannot_be_read_is_said_with_the_next_step(read, case):
    line, said = SAID[case]
    _, unread = read({"Dockerfile": f"FROM python\nRUN pip install x==1\n{line}\n", "a.txt": "trl==1.5.1\n"})
    assert [place for place, _ in unread] == ["Dockerfile:3"]
    assert said in unread[0][1]


REPLACED = {
    "later": ("pip install trl==2 x==1", True),
    "later, in a chain": ("set -e; cd /x && pip install 'trl==2'", True),
    "what a file has": ("true\nRUN pip install -r a.txt && pip install trl==2 ", True),
    "with a variable between": ("true\nENV LD_LIBRARY_PATH=/x\nRUN pip install trl==2", True),
    "without a version": ("pip install -U trl", False),
    "under a condition": ("if [ -n $X ]; then pip install trl==2; fi", False),
    "after a test": ("[ -n $X ] && pip install trl==2; true", False),
    "after test": ("test -n $X && pip install trl==2; true", False),
    "where another fails": ("pip install x==1 || pip install trl==2", False),
    "in a function": ("f() { pip install trl==2; }", False),
    "somewhere else": ("pip install --target /x trl==2", False),
    "somewhere else by a letter": ("pip install -t /x trl==2", False),
    "by another program": ("/opt/venv/bin/pip install trl==2", False),
    "in another environment": (". /opt/venv/bin/activate && pip install trl==2", False),
    "on another path": ("true\nENV PATH=/opt/venv/bin:$PATH\nRUN pip install trl==2", False),
    "in a shell of conda": ('true\nSHELL ["conda", "run", "-n", "x"]\nRUN pip install trl==2', False),
    "in another build": ("true\nONBUILD RUN pip install trl==2", False),
    "after what is for another build": ("true\nONBUILD RUN pip install trl==1\nRUN pip install trl==2", False),
    "in another stage": ("true\nFROM y\nRUN pip install trl==2", False),
    "for another Python": ("pip install 'trl==2; python_version<\"3\"'", False),
    "what only constrains": ("pip install -c a.txt x==1", False),
}


@pytest.mark.parametrize("case", REPLACED)
def test_a_later_install_wins(read, case):
    line, replaced = REPLACED[case]
    files = {"Dockerfile": f"FROM x\nCOPY a.txt .\nRUN pip install trl==1\nRUN {line}\n", "a.txt": "trl==3\n"}
    pins, _ = read(files)
    versions = [version for name, version, _ in pins if name == "trl"]
    assert versions == (["2"] if replaced else ["1", *versions[1:]])


def test_a_file_of_two_stages_stays(read):
    """It is read once, but what is installed later in one stage is not in the other."""
    files = {
        "Dockerfile": "FROM x\nCOPY a.txt .\nRUN pip install -r a.txt\nRUN pip install trl==2\n"
        "FROM y\nCOPY a.txt .\nRUN pip install -r a.txt\n",
        "a.txt": "trl==3\n",
    }
    assert [version for _, version, _ in read(files)[0]] == ["3", "2"]


def test_a_value_that_another_stage_has_is_not_used(read):
    pins, unread = read({"Dockerfile": "FROM x AS a\nENV V=1.5.1\nFROM y\nRUN pip install x==1 trl==$V\n"})
    assert pins == [("x", "1", "Dockerfile:4")]
    assert unread == [("Dockerfile:4", "'trl==$V' is not a requirement (name==version)")]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (
            "r.io/modelscope-repo/modelscope:ubuntu22.04-torch2.6.0-vllm0.8.5.post1-swift3.5.3",
            {"torch": "2.6.0", "vllm": "0.8.5.post1", "ms-swift": "3.5.3"},
        ),
        (
            "verlai/verl:app-verl0.5-transformers4.55.4-vllm0.10.0-mcore0.13.0-te2.2",
            {"transformers": "4.55.4", "vllm": "0.10.0", "megatron-core": "0.13.0", "transformer-engine": None},
        ),
        ("vllm/vllm-openai:v0.8.5", {"vllm": "0.8.5"}),
        ("docker.io/pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel@sha256:ab", {"torch": "2.5.1"}),
        ("localhost:5000/x/trl", {}),
        ("pytorch/pytorch:latest", {}),
        ("x/a:best-outrl1.2.3", {}),
    ],
)
def test_versions_in_a_tag(image, expected):
    entries = list(base_images.read(image, image, "here"))
    assert {each.name: each.version for each in entries if hasattr(each, "version")} == expected


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("tlr", "trl"), ("transformer", "transformers"), ("open-rlhf", "openrlhf"), ("deepsped", "deepspeed")),
        *(("acelerate", "accelerate"), ("pfet", "peft"), ("msswift", "ms-swift"), ("transfromers", "transformers")),
        *((name, None) for name in ("url", "tri", "tr", "perf", "verb", "swift", "torchao", "trlx", "numpy", "vllm-x")),
    ],
)
def test_names_that_are_nearly_ours(name, meant):
    known = ["accelerate", "deepspeed", "ms-swift", "openrlhf", "peft", "torch", "transformers", "trl", "verl", "vllm"]
    assert names.meant(name, known) == meant


def test_a_misspelled_name_counts(read, capsys):
    read({"a.txt": "tlr==1.5.1\nx==1\n"})
    assert cli.main(["audit", "a.txt"]) == 1
    assert "a.txt:1: tlr is no supported package, but trl is: a mistake?\n" in capsys.readouterr().out
    Path("a.txt").write_text("slime==0.0.0\nsilme==1\n")
    assert cli.main(["audit", "a.txt"]) == 0


def test_a_requirement_as_an_argument(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", "trl==1.5.1", "--format", "github"]) == 1
    assert "file=" not in capsys.readouterr().out
    assert cli.main(["audit", "slime==0.0.0"]) == 0
    assert cli.main(["audit", "trl>=1"]) == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("setup.py", "setup(install_requires=f())", "setup.py:1: 'f()' is computed: run `pip freeze"),
        ("setup.py", "setup(**x)", "setup.py:1: setup(**...) is computed"),
        ("setup.py", "def", "is not valid Python"),
        ("setup.py", "-" * 100_000, "setup.py "),
        ("setup.py", "x = [y]\ny = x\nsetup(install_requires=x)", "is computed"),
        ("setup.cfg", "x", "is not a valid configuration"),
        ("a.sh", "a=(" * 1001, "a.sh has more than 1000 arrays"),
        ("Dockerfile", "FROM x\nRUN " + "a=(" * 1001, "Dockerfile has more than 1000 arrays"),
        ("Dockerfile", "FROM x\nENV " + "a=(" * 1001, "Dockerfile has more than 1000 arrays"),
    ],
)
def test_what_is_made_to_do_harm_is_an_error(read, name, text, said):
    with pytest.raises(PinsError) as error:
        read({name: text})
    assert said in str(error.value)


def test_a_script_that_changes_its_folder(read):
    pins, unread = read({"i.sh": "cd y\npip install x==1 -r a.txt\n", "a.txt": "trl==1.5.1\n"})
    assert pins == [("x", "1", "i.sh:2")]
    assert unread == [("i.sh:2", "names 'a.txt', which is not there: pass that file, too")]


def test_a_bug_of_several_releases_is_one_row(read, capsys):
    marker = "python_version < '3.12' and " + " and ".join(f"extra != 'x{n}'" for n in range(30))
    text = f"transformers==4.57.0; {marker}\n" + "".join(f"transformers==4.57.{n}\n" for n in range(1, 5))
    read({"a.txt": f"{text}peft==0.19.0\nx>1\n"})
    assert cli.main(["audit", "a.txt"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "transformers-accumulation-scale  " in line]
    assert len(rows) == 1
    assert "  4.57.0, 4.57.1, 4.57.2 and 2 more  " in rows[0]
    assert rows[0].endswith(" and 4 more places")
    assert len(rows[0]) < 300


def test_what_to_do_next_is_said(read, capsys):
    read({"a.txt": "peft==0.19.0\ntrl>1\n"})
    assert cli.main(["audit", "a.txt"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^Upgrade peft to 0\.\d+\.0, which fixes \d of \d known bugs\.$", out, re.MULTILINE)
    assert "To audit versions that a file does not pin: `pip freeze | rlhf-patches audit -`" in out
    assert "`rlhf-patches autoload on`" in out
    assert out.splitlines()[-1].startswith("`--config CONFIG` ")


@pytest.mark.parametrize("line", ["trl>=0.20,<0.22", "trl", "peft<0.5,>=0.2"])
def test_the_bugs_of_a_range(read, capsys, line):
    """What it says of every release, and of the newest, is what it says of each alone."""
    name, specifier = re.match("(\\w+)(.*)", line).groups()
    read({"a.txt": f"{line}\nx==1\n"})
    assert cli.main(["audit", "a.txt", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["dependencies"]
    said = re.fullmatch(
        r"not pinned: .*?(?:; every(?: reviewed)? release that this allows has (?P<every>[\w, -]+))?"
        r"; the newest(?: reviewed)? that it allows \((?P<newest>[\d.]+)\) has (?P<more>[\w, -]+)",
        row["skip_reason"],
    )
    bugs = {}
    for version in allowed.reviewed(name, SpecifierSet(specifier)):
        (pin,) = audit.audit([Pin(name, version, "")], [item for item in REGISTERED if item.patch.kind != "watch"])
        bugs[version] = {bug.patch.name for bug in pin.bugs if not bug.beside}
    every, newest = set.intersection(*bugs.values()), bugs[said["newest"]]
    assert list(bugs)[-1] == said["newest"]
    assert set((said["every"] or "").split(", ")) - {""} == every
    more = set(said["more"].removesuffix(", too").split(", "))
    assert more == (newest - every or {"no other known bug" if newest else "no known bug"})
    assert (" reviewed " in row["skip_reason"]) == (line == "trl")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("torch==2.6.0.*", "2.6.0"),
        ("trl>=1.5.1,<1.6", "1.5.1"),
        ("trl>=1.5.0,<1.6,!=1.5.0", "1.5.1"),
        ("transformers~=4.57.0,<4.57.1", "4.57.0"),
        ("trl~=1.16.0", None),  # 1.16.1 may be out
        ("trl>1.15.0", None),
        ("trl==1.16.*", None),
        ("trl<0.0.2", None),  # what is before the first that was read?
        ("trl==1.5.*", None),
        ("unknown==2.6.0.*", None),
        ("unknown>=2,<=2.0", "2.0"),
        ("trl==1.5.0,==1.5.1", None),
    ],
)
def test_a_range_that_one_release_fits(text, version):
    ((_, found, *_),) = pins.of_requirement(text, "")
    assert found == version


def test_scripts_that_run_each_other(read):
    files = {"a.sh": "bash b.sh\nbash b.sh\npip install trl==1.5.1\n", "b.sh": "bash a.sh\nbash b.sh\n"}
    assert read(files) == ([("trl", "1.5.1", "a.sh:3")], [])
