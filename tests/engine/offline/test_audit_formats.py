"""``rlhf-patches audit --format``: what GitHub, editors and scanners read; what was not looked up is a finding in each.

The field names are those of the SARIF 2.1.0 schema.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from rlhf_patches import cli
from rlhf_patches.definitions.bug import HARMS
from rlhf_patches.offline import audit_sarif

ROOT = Path(__file__).parents[3]
FORMATS = ("text", "json", "sarif", "github", "markdown")
MIXED = "requests==2.0\ntrl==1.5.1\ndeepspeed>=0.1\nfoo bar\nverl==999\n"
BUGS = {"trl-grpo-dapo-scale": "error", "trl-chunked-nll-zero3": "warning", "trl-vllm-nan-logprob": "warning"}


@pytest.fixture
def audited(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with these files, given as texts by name."""
    monkeypatch.chdir(tmp_path)

    def run(form, files, *more):
        for name, text in files.items():
            Path(name).write_text(text)
        status = cli.main(["audit", *files, *more, "--format", form])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def results(out):
    (run,) = json.loads(out)["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rules[each["ruleIndex"]]["id"] for each in run["results"]] == [each["ruleId"] for each in run["results"]]
    return rules, run["results"], run["invocations"]


def test_sarif(audited):
    status, out, err = audited("sarif", {"pins.txt": MIXED})
    assert (status, err) == (1, "")
    document = json.loads(out)
    assert (document["version"], document["$schema"]) == ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json")
    rules, found, (invocation,) = results(out)
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (True, 1)
    assert len({rule["id"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["shortDescription"]["text"]
    bugs = {each["ruleId"]: each for each in found if each["ruleId"].startswith("trl-")}
    for name, level in BUGS.items():
        assert bugs[name]["level"] == level
        (location,) = bugs[name]["locations"]
        assert location["physicalLocation"] == {"artifactLocation": {"uri": "pins.txt"}, "region": {"startLine": 2}}
        assert bugs[name]["message"]["text"].startswith("trl 1.5.1: ")
    assert "(hang; fixed in 1.15.0)" in bugs["trl-chunked-nll-zero3"]["message"]["text"]
    gaps = [each for each in found if each["ruleId"] == "not-looked-up"]
    assert [each["level"] for each in gaps] == ["warning"] * 3
    assert [each["locations"][0]["physicalLocation"]["region"]["startLine"] for each in gaps] == [3, 5, 4]
    assert len(found) == len(bugs) + 3


def test_levels_are_those_of_the_harms():
    levels = [audit_sarif.level(type("Bug", (), {"harm": harm})) for harm in HARMS]
    assert levels == ["error"] * 4 + ["warning"] * 2 + ["note"] * 2
    assert audit_sarif.level(type("Bug", (), {"harm": ""})) == "warning"


def test_where_there_is_no_line_or_no_file(audited, monkeypatch, tmp_path):
    lock = '[[package]]\nname = "trl"\nversion = "1.5.1"\n'
    _, out, _ = audited("sarif", {"uv.lock": lock, "uv.lock:7": lock})
    places = [each["locations"][0]["physicalLocation"] for each in results(out)[1]]
    assert {place["artifactLocation"]["uri"] for place in places} == {"uv.lock", "uv.lock%3A7"}
    assert {place["region"]["startLine"] for place in places} == {1}
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    _, out, _ = audited("sarif", {str(tmp_path / "uv.lock"): lock})
    assert {each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for each in results(out)[1]} == {
        (tmp_path / "uv.lock").as_uri()
    }


def test_standard_input_is_no_file(audited, monkeypatch, tmp_path):
    (tmp_path / "input").write_text("numpy==2\ntrl==1.5.1\n")
    with (tmp_path / "input").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        _, out, _ = audited("sarif", {}, "-")
    (place,) = {json.dumps(each["locations"]) for each in results(out)[1]}
    assert json.loads(place) == [{"logicalLocations": [{"fullyQualifiedName": "standard input:2"}]}]
    with (tmp_path / "input").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert "file=" not in audited("github", {}, "-")[1]


def unescaped(text):
    for escape, character in (("%2C", ","), ("%3A", ":"), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(escape, character)
    return text


def commands(out):
    """As GitHub's runner reads them."""
    said = []
    for line in re.split(r"\r\n|\r|\n", out.removesuffix("\n")):
        kind, properties, text = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line).groups()
        pairs = dict(pair.split("=", 1) for pair in properties.split(","))
        said.append((kind, {name: unescaped(value) for name, value in pairs.items()}, unescaped(text)))
    return said


def test_annotations(audited):
    status, out, err = audited("github", {"pins.txt": MIXED})
    assert (status, err) == (1, "")
    (kind, properties, text), *others = commands(out)
    assert (kind, properties) == ("notice", {"title": "rlhf-patches audit"})
    assert text.startswith("Checked 1 of 3 supported packages")
    bugs = [each for each in others if each[0] == "warning"]
    assert "trl 1.5.1: trl-grpo-dapo-scale" in [each[1]["title"] for each in bugs]
    assert {(each[1]["file"], each[1]["line"]) for each in bugs} == {("pins.txt", "2")}
    assert [(each[0], each[1]["line"], each[1]["title"]) for each in others[len(bugs) :]] == [
        ("notice", "3", "not looked up"),
        ("notice", "5", "not looked up"),
        ("notice", "4", "not looked up"),
    ]


def table(out):
    """The rows of a comment's table as text, and everything else, as a Markdown reader has them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(out)
    inline = [token for token in tokens if token.type == "inline"]
    cells = sum(token.type in ("th_open", "td_open") for token in tokens)
    rows = sum(token.type == "tr_open" for token in tokens)
    texts = ["".join(child.content for child in token.children if child.type == "text") for token in inline]
    assert cells == 6 * rows
    assert not {child.type for token in inline for child in token.children} - {
        *("text", "html_inline", "strong_open", "strong_close", "code_inline")
    }
    assert {child.content for token in inline for child in token.children if child.type == "html_inline"} <= {
        *("<code>", "</code>")
    }
    return [texts[i : i + 6] for i in range(0, cells, 6)], texts[cells:]


def test_markdown(audited):
    status, out, err = audited("markdown", {"pins.txt": MIXED})
    assert (status, err) == (1, "")
    (_, *rows), below = table(out)
    (row,) = (row for row in rows if row[3].startswith("trl-grpo-dapo-scale: the loss is "))
    assert [*row[:3], *row[4:]] == ["trl", "1.5.1", "wrong gradient", "1.9.1", "pins.txt:2"]
    assert below[0].startswith("deepspeed (pins.txt:3) was not looked up: not pinned: >=0.1; the newest reviewed ")
    assert below[1].startswith("verl 999 (pins.txt:5) was not looked up: newer than ")
    assert below[2] == "pins.txt:4: 'foo bar' is not a requirement (name==version)"
    assert below[3].startswith("Checked 1 of 3 supported packages")


def test_json_is_json(audited, capsys):
    _, out, _ = audited("json", {"pins.txt": MIXED})
    assert cli.main(["audit", "pins.txt", "--json"]) == 1
    assert capsys.readouterr().out == out


# ------------------------------------------------------------------------------------------ never a false clean

NOT_CLEAN = {
    "not pinned": ({"a.txt": "x==1\ntrl>=1\n"}, 1, "not pinned: >=1"),
    "newer": ({"a.txt": "trl==999\n"}, 1, "newer than"),
    "not understood": ({"a.txt": "x==1\ntrl = 1\n"}, 1, "'trl = 1' is not a requirement"),
    "many are not understood": ({"a.txt": "x==1\n" + "x y\n" * 5 + "".join(f"x {n}\n" for n in range(25))}, 1, " more"),
    "one file cannot be read": ({"a.txt": "slime==0.0.0\n", "b.json": "{"}, 2, "b.json is not valid JSON"),
    "one file pins nothing": ({"a.txt": "slime==0.0.0\n", "b.txt": "x>1\n"}, 2, "b.txt pins nothing"),
}


def findings_of(form, out):
    """What a consumer counts: results, packages, annotations beside the sum, items of a list."""
    if form == "sarif":
        return [each["message"]["text"] for each in results(out)[1]]
    if form == "github":
        return [text for _, _, text in commands(out)[1:]]
    return table(out)[1][:-1]


@pytest.mark.parametrize("form", ["sarif", "github", "markdown"])
@pytest.mark.parametrize("case", NOT_CLEAN)
def test_what_was_not_looked_up_is_a_finding(audited, form, case):
    files, wanted, said = NOT_CLEAN[case]
    status, out, _ = audited(form, files)
    assert status == wanted
    assert any(said in text for text in findings_of(form, out))
    if form == "sarif":
        assert results(out)[2][0]["executionSuccessful"] == (wanted < 2)
        assert all(each["locations"] for each in results(out)[1])


@pytest.mark.parametrize("form", ["sarif", "github", "markdown"])
def test_clean(audited, form):
    status, out, err = audited(form, {"a.txt": "slime==0.0.0\nx==1\n"})
    assert (status, err, findings_of(form, out)) == (0, "", [])
    assert form == "sarif" or "No known bugs found in 1 supported package" in out


@pytest.mark.parametrize("form", FORMATS)
def test_where_nothing_was_read_there_is_no_document(audited, form):
    status, out, err = audited(form, {"a.txt": ""})
    assert (status, out, err.count("\n")) == (2, "", 1)


# ------------------------------------------------------------------------------------------ made to do harm

HOSTILE = (
    "a|b`<img src=x>`.txt",
    "new\nline\r::error::x.txt",
    "::warning file=x::100%25 %0A,y.txt",
    "\x1b[2J\x00{0}[x](y)\u2028\x85.txt".replace("\x00", ""),
    "@everyone #1 *x* _y_ \\| $z$.txt",
    os.fsdecode(b"\xff\xfe.txt"),
)
LINES = ("trl==1.5.1 ; extra == '|::%'", "trl @ git+https://x/|%0A::a,b`*<b>\x1b[2J]", "x |::%\x07<b>[a](b){0}")


@pytest.mark.parametrize("form", ["text", "sarif", "github", "markdown"])
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_and_lines_that_are_made_to_do_harm(audited, form, name):
    status, out, err = audited(form, {name: "\n".join(LINES)})
    assert (status, err) == (1, "")
    assert all(character.isprintable() or character == "\n" for character in out)
    if form == "text":
        return
    harmless = findings_of(form, out)
    assert sum("is not a requirement" in text for text in harmless) == 1
    if form == "sarif":
        uris = {each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for each in results(out)[1]}
        (uri,) = uris
        assert (urlsplit(uri).scheme, urlsplit(uri).query, urlsplit(uri).fragment) == ("", "", "")
        assert unquote(uri, errors="surrogateescape") == name
        assert not [text for text in harmless if re.search(r"(?<!\{)\{\d+\}|\]\(", text)]
    elif form == "github":
        assert {each[1]["line"] for each in commands(out)[1:]} == {"1", "2", "3"}
        if name.replace("\r", "").replace("\n", "").isprintable():
            assert {each[1]["file"] for each in commands(out)[1:]} == {name}
    elif form == "markdown":
        (_, *rows), below = table(out)
        assert {row[5].rpartition(":")[2].partition(" ")[0] for row in rows} == {"1"}
        assert len(below) == 3


def test_one_form_at_a_time(capsys):
    for options in (["--json", "--format", "sarif"], ["--quiet", "--format", "sarif"], ["--format", "xml"]):
        with pytest.raises(SystemExit):
            cli.main(["audit", *options])
    assert "invalid choice: 'xml'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ pre-commit


def test_the_hook_for_pre_commit(tmp_path, capsys):
    """Its pattern takes what it can read, and its command is one of ours."""
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    hook = dict(re.findall(r"^(?:- |  )(\w+): (.+)$", text, re.MULTILINE))
    assert (hook["id"], hook["language"]) == ("rlhf-patches-audit", "python")
    for name in ("uv.lock", "a/poetry.lock", "pylock.gpu.toml", "requirements.txt", "docker/requirements-dev.txt"):
        assert re.search(hook["files"], name), name
    for name in ("README.md", "uv.lock.md", "pyproject.toml", "requirements/README.txt"):
        assert not re.search(hook["files"], name), name
    program, *arguments = shlex.split(hook["entry"])
    assert program == "rlhf-patches"
    pins = tmp_path / "requirements.txt"
    pins.write_text("trl==1.5.1\n")
    assert cli.main([*arguments, str(pins)]) == 1
    assert "trl-metrics-deadlock: hang; fixed in 1.14.0" in capsys.readouterr().err
