"""slime-linear-attention-gradient: what goes back through the layer on ranks, against one rank in float64.

With a clone slime's own file of a tag, without one the stand-in for it; linear_attention_gradient_ranks.py has the
attention. Float32 sums of 40 tokens of some units: 1e-6 of the gradient's norm, and ten times that is allowed.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

from rlhf_patches.patches import _released
from rlhf_patches.patches.slime import linear_attention_gradient
from tests.harness import slime_clone
from tests.harness.forkserver import MEGATRON, Level
from tests.harness.slime_clone import with_clone

WORKER = "tests.patches.slime.linear_attention_gradient_ranks"
FILES = ("slime_plugins/models/hf_attention.py",)
STANDIN = Path(__file__).parents[2] / "harness" / "standins" / "slime_linear_attention"
# The stand-in has both defects. v0.2.4 calls itself 0.2.3.
VERSIONS = {
    "v0.2.0": "0.2.0",
    "v0.2.1": "0.2.1",
    "v0.2.3": "0.2.3",
    "v0.2.4": "0.2.3",
    "v0.3.0": "0.3.0",
    "v0.3.1": "0.3.1",
}
INFLATED, CUT = ("v0.2.0", "v0.2.1", "v0.2.3", None), ("v0.2.4", "v0.3.0", "v0.3.1", None)
ROUNDING = 1e-5
RULE_COVERAGE = {
    "minimal scope": "test_without_either_nothing_changes",
    "no side effects": "because it gathers the tensor that slime gathers",
    "backward compatible": "test_without_either_nothing_changes",
    "no new blocking": "because all ranks of a group gather, forward and backward, as they did forward",
    "known": ("test_sequence_parallelism", "test_context_parallelism"),
    "own weights were right": "test_context_parallelism",
    "Without sequence and context": "test_without_either_nothing_changes",
    "results are bitwise identical": ("test_without_either_nothing_changes", "test_the_half_that_a_release_has_right"),
    "does not change a layer": "test_a_layer_with_code_of_ones_own_stays_as_released",
    "For the same reason": "test_a_layer_with_code_of_ones_own_stays_as_released",
}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def start(run_ranks, tmp_path_factory):
    def run(tag, tensor, context, *sequence):
        folder = STANDIN
        if tag is not None:
            folder = slime_clone.write(tmp_path_factory.mktemp("slime"), tag, VERSIONS[tag], FILES)
        levels = (*MEGATRON, Level("tests.harness.loading:torch", str(folder)))
        found = run_ranks(WORKER, str(tensor), str(context), *sequence, levels=levels, ranks=tensor * context)
        assert all(report["status"] == "applied" for report in found)
        for report in found:
            met = report["before"]["states"] > ROUNDING
            # Of slime's layer and of a user's own, of which nothing is said where slime's has the bug.
            expected = {"calls": 2, "asked": 1, "held": 1} if met else {"calls": 2, "asked": 2, "held": 0}
            assert {name: report["reached"].get(name, 0) for name in expected} == expected
            assert report["before"] == report["reverted"]
            for state in ("before", "after"):
                assert max(report[state]["in"], report[state]["out"]) <= ROUNDING, "the layer's own weights"
        return found

    return run


def each(tags):
    return pytest.mark.parametrize(
        "tag",
        [tag if tag is None else pytest.param(tag, marks=[with_clone, exhaustive]) for tag in tags],
        ids=lambda tag: tag or "stand-in",
    )


@each(INFLATED)
def test_sequence_parallelism(start, tag):
    """Two ranks: twice the gradient."""
    for report in start(tag, 2, 1, "SP"):
        assert report["before"]["states"] == pytest.approx(1.0, abs=ROUNDING)
        assert report["after"]["states"] <= ROUNDING
        assert max(report[state]["own"] for state in ("before", "after")) <= ROUNDING, "heads of a rank"


@each(CUT)
def test_context_parallelism(start, tag):
    """What goes back to other ranks' tokens is lost."""
    found = start(tag, 1, 2)
    assert max(report["before"]["states"] for report in found) > 0.3, "seen: 0.45 and 0.26"
    for report in found:
        assert report["after"]["states"] <= ROUNDING
        assert max(report[state]["own"] for state in ("before", "after")) <= ROUNDING, "which adds up itself"


