"""trl-continuous-batching-weights: steps of TRL's own trainers against Adam in float64, and its other generation.

`generate_batch` samples, and takes a second and a half per step on a CPU. The proof runs it (test_proofs.py), and so
does an exhaustive test. Elsewhere a function with fixed completions stands in its place, called by the release's own
methods, so that runs with and without continuous batching have the same completions.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches import _released
from rlhf_patches.patches.trl import _conditions, _kept_weights
from rlhf_patches.patches.trl.continuous_batching_weights import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_what_is_not_rounded_is_the_same_bit_for_bit",
    "no side effects": "test_a_generation_leaves_every_object",
    "backward compatible": ("test_what_is_not_known_is_left", "test_a_cast_that_raises"),
    "no new blocking": "test_on_two_ranks",
    "known": "test_what_is_not_known_is_left",
    "also if the generation raises": "test_a_generation_leaves_every_object",
    "stays as released, bit": "test_what_is_not_rounded_is_the_same_bit_for_bit",
    "stay tied": "test_tied_weights_are_one_while_generating",
    "ranks stay equal": "test_on_two_ranks",
    "stay in float32 while generating": "test_the_generation_is_of_16_bit_weights",
    "as released, also with": "test_the_generation_is_of_16_bit_weights",
    "shards stay in 16 bits": "because it is left as released: test_what_is_not_known_is_left",
    "is not touched": "test_a_generation_leaves_every_object",
    "stay in float32, as without": "test_updates_are_those_of_float64",
    "the optimizer's states are loaded": "test_states_in_float32_refuse_weights_that_stay_cast",
    "clipping the gradients": "test_a_scaler_refuses_weights_that_stay_cast",
}
WORKER = "tests.patches.trl.continuous_batching_weights_ranks"
PROOF = "rlhf_patches.patches.trl.proofs.continuous_batching_weights_ranks"
ROUNDED = ("GRPO", "RLOO", "adapters", "head in float32")
MORE = ("tied", "accumulated")
SAME = ("in bf16", "float32", "regular", "own class")
REGULAR = ("GRPO", "adapters")
#: Of an update of 1e-6, float32 rounds up to 6e-8 away where a weight is 1, as those of norms.
ROUNDING = 0.01


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.20.0", "trl==1.16.0", "trl==0.19.1")
    held = RULE_COVERAGE


def ran(run_ranks, *cases, levels=TRL):
    (found,) = run_ranks(WORKER, *cases, levels=levels, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


@pytest.fixture(scope="module")
def report(run_ranks):
    return ran(run_ranks, *ROUNDED, "in bf16 but rotary", *SAME, *(f"{case}, regular" for case in REGULAR))


@pytest.fixture(scope="module", params=[None, "trl-1.16", "trl-1.5"])
def more(request, run_ranks):
    level = Level("tests.harness.loading:trl", *([str(folder(request.param))] if request.param else []))
    cases = ("GRPO", "RLOO", *MORE, *(f"{case}, regular" for case in ("GRPO", "RLOO", *MORE)))
    return ran(run_ranks, *cases, levels=(*TORCH, level))


def is_repaired(report, case):
    before, after = (report[state][case] for state in ("before", "after"))
    assert after["error"] < ROUNDING < 10 < before["error"]
    # The head's updates are not lost where it is cast back, but its weights were rounded.
    assert after["stayed"] == 0 < 0.6 < before["stayed"]
    assert before["moments"][0] == "torch.bfloat16"
    assert after["moments"] == ["torch.float32"]


@pytest.mark.parametrize("case", ROUNDED)
def test_updates_are_those_of_float64(report, case):
    is_repaired(report, case)
    assert report["before"][case]["weights"][0] == "torch.bfloat16"
    assert report["after"][case]["weights"] == (["torch.bfloat16"] * (case == "adapters")) + ["torch.float32"]


@pytest.mark.parametrize("case", REGULAR)
def test_all_weights_are_those_of_trl_s_other_generation(report, case):
    regular = report["before"][f"{case}, regular"]
    assert report["after"][case]["found"] == regular["found"] != report["before"][case]["found"]
    assert report["after"][f"{case}, regular"] == regular


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["GRPO", "RLOO", *MORE])
def test_other_releases_and_settings(more, case):
    is_repaired(more, case)
    assert more["after"][case]["found"] == more["before"][f"{case}, regular"]["found"]
    assert more["after"][case]["objects"] == {"returns": True, "raises": True}
    tied = {each["tied"] for each in more["after"][case]["generations"]}
    assert tied == {case == "tied"}
    if case == "accumulated":  # gradients of the step's first half
        assert [each["gradients"] > 0 for each in more["before"][case]["generations"]] == [False, True] * 2


@pytest.mark.parametrize("case", SAME)
def test_what_is_not_rounded_is_the_same_bit_for_bit(report, case):
    assert report["after"][case] == report["before"][case]


@pytest.mark.parametrize("case", [*ROUNDED, "in bf16 but rotary"])
def test_a_generation_leaves_every_object(report, case):
    assert report["before"][case]["objects"] == {"returns": False, "raises": False}
    assert report["after"][case]["objects"] == {"returns": True, "raises": True}


@pytest.mark.parametrize("case", [*ROUNDED, "in bf16 but rotary"])
def test_the_generation_is_of_16_bit_weights(report, case):
    before, after = (report[state][case]["generations"] for state in ("before", "after"))
    kept = ("weights", "head", "tied")
    assert [{name: each[name] for name in kept} for each in after] == [
        {name: each[name] for name in kept} for each in before
    ]
    assert after[0]["values"] == before[0]["values"], "before a step, the same values"
    assert {each["buffers"][-1] for each in after} == {"torch.float32"} != {each["buffers"][-1] for each in before}
    assert {each["head"] for each in after} == {"torch.float32" if "head" in case else "torch.bfloat16"}


def test_rotary_frequencies_alone_are_a_case_of_it(report):
    before, after = (report[state]["in bf16 but rotary"] for state in ("before", "after"))
    assert (before["buffers"], after["buffers"][-1]) == (["torch.bfloat16"], "torch.float32")


def test_how_often_it_was_met(report):
    # Two steps, and two generations by themselves, of each case. The other class is in bf16 after one of both.
    assert report["reached"]["held"] == 4 * (len(ROUNDED) + 1)
    assert report["reached"]["calls"] - report["reached"]["asked"] == 2


def test_it_says_what_it_leaves(report):
    (said,) = (each for each in report["after"]["messages"] if "as released" in each)
    assert "Own is not" in said


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"]["GRPO"] == report["before"]["GRPO"]


def test_on_two_ranks(run_ranks):
    reports = run_ranks(WORKER, "--ranks", "GRPO", levels=TRL, ranks=2, ACCELERATE_USE_CPU="true")
    for report in reports:
        before, after = (report[state]["GRPO"] for state in ("before", "after"))
        assert (before["equal"], before["gradients"]) == (False, False), "each rank had a model of its own"
        assert (after["equal"], after["gradients"]) == (True, True)
    assert len({report["after"]["GRPO"]["found"] for report in reports}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", [None, "trl-1.16", "trl-1.5"])
def test_with_transformers_own_batches(run_ranks, release):
    level = Level("tests.harness.loading:trl", *([str(folder(release))] if release else []))
    (found,) = run_ranks(PROOF, "GRPO", "RLOO", levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    for case in ("GRPO", "RLOO"):
        is_repaired(found, case)


def trainer(model=None, kind="MULTI_GPU", **arguments):
    return SimpleNamespace(
        model=model,
        use_vllm=False,
        use_transformers_continuous_batching=True,
        args=SimpleNamespace(**{"bf16": True, "fp16": False, **arguments}),
        accelerator=SimpleNamespace(distributed_type=SimpleNamespace(value=kind)),
    )


def linear(kind=torch.nn.Linear):
    made = torch.nn.Sequential(kind(3, 3), torch.nn.BatchNorm1d(3))
    made[0].weight.grad = torch.ones(3, 3)
    return made


def tensors(model):
    return [(each, each.dtype) for each in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_and_buffers_are_put_back(dtype):
    model = linear()
    before = tensors(model)
    values = [each.clone() for each, _ in before]
    with contextlib.suppress(FloatingPointError), _kept_weights.Kept(trainer(model)) as kept:
        kept.cast(model, dtype)
        assert {each.dtype for each, _ in tensors(model)} == {dtype, torch.int64}
        assert not any(each is other for each in model.parameters() for other, _ in before)
        assert [each.requires_grad for each in model.parameters()] == [True] * 4
        raise FloatingPointError
    assert all(new is old and kind == was for (new, kind), (old, was) in zip(tensors(model), before, strict=True))
    assert all(bool((each == value).all()) for (each, _), value in zip(before, values, strict=True))
    assert model[0].weight.grad.dtype is torch.float32


@contextlib.contextmanager
def cast(model, dtype, kept):
    """While a trainer generates, as released or with the repair."""
    if not kept:
        model.to(dtype)
        yield
        return
    with _kept_weights.Kept(trainer(model)) as owner:
        owner.cast(model, dtype)
        yield


def stepped(dtype, kept, scaler=None):
    """A step before a generation, as of the run that was saved, and one after it."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if scaler is None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with cast(model, dtype, kept):
        pass
    loss = model(torch.ones(1, 3, dtype=model.weight.dtype)).sum()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # as accelerate does before it clips
        scaler.step(optimizer)
    return model.weight.dtype


