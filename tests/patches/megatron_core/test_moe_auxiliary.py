"""``megatron-core-moe-auxiliary-per-token``, ``-padding``, ``-context``, ``-global``: moe_auxiliary_ranks.py."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches import _released
from rlhf_patches.patches.megatron_core._conditions import (
    parts_of_a_sequence,
    tokens_of_a_rank,
    tokens_of_all_ranks,
    weight_of_one_replica,
    weight_of_one_replica_without_masks,
    z_loss_of_a_rank,
)
from rlhf_patches.patches.megatron_core.moe_auxiliary_global import is_megatrons
from tests.harness.forkserver import MEGATRON, megatron

WORKER = "tests.patches.megatron_core.moe_auxiliary_ranks"
PER_TOKEN, CONTEXT = "megatron-core-moe-auxiliary-per-token", "megatron-core-moe-auxiliary-context"
PADDING, GLOBAL = "megatron-core-moe-auxiliary-padding", "megatron-core-moe-auxiliary-global"
RULE_COVERAGE = {
    "minimal scope": "test_a_mean_over_a_micro_batch_is_megatron_s_bit_for_bit",
    "no side effects": "because one factor more is in an expression",
    "backward compatible": (
        "test_a_mean_over_a_micro_batch_is_megatron_s_bit_for_bit",
        "test_one_rank",
        "test_a_padding_mask",
    ),
    "no new blocking": "because a group's size is asked, which is known on each rank; no lock, no collective",
    "and that without": "test_per_token",
    "that of all ranks as released": "test_a_padding_mask",
    "results are bitwise identical": (
        "test_one_rank",
        "test_a_mean_over_a_micro_batch_is_megatron_s_bit_for_bit",
        "test_per_token_gradients_are_added_up",
        "test_without_context_parallelism",
        "test_a_loss_over_all_ranks_of_one_replica",
        "test_other_losses_than_that_over_all_ranks",
        "test_padding",
    ),
    "does not change a router if one of": "test_a_weight_of_ones_own_over_all_ranks_is_not_multiplied_again",
    "does not change a router if its functions": "test_padding",
    "is as before": "test_a_loss_over_all_ranks",  # what is logged
}
ALL = ("aux/token/2", "seq/token/2", "z/token/2", "aux/mean/2", "seq/mean/2", "z/mean/2")
DIVIDED = tuple(case for case in ALL if not case.startswith("seq"))
"""A sequence's own balance is another one where the attention is of each part by itself."""
CALLS = 2
"""Of a loss in a case: two micro-batches through one layer."""
ROUNDING = 2e-6
"""Of a gradient's norm: float32 sums of 32 tokens showed 3e-7."""
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def reference(run_ranks):
    """Gradients in float64, of the whole model on one rank."""
    cases = ("aux/2", "seq/2", "z/2", "aux/2/pad", "seq/2/pad", "z/2/pad", "global/2", "global/2/pad")
    (found,) = run_ranks(WORKER, *cases, levels=MEGATRON, ranks=1)
    return found


@pytest.fixture(scope="module")
def run(run_ranks):
    def run(patch, *cases, ranks=2, tp=1, cp=1, release=None):
        sizes = ("--tp", str(tp), "--cp", str(cp))
        reports = run_ranks(WORKER, "--patch", patch, *sizes, *cases, levels=megatron(release), ranks=ranks)
        for report in reports:
            assert report["reverted"] == {cases[0]: report["before"][cases[0]]}
        return reports

    return run


def factors(reference, found, case):
    """Of each parameter whose gradient is not 0: how much of it there is, and what else there is, in its norm.

    A loss over all data-parallel ranks sees micro-batches of them all.
    """
    loss, _, size, *mask = case.split("/")
    of = f"{loss}/{2 if loss == 'global' else size}" + ("/pad" if mask[:1] == ["pad"] else "")
    wanted = reference[of]
    assert set(found[case]) == {*wanted, "logged"}
    assert sum(map(any, wanted.values())) == 3, "a router and two norms; the last one is behind them"
    for name, right in wanted.items():
        got = found[case][name]
        if not any(right):
            assert not any(got), name
            continue
        square = math.fsum(one * one for one in right)
        part = math.fsum(one * other for one, other in zip(right, got, strict=True)) / square
        rest = math.fsum((other - part * one) ** 2 for one, other in zip(right, got, strict=True))
        yield part, math.sqrt(rest / square)


