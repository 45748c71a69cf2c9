"""``transformers-packed-recurrence``, an advice: packed rows of recurrent models (packed_recurrence_ranks.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.transformers._recurrent_families import joins_documents
from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.packed_recurrence_ranks"
RULE_COVERAGE = {
    "minimal scope": "because nothing is applied: an advice",
    "no side effects": "because nothing is applied: an advice",
    "backward compatible": "test_other_documents_come_in",
    "no new blocking": "because nothing is applied: an advice",
}
RECURRENT = ("GraniteMoeHybrid", "Jamba", "MiniMax", "Mamba")


@pytest.fixture(scope="module", params=[None, pytest.param("transformers-4.57", marks=pytest.mark.exhaustive)])
def report(request, run_ranks):
    (found,) = run_ranks(WORKER, levels=beside(request.param, "trainer"), ranks=1)
    assert found["status"] == "advice"
    assert request.param or not found["missing"]
    return found


def test_other_documents_come_in(report):
    assert min(report["apart"][family] for family in RECURRENT) > 0.05
    assert report["apart"]["Llama"] < 1e-5


def test_a_run_on_packed_rows_is_said_once(report):
    assert report["packed"]["counts"] == [1, 1]
    assert len(report["packed"]["said"]) == 1
    assert report["again"] == {"counts": [1, 1], "said": []}


@pytest.mark.parametrize("case", ["padded", "one document", "borders", "Llama"])
def test_nothing_is_said_of_other_runs(report, case):
    assert report[case]["counts"][0] == 0
    assert report[case]["said"] == []


def test_classes_of_a_user_are_unknown():
    model = type("JambaForCausalLM", (), {"training": True})()
    assert joins_documents(SimpleNamespace(model=model), {}) is False
    for name in ("JambaForCausalLM", "JambaForSequenceClassification"):
        released = type(name, (), {"__module__": "transformers.models.jamba.modeling_jamba"})
        own = type("Own", (released,), {"__module__": "mine"})
        assert joins_documents(SimpleNamespace(model=own()), {"input_ids": None}) is None
    assert joins_documents(SimpleNamespace(model=released()), {}) is None
