"""docs/glossary.md: nothing has a name or a text that it retires."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("rlhf_patches", "patches", "hunt", "tools", "release_record", "examples")
PAGE = "docs/glossary.md"
HISTORY = ("CHANGELOG.md", "docs/decisions/")  # what was so called then
RETIRED = re.findall(
    r'^\| (?:`(\w+)`|"([^"]+)") \|', (ROOT / PAGE).read_text().partition("## Retired words\n")[2], re.MULTILINE
)
NAMES, PHRASES = ({each[kind] for each in RETIRED} - {""} for kind in (0, 1))


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def names_in(text: str) -> set[str]:
    return {
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.NAME
    }


def test_no_code_has_a_retired_name():
    assert len(NAMES) >= 10
    files = tracked(*(f"{folder}/**.py" for folder in CODE))
    assert len(files) > 500
    wrong = {str(file.relative_to(ROOT)): NAMES & names_in(file.read_text()) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_no_text_has_a_retired_phrase():
    assert len(PHRASES) >= 5
    retired = re.compile("|".join(map(re.escape, PHRASES)), re.IGNORECASE)
    files = [file for file in tracked("*.py", "*.md") if not str(file.relative_to(ROOT)).startswith((PAGE, *HISTORY))]
    wrong = {str(file.relative_to(ROOT)): retired.findall(file.read_text()) for file in files}
    assert {file: phrases for file, phrases in wrong.items() if phrases} == {}


def test_what_is_retired_would_be_seen():
    assert names_in("def told(): x.tells = f'{_said}'") >= {"told", "tells"}