def assert_factor(reference, found, case, wanted):
    for part, rest in factors(reference, found, case):
        assert part == pytest.approx(wanted, rel=ROUNDING), case
        assert rest < ROUNDING, case


@pytest.mark.parametrize(
    ("sizes", "cases", "release"),
    [
        pytest.param({"tp": 2}, ALL, None, id="tensor parallel"),
        pytest.param({"cp": 2}, DIVIDED, None, marks=exhaustive, id="context parallel"),
        pytest.param({"tp": 2}, ALL, "megatron-0.15", marks=exhaustive, id="0.15"),
    ],
)
def test_per_token(run, reference, sizes, cases, release):
    """Half on two ranks; since 0.16 a quarter of the sequences' with two in a micro-batch. With it, all."""
    for report in run(PER_TOKEN, *cases, **sizes, release=release):
        assert report["status"] == "applied"
        assert 0 < report["reached"]["held"] < report["reached"]["calls"]
        for case in (case for case in cases if "token" in case):
            assert_factor(reference, report["before"], case, 0.25 if case.startswith("seq") and not release else 0.5)
            assert_factor(reference, report["after"], case, 1.0)


@pytest.mark.parametrize(("sizes", "cases"), [({"tp": 2}, ALL), pytest.param({"cp": 2}, DIVIDED, marks=exhaustive)])
def test_a_mean_over_a_micro_batch_is_megatron_s_bit_for_bit(run, reference, sizes, cases):
    for report in run(PER_TOKEN, *cases, **sizes):
        for case in (case for case in cases if "mean" in case):
            assert report["after"][case] == report["before"][case]
            assert_factor(reference, report["after"], case, 1.0)


def test_a_padding_mask(run, reference):
    """Its tokens are counted on all ranks as released: load balancing is right before. The others are not."""
    cases = ("aux/token/2/mask", "seq/token/2/mask", "z/token/2/mask")
    for report in run(PER_TOKEN, *cases, tp=2):
        assert report["after"]["aux/token/2/mask"] == report["before"]["aux/token/2/mask"]
        assert_factor(reference, report["before"], "seq/token/2/mask", 0.5)
        assert_factor(reference, report["before"], "z/token/2/mask", 0.5)
        for case in cases:
            assert_factor(reference, report["after"], case, 1.0)


def test_one_rank(run, reference):
    """Bit for bit the same, but for the sequences', with two in a micro-batch."""
    (report,) = run(PER_TOKEN, *ALL, "seq/token/1", ranks=1)
    for case in (*ALL, "seq/token/1"):
        if case != "seq/token/2":
            assert report["after"][case] == report["before"][case], case
    assert_factor(reference, report["before"], "seq/token/2", 0.5)
    for case in ALL:
        assert_factor(reference, report["after"], case, 1.0)


@exhaustive
def test_the_repaired_release_is_right_by_itself(run, reference):
    for report in run(PER_TOKEN, *ALL, tp=2, release="megatron-0.19"):
        assert report["status"] == "unaffected"
        for case in ALL:
            assert_factor(reference, report["before"], case, 1.0)


# ------------------------------------------------------------------------------------- a padding mask, from 0.19 on


# Repairs of a user's own: tokens counted on each rank, their number or the loss divided.
USERS = (
    "aux/token/2/mask/own",
    "seq/token/2/mask/own",
    *(
        f"{loss}/token/2/pad/{how}"
        for loss in ("aux", "seq")
        for how in ("place", "attach", "scaler", "loss", "scores", "scale", "routing", "forward", "hooks")
    ),
)
SOME = ("aux/token/2/mask/own", *(f"aux/token/2/pad/{how}" for how in ("place", "attach", "scaler", "loss", "hooks")))


@pytest.mark.parametrize("users", [SOME, pytest.param(USERS, marks=exhaustive)], ids=["some", "all"])
def test_padding(run, reference, users):
    """Twice on two ranks, of which one has twice the other's valid tokens. With it, once; and nothing else changes."""
    masked = ("aux/token/2/pad", "seq/token/2/pad", "global/token/2/pad", "aux/token/2/mask")
    others = ("aux/token/2", "z/token/2/pad", "aux/mean/2/pad", "seq/mean/2/pad", *users)
    for report in run(PADDING, *masked, *others, tp=2, release="megatron-0.19"):
        assert report["status"] == "applied"
        for case in masked:
            assert_factor(reference, report["before"], case, 2.0)
            assert_factor(reference, report["after"], case, 1.0)
        for case in others:
            assert report["after"][case] == report["before"][case]
            assert_factor(reference, report["after"], case, 1.0)
        reached = report["reached"]
        assert reached["held"] == CALLS * len(masked)
        assert reached["asked"] == reached["held"] + CALLS * 3 < reached["calls"], "no z-loss; not of a user's repair"
        assert reached["least"] == reached["most"] == 2.0


