"""``rlhf-patches survey`` against a make-believe index on localhost: what it says of releases, and what it leaves."""

from __future__ import annotations

import ast
import json
import re
import tempfile
from pathlib import Path

import pytest

from rlhf_patches import Advice, Guard, Patch, Rewrite, Shape, Variant, Wrap, cli
from rlhf_patches.definitions import registry
from rlhf_patches.definitions.registry import PluginFailure, Registered
from rlhf_patches.offline import archive, confined, evaluate
from tests.harness.simple_index import index

__all__ = ["index"]

DEFECT = "def step(x):\n    return x * 2\n"
DEFECT_ELSEWHERE = "import os\n\n\ndef step(x, y=0):\n    y += 1\n    return x * 2\n"
FIXED = "def step(x):\n    return x + x\n"
REWRITE = Rewrite("toy.steps:step", "x * 2", "x * 3")
ABOUT = {"summary": "s", "symptom": "s", "cause": "c", "references": ("r",), "obsolete_when": "never"}


def patch(versions, *changes, name="toy-step", **more):
    variants = (Variant(Guard("Toy", versions, **more), changes or (REWRITE,)),)
    return Patch(name=name, variants=variants, repair="r", **ABOUT)


@pytest.fixture
def survey(index, monkeypatch, capsys):
    """Runs the command for patches of a plugin; gives its status, what it printed, and its complaints."""

    def run(*patches, arguments=(), failures=()):
        registered = [Registered(each, "plug") for each in patches]
        monkeypatch.setattr(registry, "load", lambda: (registered, list(failures)))
        index.requests.clear()
        status = cli.main(["survey", *[each.name for each in patches], "--index", index.url, *arguments])
        return status, *capsys.readouterr()

    return run


def rows(out):
    lines = out.partition("RELEASES")[2].partition("\n\n")[0].splitlines()[1:]
    return [re.split(r" {2,}", line.rstrip()) for line in lines]


def test_ranges_that_are_right(index, survey):
    index.publish("0.9", None)
    index.publish("0.10", "def other():\n    pass\n")
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT_ELSEWHERE)
    index.publish("1.2", FIXED)
    status, out, err = survey(patch(">=1.0,<1.2"))
    assert (status, err) == (0, "")
    assert out.startswith("toy-step: Toy, 5 releases\n")
    assert rows(out) == [
        ["0.9", "-", "no module", "absent"],
        ["0.10", "-", "no function", "unaffected"],
        ["1.0 to 1.1 (2)", ">=1.0,<1.2", "defect", "applies"],
        ["1.2", "-", "different", "unaffected"],
    ]
    said = "rlhf_patches ships the search results for 1 of 5 releases; each process searches the code of the others"
    assert out.endswith(f"\n\n{said}\nthe range >=1.0,<1.2: as suggested\n\n")  # 0.9 has no text to search
    assert [row[0] for row in rows(survey(patch(">=1.0,<1.2"), arguments=["--all"])[1])] == [
        "0.9", "0.10", "1.0", "1.1", "1.2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        (">=1.1,<1.2", {"1.0": "has the defect and is in no range"}),
        (">=1.0,<1.1", {"1.1": "has the defect and is in no range"}),
        (">=1.0", {"1.2": "is in the range >=1.0, but different: toy.steps:step contains 'x * 2' 0 times, expected 1"}),
        (
            ">=0.9,<1.2",
            {"0.9": "is in the range >=0.9,<1.2, but no module: there is no module toy.steps"},
        ),
        (
            "",
            {
                "0.9": "is in the range of all, but no module: there is no module toy.steps",
                "1.2": "is in the range of all, but different: toy.steps:step contains 'x * 2' 0 times, expected 1",
            },
        ),
    ],
)
def test_where_range_and_code_disagree(index, survey, versions, wrong):
    index.publish("0.9", None)
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT_ELSEWHERE)
    index.publish("1.2", FIXED)
    status, out, err = survey(patch(versions))
    assert (status, err) == (1, "")
    assert {row[0]: row[-1] for row in rows(out) if len(row) == 5} == {
        version: f"DISAGREES: {text}" for version, text in wrong.items()
    }
    assert "suggested: >=1.0,<1.2\n" in out
    status, out, err = survey(patch(versions), arguments=["--quiet"])
    assert (status, out) == (1, "")
    assert err.splitlines() == [f"rlhf-patches: toy-step: Toy {version} {text}" for version, text in wrong.items()]
    assert survey(patch(">=1.0,<1.2"))[0] == 0, "what it suggests"


