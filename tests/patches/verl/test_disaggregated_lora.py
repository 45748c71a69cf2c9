"""``verl-disaggregated-lora``: what it says is so, on verl's real worker and engine (disaggregated_lora_ranks.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import verl_workers

RULE_COVERAGE = {
    "minimal scope": "because nothing is applied: an advice",
    "no side effects": "because nothing is applied: an advice",
    "backward compatible": "test_without_merge_the_adapter_stays_behind",
    "no new blocking": "because nothing is applied: an advice",
}
WORKER = "tests.patches.verl.disaggregated_lora_ranks"
#: What is sent may be bfloat16, rounded once, by at most 2**-8 of a number.
ROUNDED = 2**-8


@pytest.fixture(scope="module", params=exhaustive_but(["0.9", "0.8", "0.7"], "0.9"))
def report(run_ranks, request):
    levels = verl_workers(None if request.param == "0.9" else request.param)
    (found,) = run_ranks(WORKER, levels=levels, ranks=1, TORCHDYNAMO_DISABLE="1")
    assert (found["status"], found["version"][:3]) == ("advice", request.param)
    assert found["before"] == found["after"] == found["reverted"], "nothing is changed"
    return found


@pytest.mark.parametrize("case", ["adapter", "adapter, fsdp1"])
def test_without_merge_the_adapter_stays_behind(report, case):
    found = report["before"][case]
    assert found["found"] == 1
    assert found["from the base"] < ROUNDED
    assert found["from merged"] > 0.9
    assert not found["of the adapter"]
    assert "peft_config" not in found["received with"]


@pytest.mark.parametrize("case", ["merged", "merged, fsdp1"])
def test_what_is_advised_is_right(report, case):
    """With FSDP2, before 0.9.0 with verl-merged-lora, which is not on here."""
    found = report["before"][case]
    repaired = case != "merged" or report["version"].startswith("0.9")
    assert (found["from merged"] < ROUNDED) == repaired


def test_it_reports_the_updates_without_the_adapter(report):
    assert report["reached"] == {"calls": 5, "asked": 5, "held": 2}


@pytest.mark.parametrize(
    ("mode", "backend", "merge", "module", "expected"),
    [
        ("auto", "nccl", False, "PeftModel", True),
        ("auto", "naive", False, "PeftModel", False),
        ("naive", "nccl", False, "PeftModel", False),
        ("nccl", "naive", False, "PeftModel", True),
        ("auto", "nccl", True, "PeftModel", False),
        ("auto", "nccl", False, "Module", False),
        ("auto", "nccl", False, "list", None),
        ("auto", "delta_sharded", False, "PeftModel", None),
    ],
)
def test_the_condition(mode, backend, merge, module, expected):
    torch = pytest.importorskip("torch")
    from rlhf_patches.patches.verl import _conditions

    modules = {"list": [], "Module": torch.nn.Module(), "PeftModel": torch.nn.Module()}
    modules["PeftModel"].peft_config = {}
    engine = SimpleNamespace(model_config=SimpleNamespace(lora={"merge": merge}), module=modules[module])
    config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=SimpleNamespace(backend=backend)))
    worker = SimpleNamespace(config=config, actor=SimpleNamespace(engine=engine))
    assert _conditions.sends_no_adapter(worker, mode) is expected
    if mode == "auto":
        assert _conditions.sends_no_adapter_by_its_settings(worker) is expected