@exhaustive
def test_padding_and_context_parallelism(run, reference):
    for report in run(PADDING, "aux/token/2/pad", "aux/token/2", cp=2, release="megatron-0.19"):
        assert_factor(reference, report["before"], "aux/token/2/pad", 2.0)
        for case in ("aux/token/2/pad", "aux/token/2"):
            assert_factor(reference, report["after"], case, 1.0)


@exhaustive
def test_padding_and_a_loss_over_all_ranks(run, reference):
    """Another patch's: on two data-parallel ranks it is right with a mask, and half without."""
    cases = ("global/token/1/pad", "global/token/1", "global/mean/1")
    for report in run(PADDING, *cases, release="megatron-0.19"):
        assert report["after"] == report["before"]
        assert_factor(reference, report["after"], "global/token/1/pad", 1.0)
        for case in cases[1:]:
            assert_factor(reference, report["after"], case, 0.5)


def test_padding_on_one_rank(run, reference):
    cases = ("aux/token/2/pad", "seq/token/2/pad", "aux/token/2")
    (report,) = run(PADDING, *cases, ranks=1, release="megatron-0.19")
    assert report["after"] == report["before"]
    assert report["reached"]["held"] == 0 < report["reached"]["asked"] == report["reached"]["calls"]
    for case in cases:
        assert_factor(reference, report["after"], case, 1.0)


# ------------------------------------------------------------------------------------- a loss over all ranks


TIMES_REPLICAS = (
    *("weight", "replicas", "whole", "forward up", "scores up", "counts up", "scale up", "scaler up", "hooks up"),
)


@pytest.mark.parametrize(
    ("ranks", "tp", "release"),
    [
        (2, 1, None),
        pytest.param(4, 2, None, marks=exhaustive, id="tensor parallel"),
        pytest.param(2, 1, "megatron-0.19", marks=exhaustive, id="0.19"),
        pytest.param(2, 1, "megatron-0.15", marks=exhaustive, id="0.15"),
    ],
)
def test_a_loss_over_all_ranks(run, reference, ranks, tp, release):
    """Half on two data-parallel ranks, but per token with a mask. With the patch, all."""
    newer = release != "megatron-0.15"  # it knows no padding mask
    wrong = ("global/mean/1", *(("global/mean/1/pad",) if newer else ()))
    # Tensor-parallel ranks divide what is per token by two once more: megatron-core-moe-auxiliary-per-token.
    per_token = 1.0 if tp == 1 else 0.5
    for report in run(
        GLOBAL,
        *wrong,
        "global/token/1",
        "global/token/1/pad" * newer or "aux/mean/1",
        ranks=ranks,
        tp=tp,
        release=release,
    ):
        assert report["status"] == "applied"
        for case in wrong:
            assert_factor(reference, report["before"], case, 0.5)
            assert_factor(reference, report["after"], case, 1.0)
        assert_factor(reference, report["before"], "global/token/1", 0.5 * per_token)
        assert_factor(reference, report["after"], "global/token/1", per_token)
        for case in report["before"]:
            assert len(report["before"][case]["logged"]) == CALLS
            assert report["after"][case]["logged"] == report["before"][case]["logged"], case
        if newer:
            masked = report["after"]["global/token/1/pad"]
            assert masked == report["before"]["global/token/1/pad"]
            assert_factor(reference, report["after"], "global/token/1/pad", 1.0)
        reached = report["reached"]
        assert reached["held"] == CALLS * (len(wrong) + 1)
        assert reached["asked"] == reached["calls"] == reached["held"] + CALLS * newer
        assert reached["least"] == reached["most"] == 0.5


@pytest.mark.parametrize(("ranks", "tp"), [pytest.param(1, 1, marks=exhaustive), (2, 2)])
def test_a_loss_over_all_ranks_of_one_replica(run, reference, ranks, tp):
    for report in run(GLOBAL, "global/mean/2", "global/mean/2/pad", "global/token/2", ranks=ranks, tp=tp):
        assert report["after"] == report["before"]
        assert report["reached"]["held"] == 0 < report["reached"]["asked"] == report["reached"]["calls"]
        for case in ("global/mean/2", "global/mean/2/pad"):
            assert_factor(reference, report["after"], case, 1.0)


