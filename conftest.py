"""For every test: none of the user's own RLHF_PATCHES_* variables, and nothing that an earlier process has found."""

import os

import pytest

# What a test applies is recognised and compiled in that test; tests/engine/guards/test_stores.py is about the files.
os.environ["RLHF_PATCHES_CACHE"] = "0"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("RLHF_PATCHES_") and variable != "RLHF_PATCHES_CACHE":
            monkeypatch.delenv(variable)
