"""``verl-lora-buckets`` on verl's real extension of vLLM's worker (lora_buckets_ranks.py)."""

from __future__ import annotations

import sys
import types
import weakref

import pytest
import torch

from rlhf_patches.patches.verl import lora_buckets
from rlhf_patches.patches.verl.proofs import lora_buckets_ranks
from tests.harness import forkserver

RULE_COVERAGE = {
    "minimal scope": "test_the_base_model_is_loaded_bucket_by_bucket",
    "no side effects": "because it copies tensors out of a buffer; nothing of the engine's is read",
    "backward compatible": ("test_an_adapter_in_one_bucket_is_right", "test_the_base_model_is_loaded_bucket_by_bucket"),
    "no new blocking": "because it is called where buckets arrive, and asks for none; no lock, no collective",
    "as before": "test_the_base_model_is_loaded_bucket_by_bucket",
}
WORKER = lora_buckets_ranks.__name__
ALL = [f"layers.{layer}" for layer in range(lora_buckets_ranks.LAYERS)]
STATES = ("before", "after", "reverted")


@pytest.fixture(scope="module", params=["0.8", pytest.param("0.7", marks=pytest.mark.exhaustive)])
def report(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=forkserver.verl_engine(request.param), ranks=1)
    assert report["status"] == "applied"
    assert report["version"].startswith(request.param)
    return report


@pytest.mark.parametrize(("case", "first"), [("two", 3), ("four", 2)])
def test_the_engine_gets_the_whole_adapter(report, case, first):
    for state in ("before", "reverted"):
        assert report[state][case]["layers"] == ALL[:first], "without the patch: the first bucket"
    assert report["after"][case] == {"layers": ALL, "right": ALL}


def test_an_adapter_in_one_bucket_is_right(report):
    for state in STATES:
        assert report[state]["one bucket"] == {"layers": ALL, "right": ALL}


@pytest.mark.parametrize("case", ["full", "base"])
def test_the_base_model_is_loaded_bucket_by_bucket(report, case):
    for state in STATES:
        assert report[state][case] == {"loaded": [ALL[:4], ALL[4:]], "adapters": 0}


def test_the_device_gets_the_copies_memory_back(monkeypatch):
    """vLLM maps its KV cache next, and takes nothing from what torch keeps."""
    given, alive = [], []

    def receive(on_bucket_received):
        for bucket in (["a", "b"], ["c"]):
            on_bucket_received([(name, torch.ones(2)) for name in bucket])

    def update(tensors):
        given.extend(weakref.ref(tensor) for _, tensor in tensors)

    def empty_cache():
        alive.append(sum(each() is not None for each in given))

    device = types.ModuleType("verl.utils.device")
    device.get_torch_device = lambda: types.SimpleNamespace(empty_cache=empty_cache)
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    lora_buckets.received(receive, update, True)
    assert (len(given), alive) == (3, [0])
    lora_buckets.received(receive, update, False)
    assert alive == [0], "weights that are no adapter's are never copied"