def test_a_range_that_holds_and_claims_more_than_was_read(index, survey):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    assert (
        "the range >=1.0 holds for these releases, but is open at one end; suggested: >=1.0,<=1.1"
        in (survey(patch(">=1.0"))[1])
    )
    assert "the range >=1.0,<9 holds for these releases; suggested: >=1.0,<=1.1" in survey(patch(">=1.0,<9"))[1]


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        ({3}, [">=1.0,<1.9,!=1.3"]),
        ({2, 3, 5}, [">=1.0,<1.9,!=1.2,!=1.3,!=1.5"]),
        ({1, 2, 3, 4, 5, 6}, [">=1.0,<1.1", ">=1.7,<1.9"]),
    ],
)
def test_releases_between_that_do_not_have_it(index, survey, fixed, expected):
    for minor in range(10):
        index.publish(f"1.{minor}", FIXED if minor in {*fixed, 9} else DEFECT)
    status, out, _ = survey(patch(">=1.0,<1.9"), arguments=["--json"])
    assert status == 1
    (found,) = json.loads(out)
    assert found["suggested"] == [expected]
    if len(expected) == 1:
        assert survey(patch(expected[0]))[0] == 0
    else:
        assert "its code is in >=1.0,<1.1 and in >=1.7,<1.9, but not in the" in survey(patch(">=1.0,<1.9"))[1]


def test_what_cannot_be_read_is_said_and_not_guessed(index, survey):
    index.publish("1.0", DEFECT, yanked="it deletes files")
    index.publish("1.1", DEFECT, sdist=True)
    index.publish("1.2", DEFECT, cut=30)
    index.announce("toy-1.3.win32.exe")
    index.publish("1.4", FIXED)
    status, out, err = survey(patch(">=1.0,<1.2"))
    assert status == 2
    assert err == (
        "rlhf-patches: toy-step: 1.2 could not be read: toy-1.2-py3-none-any.whl is damaged or truncated "
        "(File is not a zip file); download it again\n"
    )
    assert [[row[0], row[2], row[-1]] for row in rows(out)] == [
        ["1.0", "defect", "yanked (it deletes files)"],
        ["1.1", "defect", "applies"],
        ["1.2", "-", f"NOT READ: {err.partition(': toy-1.2')[1][2:]}{err.partition(': toy-1.2')[2].strip()}"],
        ["1.3", "-", "NOT READ: the index has neither a wheel nor an sdist of this release"],
        ["1.4", "different", "unaffected"],
    ]
    assert "the range >=1.0,<1.2 holds for these releases; suggested: >=1.0,<=1.1\n" in out, "nothing beyond 1.1 is"
    index.publish("1.2", FIXED)
    status, out, err = survey(patch(">=1.0,<1.2"))
    assert (status, err) == (0, ""), "that there is nothing to read will not change"
    assert "as suggested" in out


def test_a_file_that_is_not_what_the_index_says(index, survey, tmp_path):
    file = index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    file.write_bytes(file.read_bytes() + b" ")
    status, _, err = survey(patch(">=1.0"), arguments=["--cache", str(tmp_path / "cache")])
    assert status == 2
    assert "toy-1.0-py3-none-any.whl could not be fetched: its sha256 differs from the one that the index states" in err
    assert [path.name for path in (tmp_path / "cache").rglob("*1.0*")] == []


def test_fingerprints_are_in_the_form_that_a_wrap_wants(index, survey):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    index.publish("1.2", DEFECT_ELSEWHERE)
    index.publish("1.3", DEFECT)
    index.publish("1.4", FIXED)
    none = {"0" * 16: "?"}
    status, out, _ = survey(patch(">=1.0,<1.4", Wrap("toy.steps:step", "builtins:print", none)))
    assert status == 1
    assert f"    {'0' * 16} of the patch is the fingerprint of none of these releases\n" in out
    text = re.search(r"toy\.steps:step:\n +fingerprints=(\{.*?\n +\})", out, re.DOTALL).group(1)
    found = ast.literal_eval(text)
    assert list(found.values()) == ["1.0 to 1.1, 1.3", "1.2", "1.4"]
    assert text.count("  # not in the patch") == 3
    two = {fingerprint: releases for fingerprint, releases in found.items() if releases != "1.4"}
    whole = patch(">=1.0,<1.4", Wrap("toy.steps:step", "no_such_plugin:wrapper", two))
    status, out, _ = survey(whole)
    assert out.count("# not in the patch") == 1
    # Range and code agree; the fault is the plugin's own, and the same in all releases.
    assert status == 1
    assert [row[::4] for row in rows(out)] == [
        [
            "1.0 to 1.3 (4)",
            "DISAGREES: is failed: there is no no_such_plugin:wrapper: there is no module no_such_plugin",
        ],
        ["1.4"],
    ]


