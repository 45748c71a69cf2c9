"""``rlhf-patches audit``: releases that are known to fail at an import beside each other, by the record of pairs."""

from __future__ import annotations

import html
import json

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlhf_patches import cli
from rlhf_patches.offline import audit, pairs
from rlhf_patches.offline.pins import Pin

VERL, FAILS, WORKS = "verl==0.8.0", "transformers==5.4.0", "transformers==5.3.0"
NAME = "is_flash_attn_greater_or_equal_2_10"
WHY = (
    "verl.trainer.sft_trainer cannot be imported with transformers 5.4.0, which has no "
    f"transformers.utils.{NAME}: pin transformers<5.4.0"
)


@pytest.fixture
def audited(tmp_path, monkeypatch, capsys):
    """Runs the command on a file with these lines."""
    monkeypatch.chdir(tmp_path)

    def run(*lines, options=()):
        (tmp_path / "pins.txt").write_text("\n".join(lines))
        status = cli.main(["audit", "pins.txt", *options])
        return status, capsys.readouterr()

    return run


def test_what_is_known_to_fail_is_said_with_the_pin(audited):
    status, said = audited(VERL, FAILS)
    assert status == 1
    assert f"verl 0.8.0 (pins.txt:1): {WHY}" in said.out
    assert "Known to fail at an import: verl with transformers." in said.out


@pytest.mark.parametrize("lines", [(VERL, WORKS), (VERL,), (FAILS,), ("verl==0.9.1", FAILS), (VERL, "transformers")])
def test_nothing_is_said_of_what_is_not_known_to_fail(audited, lines):
    for form in ("text", "json", "sarif", "github", "markdown"):
        _, said = audited(*lines, options=["--format", form])
        assert NAME not in said.out
        assert "known to fail" not in said.out.lower() or form in ("sarif", "json")


@pytest.mark.parametrize("form", ["github", "markdown", "sarif", "json"])
def test_every_format_has_it(audited, form):
    status, said = audited(VERL, FAILS, options=["--format", form])
    assert status == 1
    assert NAME in html.unescape(said.out)
    if form == "json":
        (found,) = json.loads(said.out)["known_to_fail"]
        assert (found["name"], found["version"], found["place"]) == ("verl", "0.8.0", "pins.txt:1")
        assert found["beside"] == {"name": "transformers", "version": "5.4.0"}
        assert (found["cannot_be_imported"], found["lacks"]) == (
            ["verl.trainer.sft_trainer"],
            [f"transformers.utils.{NAME}"],
        )
        assert found["pin"] == "transformers<5.4.0"
    if form == "sarif":
        (run,) = json.loads(said.out)["runs"]
        assert [each["message"]["text"] for each in run["results"] if each["ruleId"] == "known-to-fail"] == [
            f"verl 0.8.0: {WHY}"
        ]


def test_what_an_advice_says_is_said_once(audited):
    """And with the pin."""
    _, said = audited("peft==0.17.1", "transformers==5.23.0")
    assert "known to fail" not in said.out.lower()
    assert "peft-hybrid-cache" in said.out
    assert "with transformers 5.23.0, which is pinned (pin transformers<5.0.0" in " ".join(said.out.split())


def test_one_line_where_little_is_wanted(audited):
    status, said = audited(VERL, FAILS, options=["--quiet"])
    assert (status, said.out) == (1, "")
    assert f"verl 0.8.0 (pins.txt:1): {WHY}" in said.err


def pin(name, version):
    return Pin(name, version, f"pins.txt: {name}")


def test_a_text_that_a_bug_of_the_catalogue_tells_is_not_told_again():
    both = [pin("peft", "0.17.1"), pin("transformers", "5.23.0")]
    assert len(pairs.failing(both, {})) == 1
    assert pairs.failing(both, {both[0]: "cannot import name 'HybridCache' from 'transformers'"}) == []
    assert len(pairs.failing(both, {both[1]: "HybridCache"})) == 1


def test_each_of_several_versions_is_looked_up():
    pins = [pin("peft", "0.17.1"), *(pin("transformers", each) for each in ("4.57.6", "5.23.0", "no version", None))]
    (found,) = pairs.failing(pins, {})
    assert found.other == ("transformers", "5.23.0")


def test_a_local_version_is_the_release_that_it_is_made_of():
    (found,) = pairs.failing([pin("peft", "0.17.1+ours"), pin("transformers", "5.23.0+cu128")], {})
    assert found.pin.version == "0.17.1+ours"


def row(pin_, name="a", entries=("trl.trainer.dpo_trainer",)):
    return pairs.Row("trl", ">=0", "transformers", ">=0", "transformers.models", name, entries, pin_)


@pytest.mark.parametrize(
    ("bounds", "pinned"),
    [
        (["<5.0.0"], "transformers<5.0.0"),
        (["<5.0.0", "<4.57.0"], "transformers<4.57.0"),
        ([">=4.50.0", ">=4.9.0"], "transformers>=4.50.0"),
        ([">=4.50.0", "<5.0.0"], "transformers>=4.50.0,<5.0.0"),
        ([">=5.1.0", "<5.0.0"], ""),
        (["<5.0.0", ""], ""),
    ],
)
def test_what_to_pin_holds_for_all_that_fails(bounds, pinned):
    found = pairs.Failing(pin("trl", "1.0"), ("transformers", "5.0"), tuple(map(row, bounds)))
    assert found.pins == pinned
    assert (f"pin {pinned}" if pinned else "no transformers that its metadata allow has all of them") in found.why


def test_a_pair_alone_is_a_finding():
    found = pairs.Failing(pin("trl", "1"), ("transformers", "5"), (row("<5"),))
    assert audit.Findings([], 2, [], [], [], failing=[found]).status == 1
    assert audit.Findings([], 2, [], [], []).status == 0


def test_what_fails_is_named_up_to_a_number():
    modules = tuple(f"trl.m{number}" for number in range(5))
    found = pairs.Failing(pin("trl", "1"), ("transformers", "5"), (row("<5", entries=modules), row("<5", name="b")))
    assert found.why.startswith(
        "trl.m0, trl.m1, trl.m2 and 3 more cannot be imported with transformers 5, which has no "
    )
    assert "transformers.models.a and 1 more: pin transformers<5" in found.why


def test_the_record_is_in_order():
    """Each range has releases, each row says what fails, and what to pin is outside of what fails."""
    assert len(pairs.record()) > 5
    for each in pairs.record():
        assert each.entries
        assert each.module
        assert all(entry.partition(".")[0] in (each.caller, "swift") for entry in each.entries)
        first = next(Version(one.version) for one in SpecifierSet(each.beside) if one.operator == ">=")
        assert SpecifierSet(each.beside).contains(first)
        assert not each.pin or not SpecifierSet(each.pin).contains(first)
    assert list(pairs.record()) == sorted(pairs.record())
