"""What a process writes to its standard error."""

from __future__ import annotations

import logging
import os
import sys

import pytest

from rlhf_patches import PatchReport, Status, ranks
from rlhf_patches.engine import log

LAUNCHERS = [name for launcher in ranks._LAUNCHERS for name in launcher]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def row(reason, status=Status.REFUSED):
    return PatchReport("x-bug", status, reason, "dist", "1.0", "", "tests")


def test_a_forked_child_does_not_warn_again(capfd):
    handler = logging.StreamHandler(sys.stderr)
    log.logger().addHandler(handler)
    try:
        log.announce([row("one")])
        pid = os.fork()
        if not pid:
            log.announce([row("two")])
            os._exit(0)
        os.waitpid(pid, 0)
    finally:
        log.logger().removeHandler(handler)
    assert capfd.readouterr().err.count("refused x-bug") == 1