@pytest.mark.parametrize(
    "hows", [("weight", "whole", "scaler up", "hooks up"), pytest.param(TIMES_REPLICAS, marks=exhaustive)], ids=len
)
def test_a_weight_of_ones_own_over_all_ranks_is_not_multiplied_again(run, reference, hows):
    cases = tuple(f"global/mean/1/mask/{how}" for how in hows)
    for report in run(GLOBAL, *cases):
        assert report["reached"]["asked"] == 0 < report["reached"]["calls"]
        for case in cases:
            assert report["after"][case] == report["before"][case]
            assert_factor(reference, report["after"], case, 1.0)


@pytest.mark.parametrize(
    "cases",
    [
        ("aux/mean/1", "aux/mean/1/mask/alone"),
        pytest.param(("seq/mean/1", "z/mean/1", "aux/token/1"), marks=exhaustive),
    ],
    ids=len,
)
def test_other_losses_than_that_over_all_ranks(run, cases):
    """A router without that loss may have no group for it."""
    for report in run(GLOBAL, *cases):
        assert report["after"] == report["before"]


@pytest.mark.parametrize("kinds", ["aux_loss", ["aux_loss", "seq_aux_loss"], None])
def test_of_a_router_without_a_loss_over_all_ranks_nothing_is_said(kinds, caplog):
    """Whose own weight is of another loss, which other patches repair."""
    _released.stays.cache_clear()
    one = SimpleNamespace(size=lambda: 1)
    own = SimpleNamespace(get_aux_loss_coeff=lambda kind: 0.01, tp_dp_cp_group=one, tp_cp_group=one)
    own.routing_type = kinds
    assert not is_megatrons(own)
    assert caplog.messages == []
    own.routing_type = "global_aux_loss"
    assert not is_megatrons(own)
    assert "get_aux_loss_coeff is not Megatron's own: load balancing stays as released" in caplog.text


# ------------------------------------------------------------------------------------- a mean over each micro-batch


def test_context(run, reference):
    """0.15.3: half on two ranks. With the patch all of it."""
    for report in run(CONTEXT, *DIVIDED, cp=2, release="megatron-0.15"):
        assert (report["version"], report["status"]) == ("0.15.3", "applied")
        assert 0 < report["reached"]["held"] < report["reached"]["asked"]  # not per token
        assert report["reached"]["least"] == report["reached"]["most"] == 0.5
        for case in (case for case in DIVIDED if "mean" in case):
            assert_factor(reference, report["before"], case, 0.5)
            assert_factor(reference, report["after"], case, 1.0)


def test_per_token_gradients_are_added_up(run):
    for report in run(CONTEXT, *DIVIDED, cp=2, release="megatron-0.15"):
        for case in (case for case in DIVIDED if "token" in case):
            assert report["after"][case] == report["before"][case]


@exhaustive
def test_without_context_parallelism(run, reference):
    for report in run(CONTEXT, *ALL, tp=2, release="megatron-0.15"):
        assert report["after"] == report["before"]
        for case in (case for case in ALL if "mean" in case):
            assert_factor(reference, report["after"], case, 1.0)


@exhaustive
def test_the_next_release_is_right_by_itself(run, reference):
    """0.16.1."""
    for report in run(CONTEXT, *DIVIDED, cp=2):
        assert report["status"] == "unaffected"
        for case in (case for case in DIVIDED if "mean" in case):
            assert_factor(reference, report["before"], case, 1.0)


def test_a_pass_without_a_loss_is_not_said_to_meet_the_bug():
    """The reference's log-probabilities, and an evaluation: no auxiliary loss is computed."""
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 1, "num_moe_experts": 4}
    per_token = SimpleNamespace(**sizes, calculate_per_token_loss=True, moe_z_loss_coeff=1e-3)
    of_parts = {**sizes, "context_parallel_size": 2, "calculate_per_token_loss": False}
    context = SimpleNamespace(**of_parts, moe_z_loss_coeff=1e-3)
    for told in (tokens_of_a_rank, z_loss_of_a_rank):
        assert told(SimpleNamespace(config=per_token, training=True)) is True
        assert told(SimpleNamespace(config=per_token, training=False)) is None
        with torch.no_grad():
            assert told(SimpleNamespace(config=per_token, training=True)) is None
    assert parts_of_a_sequence(context) == 0.5
    with torch.no_grad():
        assert parts_of_a_sequence(context) is None


