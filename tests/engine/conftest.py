"""The fixtures of make-believe frameworks, of plugins that patch them, of reports, and of commands in this process."""

from __future__ import annotations

import importlib

import pytest

from rlhf_patches import cli
from tests.harness.archives import untouched
from tests.harness.fake_framework import engine, framework, nothing_said_yet, quiet
from tests.harness.plugins import site
from tests.harness.report_lines import file
from tests.harness.toy_slime_fixtures import slime, slime_wheel

__all__ = ["engine", "file", "framework", "nothing_said_yet", "quiet", "site", "slime", "slime_wheel", "untouched"]


@pytest.fixture
def said(capsys):
    """Runs a command in this process; gives its status, what it printed, and what it complained of."""

    def run(*arguments):
        importlib.invalidate_caches()
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # of argparse
            status = end.code
        out, err = capsys.readouterr()
        return status, out, err

    return run
