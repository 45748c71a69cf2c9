"""Random harm: whatever is given to the commands that read texts from outside, it is one line or an answer, and soon.

What was found by hand stands here as seeds, so that a mutation of one is tried, too.
"""

from __future__ import annotations

import io
import json
import os
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhf_patches import cli
from rlhf_patches.authoring import definition, fix
from rlhf_patches.guards.places import NotFound, Source
from rlhf_patches.offline import index, tracebacks
from tests.harness.effort import SHARE
from tests.harness.random_tests import COMMON, EXPLORE

FEW = settings(max_examples=1500 if EXPLORE else 200 // SHARE**2, **COMMON)
DIGITS = "1" * 5000
# What a line of a requirements file, a lock file, a log or a diff is made of; and what breaks readers of these.
PIECES = [
    *(
        "trl",
        "==",
        "1.5.0",
        "[x]",
        " @ ",
        "https://host/trl-1.5.0-py3-none-any.whl",
        "#egg=",
        "; ",
        "python_version",
        "<",
    ),
    *(
        "-r ",
        "-c ",
        "--requirement=",
        "-e ",
        "a.txt",
        "./",
        "..",
        "/",
        " --hash=sha256:ab",
        "\\\n",
        "\n",
        " ",
        "'",
        '"',
    ),
    *(
        "[[package]]\n",
        "dependencies:\n",
        "package:\n",
        "  - ",
        "- name: trl\n  version: 1\n",
        "- pip:\n",
        "FROM x\n",
        "RUN pip install ",
        "<<EOF\n",
        "&& ",
        '{"name": "trl", "version": "',
        "@EXPLICIT\n",
        "# pip ",
        "Package Version\n",
        "[tool.poetry.dependencies]\n",
        "name = ",
        "version = ",
        "source = ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "=",
    ),
    *(
        "(pid=",
        "[rank1]: ",
        "ERROR ",
        "12: ",
        'File "',
        '", line 1, in f\n',
        "Traceback (most recent call last):\n",
        "KeyError: ",
    ),
    *(
        "--- a/p/mod.py\n",
        "+++ b/p/mod.py\n",
        "@@ -1,2 +1,2 @@\n",
        "+x = 1\n",
        "-    return a\n",
        "     return a\n",
        "(",
        ")",
        "$A",
    ),
    *(
        "\0",
        "\r",
        "\x0b",
        "\x0c",
        "\x1b[",
        "\x1b]",
        "\x85",
        "\u2028",
        "\ud800",
        "é",
        "\U0001f389",
        "TODO:",
        "coding: hex",
    ),
]
texts = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.builds(str.__mul__, st.sampled_from([*PIECES, "a.", "1"]), st.sampled_from([2, 50, 3000])),
        st.text(alphabet=string.printable, max_size=6),
    ),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a text; the working directory is that of the file."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        return name

    return write


@pytest.mark.one_python
@pytest.mark.parametrize("name", ["a.txt", "uv.lock", "pyproject.toml", "a.json", "environment.yml", "Dockerfile"])
def test_audit_of_anything(file, capsys, name):
    @FEW
    @given(texts)
    @example(f"trl=={DIGITS}")
    @example("trl==1; " + "(" * 3000)
    @example("-r a\0b")
    @example("-r a.txt\n" * 2)
    @example("a." * 50_000 + "a = 1")
    @example(f"a = {DIGITS}")
    @example(f"[[package]]\nname = 'trl'\nversion = '{DIGITS}'")
    @example("[[package]]\nname = 'trl'\nversion = [1]")
    @example("[[package]]\nname = 'trl'\nversion = 1")
    @example("[tool.poetry.dependencies]\ntrl = " + "[" * 300)
    @example("[tool.uv.dependencies]\ntrl = " + "[" * 300)
    @example("[" * 100_000)
    @example('{"_meta": {}, "default": {"trl": ' + "[" * 300)
    @example('[{"name": "trl", "version": ' + DIGITS + "}]")
    @example("dependencies:\n" + "  - pip:\n" * 1000 + "     - -r environment.yml\n")
    @example("package:\n" + "- name: 'trl\n" * 1000)
    @example("FROM x\nRUN [" + "[" * 3000)
    @example("FROM x\nRUN <<EOF\n" + "pip install 'trl \\\n" * 1000)
    @example("\n" * 20_000 + " " * 20_000)
    @example("FROM x\nRUN pip install -r Dockerfile -e -r\n")
    def run(text):
        status = cli.main(["audit", "--json", file(name, text)])
        out, err = capsys.readouterr()
        # With status 2 there may be an answer, too: of what is named without a version.
        assert (status, err.count("\n")) in ((0, 0), (1, 0), (2, 1)), (status, err)
        if status < 2 or out:
            said = json.loads(out)["summary"]
            assert status or (said["looked_up"], said["not_understood"]) == (said["frameworks"], 0)

    run()


def test_diagnose_of_anything():
    @FEW
    @given(texts)
    @example("(pid=" + "1" * 60_000)
    @example("(" + "pid=1" * 13_000)
    def run(text):
        log = text.encode("utf-8", "surrogatepass")
        for raised in tracebacks.read(io.BytesIO(b"Traceback (most recent call last):\n" + log * 3)):
            assert len(raised.message) <= 2000
            assert len(raised.stream) <= 500

    run()


class One:
    """A package with one module."""

    where = "here"

    def source(self, module):
        if module != "p.mod":
            raise NotFound(module)
        return Source(module, "p/mod.py", "def f(a):\n    return a\n")


def test_a_diff_of_anything():
    """Its words end up in a patch's module as comments and literals."""

    @FEW
    @given(texts, texts)
    @example("--- a/x\rimport os\n+++ b/x\rimport os#/p/mod.py\n@@ -1,1 +1,2 @@\n def f(a):\n+    b = 1\n", "")
    @example(
        "From x\nSubject: =?utf-8?q?=00=ED=A0=80?=\n\n", "--- a/p/mod.py\n+++ b/p/mod.py\n@@ -9,1 +9,1 @@\n-x\n+y\n"
    )
    def run(head, more):
        try:
            found = fix.read(head + more, One())
        except fix.FixError:
            return
        for text in [
            found.subject,
            *found.skipped,
            *(each for hunk in found.hunks for each in (hunk.label, *hunk.open)),
        ]:
            assert len(definition.comment(text).splitlines()) == 1
            assert eval(definition.literal(text)) == text

    run()


def test_a_page_of_anything(monkeypatch):
    kinds = st.sampled_from([index._of_html, index._of_json])
    links = [
        '<a href="',
        "'",
        '">',
        "</a>",
        "<a ",
        "data-yanked",
        "#sha256=",
        "toy-1.0.zip",
        "/../",
        "&lt;",
        '{"files": [',
        "}",
    ]

    @FEW
    @given(kinds, st.lists(st.sampled_from(links + PIECES), max_size=20).map("".join))
    @example(index._of_html, "<a " * 200_000)
    @example(index._of_html, "<a x=" + "'" * 100_000)
    @example(index._of_html, '<a href="/f">toy-1.0/../../x.whl</a>')
    @example(index._of_json, "[" * 100_000)
    @example(index._of_json, '{"files": [{"filename": "../x.whl", "url": ""}]}')
    def run(read, page):
        try:
            files = list(read(page.encode("utf-8", "surrogatepass")))
        except Exception:  # which `releases` says in one line
            return
        for each in files:
            assert os.path.basename(each.filename) == each.filename
            index._version(each.filename, "toy")

    run()