@pytest.mark.parametrize(
    ("kinds", "weights", "z_loss", "told"),
    [
        ("aux_loss", 0.01, None, 0.5),
        (["seq_aux_loss", "global_aux_loss"], [0.0, 0.01], None, 0.5),
        ("none", 0.0, 1e-3, 0.5),
        ("aux_loss", 0.0, None, None),
        (["aux_loss", "seq_aux_loss"], [0.0, 0.0], None, None),
        ("sinkhorn", 0.01, None, None),
        ("none", 0.01, 0.0, None),
    ],
)
def test_a_mixture_without_auxiliary_losses_is_not_said_to_meet_the_bug(kinds, weights, z_loss, told):
    """As with an expert bias alone: the coefficient's default is 0."""
    sizes = {"context_parallel_size": 2, "num_moe_experts": 4, "calculate_per_token_loss": False}
    losses = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": weights, "moe_z_loss_coeff": z_loss}
    assert parts_of_a_sequence(SimpleNamespace(**sizes, **losses)) == told


class Group(SimpleNamespace):
    """Of so many ranks."""

    def size(self):
        return self.ranks


def megatrons(name, found=0.01):
    """A function, as one that Megatron's router has."""
    written = {"__name__": "megatron.core.transformer.moe.router"}
    exec(f"def {name}(*_): return {found}", written)
    return written[name]


@pytest.fixture
def module(monkeypatch):
    """The router's, with what the conditions look at."""
    scaler = {"__module__": "megatron.core.transformer.moe.moe_utils"}
    scaler |= {name: megatrons(name) for name in ("forward", "backward", "set_loss_scale")}
    names = ("switch_load_balancing_loss_func", "get_tokens_per_expert_and_token_count")
    functions = {name: megatrons(name) for name in names}
    found = SimpleNamespace(MoEAuxLossAutoScaler=type("MoEAuxLossAutoScaler", (), scaler), **functions)
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.router", found)
    return found


def without(name, **attributes):
    """A router without one of its attributes."""
    return SimpleNamespace(**{key: value for key, value in attributes.items() if key != name})


def test_what_is_told_of_a_loss_over_all_ranks(module):
    def told(masked=False, missing=None, **change):
        router = {
            "tp_dp_cp_group": Group(ranks=4),
            "tp_cp_group": Group(ranks=2),
            "calculate_per_token_loss": False,
            "get_aux_loss_coeff": megatrons("get_aux_loss_coeff"),
            **change,
        }
        return weight_of_one_replica(without(missing, **router), masked)

    assert told() == told(True) == told(calculate_per_token_loss=True) == 0.5
    assert told(True, calculate_per_token_loss=True) is told(tp_cp_group=Group(ranks=4)) is False
    assert told(get_aux_loss_coeff=megatrons("get_aux_loss_coeff", 0)) is False, "the loss has no weight"
    assert told(get_aux_loss_coeff=lambda kind: 0.01) is told(routing=print) is None
    with torch.no_grad():
        assert told() is None
    for name in ("tp_dp_cp_group", "tp_cp_group", "get_aux_loss_coeff"):
        assert told(missing=name) is None
    assert weight_of_one_replica_without_masks(SimpleNamespace()) is None
    module.switch_load_balancing_loss_func = print
    assert told() is None


def test_what_is_told_of_a_loss_with_a_padding_mask(module, monkeypatch):
    def told(tokens, missing=None, **change):
        router = {"tp_cp_group": Group(ranks=2), "calculate_per_token_loss": True, **change}
        return tokens_of_all_ranks(without(missing, **router), tokens)

    counted = torch.tensor(4.0)
    assert told(counted) == 2.0
    assert told(4) is told(None) is told(counted, calculate_per_token_loss=False) is False
    assert told(counted, tp_cp_group=Group(ranks=1)) is False
    assert told(4.0) is told(counted, routing=print) is None
    with torch.no_grad():
        assert told(counted) is None
    for name in ("tp_cp_group", "calculate_per_token_loss"):
        assert told(counted, missing=name) is None
    module.get_tokens_per_expert_and_token_count = print
    assert told(counted) is None
    monkeypatch.delitem(sys.modules, "megatron.core.transformer.moe.router")
    assert told(counted) is None
