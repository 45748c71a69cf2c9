"""For every test: none of the user's own RLHF_PATCHES_* variables."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("RLHF_PATCHES_"):
            monkeypatch.delenv(variable)
