"""`make releases` against a make-believe index on localhost: what it records, goes on with, and notices later."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys

import pytest
import record
import survey
import texts

from rlhf_patches import Guard, Patch, Rewrite, Variant
from rlhf_patches.guards import known
from rlhf_patches.offline import facts
from tests.harness.simple_index import index

__all__ = ["index"]

DEFECT = "def step(x):\n    return x * 2\n"
DEFECT_ELSEWHERE = "import os\n\n\ndef step(x, y=0):\n    y += 1\n    return x * 2\n"
FIXED = "def step(x):\n    return x + x\n"

PATCH = Patch(
    name="toy-step",
    summary="a bug",
    symptom="it breaks",
    cause="a mistake",
    repair="a fix",
    references=("https://example.invalid/1",),
    variants=(Variant(Guard("toy", ">=1.0,<=1.1"), (Rewrite("toy.steps:step", "x * 2", "x * 3"),)),),
    obsolete_when="never",
)


@pytest.fixture
def make_releases(tmp_path, index, monkeypatch, capsys):
    """Runs the survey in a repository of its own; gives its status and what it printed."""
    home = tmp_path / "repository"
    (home / "docs").mkdir(parents=True)
    (home / "rlhf_patches" / "offline").mkdir(parents=True)
    (home / "reviewed.toml").touch()
    monkeypatch.setattr(record, "HERE", home)
    monkeypatch.setattr(survey, "ROOT", home)
    monkeypatch.setattr(survey, "CACHE", home / "cache")
    monkeypatch.setattr(texts, "FOLDER", home / "texts")
    monkeypatch.setattr(texts, "CACHE", home / "cache" / "texts")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, patch=PATCH):
        monkeypatch.setattr(record, "built_in", lambda: [patch])
        monkeypatch.setattr(sys, "argv", ["survey.py", "--index", index.url, *arguments])
        index.requests.clear()
        index.parts.clear()
        status = survey.main()
        return status, capsys.readouterr().out

    run.home = home
    return run


def states(home):
    entries = record.load(home / "record" / "toy.json").entries
    return {entry.version: entry.patches["toy-step"][0].state for entry in entries}


def test_every_release_is_looked_at_once(index, make_releases):
    index.publish("0.9rc1", None)
    index.publish("0.9", "def other():\n    pass\n")
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT_ELSEWHERE)
    status, said = make_releases()
    assert status == 0, said
    assert states(make_releases.home) == {
        "0.9rc1": facts.NO_MODULE,
        "0.9": facts.NO_FUNCTION,
        "1.0": facts.DEFECT,
        "1.1": facts.DEFECT,
    }
    assert "toy-step: absent 1, applies 2, unaffected 1" in said
    page = (make_releases.home / "docs" / "compatibility.md").read_text()
    assert "| 0.9rc1 to 0.9 (2) | not there | [toy-step](patches/toy-step.md) | |" in page
    assert "| 1.0 to 1.1 (2) | affected | [toy-step](patches/toy-step.md) | |" in page
    before = (make_releases.home / "record" / "toy.json").read_bytes()
    status, said = make_releases()
    assert (status, index.requests) == (0, [""])  # the listing only
    assert "new:" not in said
    assert (make_releases.home / "record" / "toy.json").read_bytes() == before


def test_what_is_known_of_the_texts_is_written(index, make_releases):
    index.publish("0.9", "def other():\n    pass\n")
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT_ELSEWHERE)
    make_releases()
    found = texts.load("toy")
    digests = {known.digest(text): text for text in ("def other():\n    pass\n", DEFECT, DEFECT_ELSEWHERE)}
    assert set(found.texts) == set(digests)
    entries = record.load(make_releases.home / "record" / "toy.json").entries
    assert [{digests[each] for each in entry.texts.values()} for entry in entries] == [
        {text} for text in digests.values()
    ]
    places = {digests[key]: text["functions"]["step"] for key, text in found.texts.items()}
    assert (places[DEFECT][0], places[DEFECT_ELSEWHERE][0]) == (1, 4)
    assert "is not defined" in places["def other():\n    pass\n"]
    # A text that the record does not have any more is gone, and a lost one is looked at again.
    index.publish("1.1", FIXED)
    make_releases()
    assert known.digest(DEFECT_ELSEWHERE) not in texts.load("toy").texts
    before = (make_releases.home / "texts" / "toy.json").read_bytes()
    (make_releases.home / "texts" / "toy.json").unlink()
    make_releases()
    assert (make_releases.home / "texts" / "toy.json").read_bytes() == before


def test_everything_again(index, make_releases):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    make_releases()
    (make_releases.home / "cache" / "texts" / f"{known.digest(DEFECT)}.py").unlink()
    make_releases()
    assert not (make_releases.home / "cache" / "texts" / f"{known.digest(DEFECT)}.py").exists()
    make_releases("--again")
    assert (make_releases.home / "cache" / "texts" / f"{known.digest(DEFECT)}.py").read_text() == DEFECT


def test_releases_that_need_no_reading_are_not_fetched(index, make_releases):
    """The page says which, and why."""
    index.publish("0.9", DEFECT)
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    (make_releases.home / "reviewed.toml").write_text('[oldest.toy]\nversion = "1.0"\nwhy = "it has no step"\n')
    status, said = make_releases()
    assert status == 0, said
    assert states(make_releases.home) == {"1.0": facts.DEFECT, "1.1": facts.DEFECT}
    assert "toy-0.9-py3-none-any.whl" not in index.requests
    assert "None before 1.0: it has no step." in (make_releases.home / "docs" / "compatibility.md").read_text()


def test_of_large_wheels_only_what_patches_read_is_fetched(index, make_releases):
    pytest.importorskip("remotezip", reason="`.cache/tools/bin/nox -s releases` has it")
    large = {"toy/large.bin": "x" * 2**20}
    index.publish("0.8", None, more=large)
    index.publish("0.9", DEFECT, more={**large, "toy/steps.cpython-311-x86_64-linux-gnu.so": "x" * 2**20})
    index.publish("1.0", DEFECT, more=large)
    index.publish("1.1", None, more={**large, "toy/steps/__init__.py": DEFECT_ELSEWHERE, "toy/steps/other.py": DEFECT})
    (make_releases.home / "reviewed.toml").write_text('[parts.toy]\nwhy = "they are large"\n')
    status, said = make_releases()
    assert status == 1
    assert "toy 0.9 cannot be read: module toy.steps is a compiled extension" in said
    assert states(make_releases.home) == {
        "0.8": facts.NO_MODULE,
        "0.9": facts.UNREADABLE,
        "1.0": facts.DEFECT,
        "1.1": facts.DEFECT,
    }
    assert len(index.parts) == len(index.requests) - 1, "all but the listing"
    assert sum(index.parts) < 2**20, "less than one of them"
    entries = record.load(make_releases.home / "record" / "toy.json").entries
    whole = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in index.folder.glob("*.whl")}
    assert {entry.file: entry.sha256 for entry in entries} == whole, "as the index states it"
    kept = make_releases.home / "cache" / "toy"
    assert all(path.stat().st_size < 2**12 for path in kept.rglob("*.whl"))
    # Again: for another module another part, for the same one nothing.
    make_releases("--again")
    assert index.parts == []
    elsewhere = Variant(PATCH.variants[0].guard, (Rewrite("toy:step", "x * 2", "x"),))
    make_releases(patch=dataclasses.replace(PATCH, variants=(elsewhere,)))
    assert index.parts


def test_later_it_shows_what_changed_upstream(index, make_releases):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    assert make_releases()[0] == 0
    index.publish("1.1.post1", DEFECT_ELSEWHERE)
    index.publish("1.2", FIXED)
    status, said = make_releases()
    assert status == 1
    assert "new: toy 1.1.post1, toy-step: the function changed, and still has the defect" in said
    assert (
        "look at this: toy-step: toy 1.1.post1 (toy-1.1.post1-py3-none-any.whl) is not affected by its version" in said
    )
    assert "new: toy 1.2, toy-step: no longer has the defect (different toy.steps:step contains 'x * 2' 0 times" in said
    fingerprint = (
        record.load(make_releases.home / "record" / "toy.json").entries[-1].patches["toy-step"][0].fingerprints[0]
    )
    assert f"look at this: toy-step: not reviewed: toy 1.2 (toy-1.2-py3-none-any.whl): {fingerprint}" in said
    assert {name for name in index.requests if name} == {"toy-1.1.post1-py3-none-any.whl", "toy-1.2-py3-none-any.whl"}
    # What a person does then.
    wider = Patch(**{**vars(PATCH), "variants": (Variant(Guard("toy", ">=1.0,<1.2"), PATCH.variants[0].changes),)})
    (make_releases.home / "reviewed.toml").write_text(f'[harmless.toy-step]\n{fingerprint} = "fixed upstream"\n')
    status, said = make_releases(patch=wider)
    assert status == 0, said
    assert (
        "| 1.2 | fixed | [toy-step](patches/toy-step.md) | fixed upstream |"
        in (make_releases.home / "docs" / "compatibility.md").read_text()
    )


def test_a_release_that_is_gone_or_was_replaced_is_noticed(index, make_releases):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    old = index.publish("1.0.5", DEFECT)
    assert make_releases()[0] == 0
    old.unlink()
    index.publish("1.1", DEFECT_ELSEWHERE)
    status, said = make_releases()
    assert status == 0, said
    assert "gone: toy toy-1.0.5-py3-none-any.whl" in said
    (now,) = [e for e in record.load(make_releases.home / "record" / "toy.json").entries if e.version == "1.1"]
    assert now.sha256 == hashlib.sha256((index.folder / now.file).read_bytes()).hexdigest()


def test_it_goes_on_after_a_release_that_cannot_be_read(index, make_releases):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    broken = index.publish("0.5", DEFECT)
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-30])  # not what its checksum says
    with pytest.raises(SystemExit, match=r"1 of 3 releases could not be looked at:\ntoy-0\.5"):
        make_releases()
    assert set(states(make_releases.home)) == {"1.0", "1.1"}
    assert not list(make_releases.home.glob("cache/toy/*0.5*"))
    broken.write_bytes(whole)
    status, _ = make_releases()
    assert status == 1  # 0.5 has the defect, and is below the range
    assert [name for name in index.requests if name] == ["toy-0.5-py3-none-any.whl"]


def test_other_changes_are_looked_at_again_without_fetching(index, make_releases):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    make_releases()
    other = Patch(
        **{
            **vars(PATCH),
            "variants": (Variant(PATCH.variants[0].guard, (Rewrite("toy.steps:step", "x * 5", "x * 3"),)),),
        }
    )
    assert record.outdated(record.load_all(), [other])
    status, said = make_releases(patch=other)
    assert status == 1
    assert set(states(make_releases.home).values()) == {facts.DIFFERENT}
    assert index.requests == [""]
    assert ">=1.0 names a release whose code is not of this shape" in said


def test_a_rewrite_that_does_not_compile_is_no_match(index, make_releases):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    wrong = Patch(
        **{**vars(PATCH), "variants": (Variant(PATCH.variants[0].guard, (Rewrite("toy.steps:step", "x * 2", "x *"),)),)}
    )
    make_releases(patch=wrong)
    assert set(states(make_releases.home).values()) == {facts.DIFFERENT}


def test_tags_of_a_clone(tmp_path, make_releases, monkeypatch):
    clone = tmp_path / "clone"
    (clone / "toy").mkdir(parents=True)

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", "-C", str(clone), *identity, *arguments], check=True, capture_output=True)

    git("init")
    for version, text in (("1.0", DEFECT), ("1.1", DEFECT_ELSEWHERE), ("1.2.dev0", FIXED)):
        (clone / "toy" / "steps.py").write_text(text)
        (clone / "setup.py").write_text(f"setup(\n    name='toy',\n    version='{version}',\n)\n")
        git("add", "-A")
        git("commit", "-m", version)
        if version != "1.2.dev0":
            git("tag", f"v{version}")
    git("tag", "nightly")
    repository = survey.Repository("toy", survey.re.compile(r"v\d.*"), "setup.py", survey._setup_py)
    monkeypatch.setitem(survey.REPOSITORIES, "Toy", repository)
    status, said = make_releases("--git", f"Toy={clone}")
    found = record.load(make_releases.home / "record" / "git" / "Toy.json")
    assert [(e.file, e.version, e.patches["toy-step"][0].state) for e in found.entries] == [
        ("v1.0", "1.0", facts.DEFECT),
        ("v1.1", "1.1", facts.DEFECT),
        ("main", "1.2.dev0", facts.DIFFERENT),
    ]
    assert status == 1, said
    assert "not reviewed: Toy 1.2.dev0 (main)" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no-such"], "expected names among toy"),
        (["--git", "x"], "--git x: expected NAME=FOLDER, with NAME one of Megatron-LM, slime"),
    ],
)
def test_wrong_arguments(make_releases, capsys, arguments, expected):
    with pytest.raises(SystemExit):
        make_releases(*arguments)
    assert expected in capsys.readouterr().err