def test_states_in_float32_refuse_weights_that_stay_cast():
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        stepped(torch.bfloat16, kept=False)
    assert stepped(torch.bfloat16, kept=True) is torch.float32


def test_a_scaler_refuses_weights_that_stay_cast():
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        stepped(torch.float16, kept=False, scaler=torch.amp.GradScaler("cpu"))
    assert stepped(torch.float16, kept=True, scaler=torch.amp.GradScaler("cpu")) is torch.float32


def test_tied_weights_are_one_while_generating():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with _kept_weights.Kept(trainer(model)) as kept:
        kept.cast(model, torch.bfloat16)
        assert model[1].weight is model[0].weight
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype is torch.float32


def test_buffers_that_transformers_loads_in_float32_stay_so_while_generating():
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank"), 8)
    heads = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4)
    config = transformers.DeepseekV3Config(
        vocab_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=0,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        **sizes,
        **heads,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    with _kept_weights.Kept(trainer(model)) as kept:
        kept.cast(model, torch.bfloat16)
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        assert any("e_score_correction_bias" in name for name, _ in model.named_buffers())
        assert {each.dtype for each in model.buffers()} == {torch.float32}


def test_what_the_generation_changes_stays():
    model = linear()
    norm = model[1]
    with _kept_weights.Kept(trainer(model)) as kept:
        kept.cast(model, torch.bfloat16)
        norm.running_mean += 1  # in place
        norm.running_var = torch.full((3,), 5.0)  # another one, as dynamic rotary frequencies
    assert norm.running_mean.tolist() == [1, 1, 1]
    assert norm.running_var.tolist() == [5, 5, 5]
    assert norm.running_var.dtype is torch.float32


class Cast(torch.nn.Linear):
    """Of another package."""


Cast.__module__ = "mine"


def other_parameter():
    made = linear()
    made[0].weight = type("Quantized", (torch.nn.Parameter,), {})(torch.ones(3, 3))
    return made


def own_to():
    made = linear()
    made.to = lambda dtype: torch.nn.Module.to(made, dtype)
    return made


def with_a_manager():
    made = linear()
    made._cached_continuous_batching_manager = object()
    return made


@pytest.mark.parametrize(
    ("made", "kind", "why"),
    [
        (linear, "DEEPSPEED", "DEEPSPEED's"),
        (linear, "FSDP", "FSDP's"),
        (lambda: linear(Cast), "NO", "Cast is not"),
        (lambda: torch.nn.GRU(2, 2), "NO", "GRU is not"),
        (other_parameter, "NO", "weight is a Quantized"),
        (lambda: linear().to("meta"), "NO", "another kind"),
        (own_to, "NO", "Sequential.to is not"),
        (with_a_manager, "NO", "a manager"),
    ],
)
def test_what_is_not_known_is_left(made, kind, why, monkeypatch):
    said = []
    monkeypatch.setattr(_released, "stays", lambda _, each, what: said.append(each))
    model = made()
    before = list(model.parameters())
    owner = trainer(model, kind)
    assert _conditions.casts_the_trained(owner) is None
    with _kept_weights.Kept(owner) as kept:
        kept.cast(model, torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert why in said[0]


def test_deepspeed_in_16_bits_has_nothing_to_keep(monkeypatch):
    monkeypatch.setattr(_released, "stays", lambda *_: pytest.fail("it is not affected"))
    model = linear().to(torch.bfloat16)
    owner = trainer(model, "DEEPSPEED")
    assert _conditions.casts_the_trained(owner) is False
    with _kept_weights.Kept(owner) as kept:
        kept.cast(model, torch.bfloat16)


def test_a_cast_that_raises():
    model = linear()
    before = tensors(model)
    with contextlib.suppress(TypeError), _kept_weights.Kept(trainer(model)) as kept:
        kept.cast(model, torch.int64)  # which `to` refuses
    assert all(new is old for (new, _), (old, _) in zip(tensors(model), before, strict=True))


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"bf16": False}, False),
        ({"bf16": False, "fp16": True}, True),
    ],
)
def test_the_condition_is_the_run_s_type(changes, held):
    assert _conditions.casts_the_trained(trainer(linear(), **changes)) is held


def test_the_condition_is_continuous_batching():
    owner = trainer(linear())
    owner.use_transformers_continuous_batching = False
    assert _conditions.casts_the_trained(owner) is False
    owner.use_transformers_paged = True
    assert _conditions.casts_the_trained(owner) is True
    owner.use_vllm = True
    assert _conditions.casts_the_trained(owner) is False
