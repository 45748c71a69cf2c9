"""``.ci/releases``: a scheduled job fails where a person has something to do, and only there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOK, COMMIT = "LOOK AT THIS: ", "COMMIT THIS: what was read, in\n"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("@true", ["nothing is new"]),
        ("@echo look at this: a range; exit 1", [LOOK]),
        ("@echo a release >> release_record/trl.json", [COMMIT, " M release_record/trl.json"]),
        ("@echo a file > release_record/$(NAMES).json; exit 1", [LOOK, COMMIT, "?? release_record/new.json"]),
    ],
)
def test_the_status_and_the_last_lines_say_what_to_do(tmp_path, recipe, said):
    for name in (".ci", "release_record", "docs", "rlhf_patches/offline"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "releases", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(f"releases:\n\t{recipe}\n")
    (tmp_path / "release_record" / "trl.json").touch()
    author = ("-c", "user.name=Some Body", "-c", "user.email=some@body.invalid")
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "Before"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    done = subprocess.run([".ci/releases", "new"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert done.returncode == (0 if said == ["nothing is new"] else 1), done.stdout
    for text in said:
        assert text in done.stdout
    for text in {"nothing is new", LOOK, COMMIT} - set(said):
        assert text not in done.stdout
