"""transformers-moe-aux-loss: one step of small mixtures of experts by the real Trainer, on two gloo ranks.

The yardstick: cross-entropy over all ranks' tokens plus the coefficient times the mean auxiliary loss, in float64.
"""

from __future__ import annotations

from types import SimpleNamespace as Has
from unittest import mock

import pytest

from tests.harness.by_case import ByCase, exhaustive_but
from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.moe_aux_loss_ranks"
WRAPPED = "tests.patches.transformers.moe_aux_loss_wrapped_ranks"
WRONG = ("Qwen3-MoE", "JetMoE", "LoRA", "chunked", "evaluation")
ALONE = ("dense", "not averaged", "own loss", "label smoothing", "own forward")
RULE_COVERAGE = {
    "minimal scope": "test_a_dense_model_is_left_alone",
    "no side effects": "test_the_model_keeps_its_wrappers",
    "backward compatible": (
        "test_a_dense_model_is_left_alone",
        "test_a_mixture_is_repaired_within_wrappers",
        "test_where_nothing_is_multiplied_or_known_nothing_changes",
    ),
    "no new blocking": "because it computes on one rank's tensors, after upstream's forward; no lock, no collective",
    "known": "test_where_nothing_is_multiplied_or_known_nothing_changes",
    "nothing changes": "test_where_nothing_is_multiplied_or_known_nothing_changes",
}
#: float32 against float64.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reports(run_ranks):
    reports = run_ranks(WORKER, levels=beside(None, "trainer"))
    for report in reports:
        assert report["status"] == "applied"
    return reports


@pytest.mark.parametrize("case", [*WRONG, "bfloat16"])
def test_without_it_the_loss_has_the_auxiliary_part_twice(reports, case):
    for report in reports:
        assert report["before"][case]["loss"] > 1.1 * report["before"][case]["wanted"]


def test_after_revert_it_is_as_released(reports):
    for report in reports:
        assert report["reverted"][WRONG[0]] == report["before"][WRONG[0]]


@pytest.mark.parametrize("case", WRONG)
def test_with_it_the_loss_is_the_defined_one(reports, case):
    for report in reports:
        found = report["after"][case]
        assert found["loss"] == pytest.approx(found["wanted"], rel=TOLERANCE)
        assert found["outputs' loss"] == found["loss"]


@pytest.mark.parametrize("case", ["Qwen3-MoE", "JetMoE", "LoRA", "chunked"])
def test_with_it_gradients_are_those_of_the_definition(reports, case):
    """Of every parameter; the routers' were wrong by half and more."""
    for report in reports:
        assert len(report["after"][case]["off by"]) == len(report["after"][case]["bits"])
        before, after = (report[state][case]["off by"] for state in ("before", "after"))
        assert max(after.values()) < TOLERANCE
        if case != "LoRA":
            assert report["after"][case]["routers"] >= 1
            assert min(error for name, error in before.items() if "gate.weight" in name or "router" in name) > 0.4


def test_under_bfloat16_it_is_right_within_that(reports):
    """8 bits in the matrix products."""
    for report in reports:
        assert report["after"]["bfloat16"]["loss"] == pytest.approx(report["after"]["bfloat16"]["wanted"], rel=1e-2)


def test_what_evaluation_logs_is_the_mean_over_ranks(reports):
    mean = sum(report["after"]["evaluation"]["wanted"] for report in reports) / len(reports)
    for report in reports:
        assert report["after"]["evaluation"]["logged"] == pytest.approx(mean, rel=TOLERANCE)


@pytest.mark.parametrize("case", ALONE)
def test_where_nothing_is_multiplied_or_known_nothing_changes(reports, case):
    for report in reports:
        assert report["after"][case] == report["before"][case]
        assert report["after"][case]["loss"] > 0


SHARDED = ("dense, sharded and compiled", "mixture, sharded and compiled")
IN_WRAPPERS = (*SHARDED, "mixture, compiled", "Musicgen")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((None, IN_WRAPPERS), id="5.23"),
        pytest.param(("transformers-4.57", SHARDED), id="4.57", marks=pytest.mark.exhaustive),
    ],
)
def wrapped(request, run_ranks):
    """Of both ranks, by case: FSDP1 and ``torch_compile`` in the real Trainer."""
    release, cases = request.param

    def run(case):
        if case not in cases:
            pytest.skip(f"not beside {release}")
        reports = run_ranks(WRAPPED, case, levels=beside(release, "trainer"))
        for report in reports:
            assert report["version"].startswith(release.rpartition("-")[2] if release else "5.")
            assert report["status"] == "applied"
        return [(report["before"][case], report["after"][case]) for report in reports]

    return ByCase(run)


@pytest.mark.parametrize("case", exhaustive_but(IN_WRAPPERS, "mixture, sharded and compiled"))
def test_the_model_keeps_its_wrappers(wrapped, case):
    """Asking for the coefficient once took the FSDP root out of the compiled model: a checkpoint was flat shards."""
    for before, after in wrapped[case]:
        assert after["modules"] == before["modules"]
        assert after["the same objects"]
        assert after["touched"] == ""
        assert shapes(after) == shapes(before)
        if case in SHARDED:
            assert after["modules"][1] == ["_orig_mod", "FullyShardedDataParallel"]
            assert shapes(after)["lm_head.weight"] == [32, 16]


@pytest.mark.parametrize("case", exhaustive_but(("Musicgen", SHARDED[0]), "Musicgen"))
def test_a_dense_model_is_left_alone(wrapped, case):
    for before, after in wrapped[case]:
        assert after == before


@pytest.mark.parametrize("case", exhaustive_but((SHARDED[1], "mixture, compiled"), SHARDED[1]))
def test_a_mixture_is_repaired_within_wrappers(wrapped, case):
    """The loss, and the checkpoint after a step with a rate of 1."""
    for before, after in wrapped[case]:
        assert before["loss"] > 1.1 * after["wanted"]
        assert after["loss"] == pytest.approx(after["wanted"], rel=TOLERANCE)
        norms = {name: norm for name, (_, norm) in after["checkpoint"].items()}
        assert norms == pytest.approx(after["wanted checkpoint"], rel=TOLERANCE)


def shapes(found):
    return {name: shape for name, (shape, _) in found["checkpoint"].items()}


def test_a_run_meets_the_bug_where_the_loss_is_repaired_and_not_elsewhere(reports):
    """Asked in every step; of a forward or a loss of the user's own, which are left as released, nothing is told."""
    for report in reports:
        reached = report["reached"]
        assert 0 < reached["held"] < reached["calls"]
        assert reached["asked"] < reached["calls"]


def test_a_forward_of_ones_own_is_not_said_to_be_repaired():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    router_loss = pytest.importorskip("rlhf_patches.patches.transformers._router_loss")

    class Own(transformers.MixtralForCausalLM):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options)

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    trainer = Has(compute_loss_func=None, args=Has(n_gpu=0), accelerator=Has())
    for kind, told in ((Own, []), (transformers.MixtralForCausalLM, [mock.call("transformers-moe-aux-loss", 2.0)])):
        outputs, model = {"aux_loss": torch.tensor(1.0)}, kind(transformers.MixtralConfig(**sizes))
        with mock.patch("rlhf_patches.decided") as decided:
            router_loss.multiplied(trainer, model, outputs, torch.tensor(3.0), 2, None, torch.tensor(5))
        assert decided.mock_calls == told