def test_the_status_is_that_of_check(index, survey):
    files = {
        version: index.publish(version, text)
        for version, text in (("1.0", DEFECT), ("1.1", FIXED), ("1.2", None), ("2.0", DEFECT), ("3.0", "def step(:\n"))
    }
    one = patch(">=1.0,<2")
    (found,) = json.loads(survey(one, arguments=["--json"])[1])
    for row, file in zip(found["releases"], files.values(), strict=True):
        (expected,) = evaluate.check(archive.open_release(str(file)), [Registered(one, "plug")])
        assert (row["status"], row["reason"]) == (
            expected.status.value,
            expected.reason.replace(f"{index.folder}/", ""),
        )
    assert found["agrees"] is False
    assert [row["disagreement"] is not None for row in found["releases"]] == [False, True, True, True, False]


def test_the_range_of_another_variant(index, survey):
    index.publish("1.0", DEFECT)
    index.publish("2.0", DEFECT.replace("x * 2", "2 * x"))
    index.publish("2.1", DEFECT)
    second = Rewrite("toy.steps:step", "2 * x", "3 * x")
    both = Patch(
        name="toy-step",
        repair="r",
        variants=(Variant(Guard("toy", "<2"), (REWRITE,)), Variant(Guard("toy", ">=2"), (second,))),
        **ABOUT,
    )
    status, out, _ = survey(both)
    assert status == 1
    assert rows(out)[-1][-1] == "DISAGREES: is in the range >=2, but has the code of <2"
    (found,) = json.loads(survey(both, arguments=["--json"])[1])
    assert found["suggested"] == [[">=1.0,<=2.1,!=2.0"], [">=2.0,<2.1"]]


def test_a_part_that_may_be_missing_and_an_advice(index, survey):
    index.publish("1.0", None)
    index.publish("1.1", DEFECT)
    assert survey(patch(">=1.0,<=1.1", may_be_missing="wheels do not have it"))[0] == 0
    index.publish("1.2", FIXED)
    advice = Advice(
        name="toy-step",
        what_to_do="x",
        variants=(Variant(Guard("toy", ">=1.1,<=1.2"), (Shape("toy.steps:step", "x * 2"),)),),
        **ABOUT,
    )
    status, out, _ = survey(advice)
    assert status == 1, "check says advice of both; only one has the shape"
    assert [row[2:4] for row in rows(out)] == [["no module", "absent"], ["defect", "advice"], ["different", "advice"]]
    assert "suggested: >=1.1,<1.2" in out


def test_pre_releases_as_pip_has_them(index, survey):
    for version in ("1.0rc1", "1.0", "1.1.dev2", "1.1", "2.0b1"):
        index.publish(version, DEFECT)

    def looked(*arguments):
        (found,) = json.loads(survey(patch(">=0"), arguments=["--json", *arguments])[1])
        return [row["version"] for row in found["releases"]]

    assert looked() == ["1.0", "1.1"]
    assert looked("--pre") == ["1.0rc1", "1.0", "1.1.dev2", "1.1", "2.0b1"]
    assert looked("--releases", ">1.0,<2") == ["1.1"]
    assert looked("--releases", "==2.0b1") == ["2.0b1"]
    assert "holds for these releases\n" in survey(patch(">=0,<9"), arguments=["--releases", "==1.1"])[1]


