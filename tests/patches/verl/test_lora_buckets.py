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
    "known": "test_a_worker_s_own_function_gets_each_bucket",
    "gets the buckets as released": "test_a_worker_s_own_function_gets_each_bucket",
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


def test_it_reports_the_adapters_in_several_buckets(report):
    """Two updates in each case; the base model's weights are no adapter's."""
    assert report["reached"] == {"calls": 8, "asked": 8, "held": 4}


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


def loading(module):
    """A worker's extension whose function is written in a module, what it has loaded, and the call of its function."""
    written = {"__name__": module, "loaded": []}
    exec("class Extension:\n    def _update_weights(self, weights): loaded.append(list(weights))", written)
    self = written["Extension"]()
    return lambda weights: self._update_weights(weights), written["loaded"]


@pytest.mark.parametrize(("module", "calls"), [("verl.workers.rollout.vllm_rollout.utils", 1), ("of_a_user", 2)])
def test_a_worker_s_own_function_gets_each_bucket(monkeypatch, module, calls):
    """It may add them up itself."""
    device = types.ModuleType("verl.utils.device")
    device.get_torch_device = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    update, loaded = loading(module)

    def receive(on_bucket_received):
        on_bucket_received([("a", torch.ones(2))])
        on_bucket_received([("b", torch.ones(2))])

    lora_buckets.received(receive, update, True)
    assert len(loaded) == calls
    assert [name for bucket in loaded for name, _ in bucket] == ["a", "b"]


def test_a_receiver_of_a_user_s_may_pass_dictionaries_or_nothing(monkeypatch):
    device = types.ModuleType("verl.utils.device")
    device.get_torch_device = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    update, loaded = loading("verl.workers.rollout.vllm_rollout.utils")
    lora_buckets.received(lambda on_bucket_received: None, update, True)
    assert loaded == []
    lora_buckets.received(lambda on_bucket_received: on_bucket_received({"a": torch.ones(2)}), update, True)
    assert [[name for name, _ in bucket] for bucket in loaded] == [["a"]]
