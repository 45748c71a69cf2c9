"""The ``*-no-sync-reentry`` patches on the real ms-swift, Megatron-Bridge and verl: reverting, keeping away."""

from __future__ import annotations

import re

import pytest

from rlhf_patches import Status
from rlhf_patches.definitions import registry
from rlhf_patches.offline import evaluate
from tests.harness import look_alikes
from tests.harness.forkserver import trainer
from tests.harness.logs import diagnosed

MESSAGE = "When overlap_grad_reduce is True, config.no_sync_func must be None"
WORKER = "tests.patches.megatron_core.no_sync_entries_ranks"


@pytest.mark.parametrize("name", ["swift", "megatron_bridge", "verl"])
def test_reverted_the_real_function_is_itself_again(run_ranks, name):
    """On a reference taken before apply(): it raises, then does not, then raises again, with its own code.

    While patched it raises for what is not Megatron's own, be it a method of the same chunk.
    """
    (found,) = run_ranks(WORKER, "reverted", name, levels=trainer(name), ranks=1)
    assert found["released"] == ["installs", "raises"]
    assert found["patched"] == ["installs", "installs"]
    assert found["another method of the chunk"] == "raises", "a user has set it"
    assert found["reverted"] == "raises"
    assert found["own code again"]
    for text in found["tracebacks"]:
        bug = f"{name.replace('_', '-')}-no-sync-reentry"
        assert diagnosed(text) == [(bug, True)]
        # Its last line alone may be that of any of them.
        assert (bug, False) in diagnosed(text.splitlines()[-1])


@pytest.mark.parametrize("name", ["swift", "megatron-bridge", "verl"])
@pytest.mark.parametrize(("version", "status"), [(None, "refused"), ("unknown", "unaffected")])
def test_it_keeps_away(tmp_path, name, version, status):
    """From what upstream's pull requests make of it."""
    assertion = r"assert (\w+)\.no_sync_func is None, \(([^)]*)\)\n"

    def edit(text: str) -> str:
        assert len(re.findall(assertion, text)) == 1
        return re.sub(assertion, r"if \1.no_sync_func is None: pass\n", text)

    row = look_alikes.doctor_row(tmp_path, f"{name}-no-sync-reentry", version=version, edit=edit)
    assert row["status"] == status, row


@pytest.mark.parametrize("patched", [False, True])
def test_verl_chunks_that_share_a_config(run_ranks, patched):
    """With virtual pipeline stages, verl trips over its own first chunk in the first call."""
    (found,) = run_ranks(WORKER, "shared", *(["--apply"] if patched else []), levels=trainer("verl"), ranks=1)
    if patched:
        assert found == {"installed": True}
    else:
        assert found["raised"].startswith(MESSAGE)


def test_doctor_recognizes_what_is_installed():
    """The static check, on the real installed packages, and without importing them."""
    report = evaluate.inspect(*registry.load())
    for name in ("swift", "megatron-bridge", "verl"):
        assert report[f"{name}-no-sync-reentry"].status is Status.APPLIES, report[f"{name}-no-sync-reentry"]
    assert not report.problems