@pytest.mark.parametrize("ends", ["done", "interrupted"])
def test_a_survey_leaves_nothing_behind(index, survey, tmp_path, monkeypatch, ends):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    if ends == "interrupted":

        def interrupt(path, question):
            assert Path(path).exists()
            raise KeyboardInterrupt

        monkeypatch.setattr(confined, "ask", interrupt)
    cache = tmp_path / "cache"
    for arguments in ([], ["--cache", str(cache)]):
        status, out, err = survey(patch(">=1.0,<=1.1"), arguments=arguments)
        assert list((tmp_path / "tmp").iterdir()) == []
        assert not (tmp_path / "home").exists()
        if ends == "interrupted":
            assert (status, out, err) == (
                130,
                "",
                "rlhf-patches: interrupted; only files in --cache are left\n",
            )
        else:
            assert (status, err) == (0, "")
    kept = sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())
    whole = [f"wheels/toy/{version}/toy-{version}-py3-none-any.whl" for version in ("1.0", "1.1")]
    assert kept == (whole[:1] if ends == "interrupted" else whole)
    if ends == "done":
        survey(patch(">=1.0,<=1.1"), arguments=["--cache", str(cache)])
        assert index.requests == [""], "the listing only"


def test_a_cache_that_cannot_be_is_said_before_anything_is_fetched(index, survey, tmp_path):
    index.publish("1.0", DEFECT)
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    status, out, err = survey(patch("==1.0"), arguments=["--cache", str(cache)])
    assert (status, out) == (2, "")
    assert err == f"rlhf-patches: --cache {cache} cannot be written: Not a directory\n"
    assert index.requests == []


def test_much_to_fetch_is_said_first(index, survey, monkeypatch):
    """Of torch it is 30 GB. This index states no sizes."""
    index.publish("1.0", DEFECT)
    monkeypatch.setattr("rlhf_patches.cli.survey._MUCH", 0)
    said = "rlhf-patches: toy: 1 releases, 0 GiB to fetch; `--releases` selects some, `--cache` keeps them\n"
    assert survey(patch(">=1.0,<=1.0"))[::2] == (0, said)


def test_two_patches_of_one_distribution_fetch_each_file_once(index, survey):
    index.publish("1.0", DEFECT)
    status, out, _ = survey(patch("==1.0"), patch("==1.1", name="toy-other"))
    assert status == 1
    assert [name for name in index.requests if name] == ["toy-1.0-py3-none-any.whl"]
    assert ("toy-step: " in out, "toy-other: " in out) == (True, True)


def test_nothing_learned_is_no_success(index, survey):
    """A misspelt module, and no range yet that would claim a release."""
    index.publish("1.0", DEFECT)
    status, _, err = survey(patch("<0.1", Rewrite("toy.step:step", "x * 2", "x * 3")))
    assert (status, err) == (2, "rlhf-patches: toy-step: none of these releases has toy.step\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--releases", "one"], "--releases 'one': expected a PEP 440 specifier, for example '>=1.0,<2'"),
        (["--releases", ">5"], "has no release of toy >5; the newest is 1.0"),
        (
            ["--index", "http://user:secret@127.0.0.1:9/simple"],
            "http://127.0.0.1:9/simple could not be queried for toy: ",
        ),
    ],
)
def test_wrong_input_is_one_message(index, survey, arguments, message):
    index.publish("1.0", DEFECT)
    status, out, err = survey(patch(">=1.0"), arguments=arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "secret" not in err
    assert "Traceback" not in err


def test_a_patch_that_there_is_not(capsys):
    assert cli.main(["survey", "math-verify-thraed"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "rlhf-patches: there is no patch 'math-verify-thraed'; did you mean 'math-verify-thread'?\n",
    )


def test_a_distribution_that_the_index_does_not_have(index, survey):
    other = Patch(name="other-bug", repair="r", variants=(Variant(Guard("other", ""), (REWRITE,)),), **ABOUT)
    assert survey(other) == (2, "", f"rlhf-patches: {index.url} has no distribution 'other'\n")


def test_plugins_that_could_not_be_used_are_named(index, survey):
    index.publish("1.0", DEFECT)
    status, _, err = survey(patch("==1.0"), failures=[PluginFailure("bad", "it broke")])
    assert (status, err) == (0, "rlhf-patches: plugin bad could not be used: it broke\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["math-verify-thread", "peft-disable-adapter-fsdp"])
def test_pypi(name, capsys):
    """A built-in patch, whose range is held against the record of the same releases."""
    status = cli.main(["survey", name, "--json", "--pre"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    (found,) = json.loads(out)
    (patch,) = [item.patch for item in registry.load()[0] if item.patch.name == name]
    assert [row["version"] for row in found["releases"] if row["status"] == "applies"] == [
        row["version"] for row in found["releases"] if row["range"] == patch.versions
    ]
    for change in patch.variants[0].changes:
        there = found["fingerprints"][change.target]
        assert {text: there.get(text) for text in change.fingerprints} == dict(change.fingerprints)
