"""``trl-vllm-serve-dead-worker``: TRL's own server answers with an error when its worker has died."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.trl.vllm_serve_dead_worker import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import trl_server

RULE_COVERAGE = {
    "minimal scope": "because one handle is closed that this process never uses",
    "no side effects": "because it closes the server's own copy of a pipe's end",
    "backward compatible": "test_it_answers_with_an_error",  # the first request
    "no new blocking": "because closing a handle does not wait; a wait becomes an error",
    "not restarted": "test_it_answers_with_an_error",
}
WORKER = "tests.patches.trl_on_vllm.vllm_serve_dead_worker_ranks"


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.16.1", "trl==0.17.0", "trl==0.29.1", "trl==1.10.0", "trl==1.11.0")
    held = RULE_COVERAGE


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (trl_server.RELEASE, ()),
        pytest.param("1.0.0", (), marks=pytest.mark.exhaustive),
        pytest.param(trl_server.RELEASE, ("--engine",), marks=pytest.mark.exhaustive),
    ],
)
def test_it_answers_with_an_error(run_ranks, version, options):
    levels = trl_server.levels(version)
    (found,) = run_ranks(WORKER, *options, levels=levels, ranks=1)
    assert (found["version"], found["status"]) == (version, "applied")
    for death in ("raised", "killed"):
        assert found["before"][death] == {"first": 200, "deadly": "no answer", "next": "no answer"}
        assert found["after"][death] == {"first": 200, "deadly": 500, "next": 500}