@exhaustive
@each(CUT)
def test_both(start, tag):
    """Not before v0.2.4: there torch's own gathering wants, off NCCL, a group of all ranks."""
    found = start(tag, 2, 2, "SP")
    assert max(report["before"]["states"] for report in found) > 0.3
    for report in found:
        assert report["after"]["states"] <= ROUNDING


@pytest.mark.parametrize("sizes", [(1, 1), pytest.param((2, 1), marks=exhaustive)], ids=["one rank", "TP"])
@each(("v0.2.3", "v0.3.1", None))
def test_without_either_nothing_changes(start, sizes, tag):
    for report in start(tag, *sizes):
        assert report["after"] == report["before"]
        assert report["after"]["states"] <= ROUNDING


@exhaustive
@with_clone
@pytest.mark.parametrize(("tag", "sizes"), [("v0.2.3", (1, 2)), ("v0.2.4", (2, 1, "SP")), ("v0.3.1", (2, 1, "SP"))])
def test_the_half_that_a_release_has_right(start, tag, sizes):
    for report in start(tag, *sizes):
        assert report["after"] == report["before"]
        assert report["after"]["states"] <= ROUNDING


def of_module(name, function):
    return FunctionType(function.__code__, {"__name__": name})


def slimes_layer():
    """As slime's: a norm of transformers' and a layer of torch's, and Megatron's hooks."""
    slime, transformers = "slime_plugins.models.qwen3_next", "transformers.models.qwen3_next.modeling_qwen3_next"
    same = {"forward": of_module(slime, lambda self, states: states)}
    layer = type("Attention", (torch.nn.Module,), {**same, "hf_forward": same["forward"]})()
    norm = type("Norm", (torch.nn.Module,), {"forward": of_module(transformers, lambda self, states: states)})
    layer.input_layernorm, layer.linear_attn = norm(), type("Net", (torch.nn.Module,), same)()
    layer.linear_attn.out_proj = torch.nn.Linear(2, 2)
    hook = of_module("megatron.core.distributed.distributed_data_parallel", lambda module, *_: None)
    layer.register_forward_pre_hook(hook)
    layer.register_forward_hook(functools.partial(hook))
    return layer


def divided(*args, **kwargs):
    """Of a user's, who has met the bug."""


USERS = {
    "hf_forward": lambda layer, _: setattr(type(layer), "hf_forward", divided),
    "Attention.forward": lambda layer, _: setattr(type(layer), "forward", divided),
    "Net.forward": lambda layer, _: setattr(type(layer.linear_attn), "forward", divided),
    "Norm.forward": lambda layer, _: setattr(layer.input_layernorm, "forward", divided),
    "hook of Attention": lambda layer, _: layer.register_forward_pre_hook(divided),
    "a hook of Net": lambda layer, _: layer.linear_attn.register_full_backward_hook(divided),
    "gather_from_sequence": lambda _, modules: setattr(modules[0], "gather_from_sequence_parallel_region", divided),
    "scatter_to_sequence": lambda _, modules: setattr(modules[0], "scatter_to_sequence_parallel_region", divided),
    "_AllGatherFor": lambda _, modules: setattr(modules[1], "_AllGatherForDuplicatedComputation", divided),
}


@pytest.mark.parametrize("users", USERS)
def test_a_layer_with_code_of_ones_own_stays_as_released(users, caplog, monkeypatch):
    _released.stays.cache_clear()
    modules = ModuleType("megatron.core.tensor_parallel"), ModuleType("slime_plugins.models.hf_attention")
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in linear_attention_gradient._MAPPINGS:
        setattr(modules[0], name, of_module("megatron.core.tensor_parallel.mappings", divided))
    backward = of_module(modules[1].__name__, divided)
    modules[1]._AllGatherForDuplicatedComputation = type("Own", (), {"backward": staticmethod(backward)})
    layer = slimes_layer()
    assert linear_attention_gradient.computes_all(layer)
    assert not caplog.messages
    USERS[users](layer, modules)
    assert not linear_attention_gradient.computes_all(layer)
    (said,) = caplog.messages
    assert f"{users}" in said
    assert said.endswith("is not slime's own: linear attention stays as released")
