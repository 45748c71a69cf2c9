"""verl's own plugin group patches a worker that has no site hook: the built wheel, real verl, a process for each."""

from __future__ import annotations

import pytest

LOOK = """
import importlib.metadata, sys
import verl
import verl.utils.fs
for entry_point in importlib.metadata.entry_points(group="vllm.general_plugins", name="rlhf_patches"):
    entry_point.load()()  # as vLLM does
engine = "rlhf_patches.engine" in sys.modules
import rlhf_patches
print(engine, *sorted({row.status.value for row in rlhf_patches.report() if row.distribution == "verl"}))
"""


@pytest.fixture(scope="module")
def without_hook(make_installed):
    made = make_installed()
    for file in made.site.glob("rlhf_patches*.pth"):
        file.unlink()
    return made


@pytest.mark.exhaustive
def test_it_is_patched_if_that_is_asked_for(without_hook):
    assert without_hook.code(LOOK) == "False inactive"
    contested = "verl-gdpo-whitening,verl-rejected-in-group"
    asked_for = {"RLHF_PATCHES_AUTOLOAD": "1", "RLHF_PATCHES_ENABLE": contested}
    found = without_hook.code(LOOK, **asked_for).split()
    assert found[0] == "True"
    assert set(found[1:]) <= {"pending", "applied", "unaffected"}
    assert {"pending", "applied"} & {*found}


@pytest.mark.exhaustive
def test_an_error_that_verl_swallows_comes_back(without_hook):
    """verl logs what a plugin raises, at a level that nobody sees."""
    done = without_hook.run(
        without_hook.python, "-c", LOOK, RLHF_PATCHES_AUTOLOAD="1", RLHF_PATCHES_DISABLE="no-such-patch"
    )
    assert done.returncode == 1
    assert "SettingsError" in done.stderr
    assert "no-such-patch" in done.stderr
