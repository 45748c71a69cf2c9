"""Rehearsals of megatron-core's schedules and optimizers: right configurations, faults, and known bugs."""

from __future__ import annotations

import functools

import pytest

from tests.harness.forkserver import Level, megatron, megatron_with_transformer_engine
from tests.patches.megatron_core import rehearsal_cases
from tests.patches.megatron_core.rehearsal_cases import FAULTS, FOUR, ONE, REFUSED, TWO

WORKER = rehearsal_cases.__name__.replace("_cases", "_ranks")
COPIES, WEIGHTS, RANKS = "copies of a micro-batch", "micro-batch weights", "gradient across ranks"
REPLICAS, NORM, ROUTER = "copies of parameters", "gradient norm", "router's loss"
MEAN = "mean over ranks"
exhaustive = pytest.mark.exhaustive
NOTES = {"DP, warm-up": "optimizer step", "DP, aux, masked": ROUTER}
"""Right configurations in which a relation has a note."""
NAMES = "decoder.final_layernorm.bias, decoder.final_layernorm.weight, decoder.layers.0.input_layernorm.bias"
LEAVES = "FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer"
SOME = ("DP, distributed", "TP, SP", "PP, tied")


@pytest.fixture(scope="module")
def run(run_ranks):
    @functools.cache
    def run(*arguments, ranks=2, release=None):
        levels = megatron(release)
        return run_ranks(WORKER, *arguments, levels=levels, ranks=ranks, TORCHDYNAMO_DISABLE="1")

    return run


def verdicts(reports, name, state="without"):
    """What deviates, and what has a note; equal on all ranks."""
    assert all(report[state][name] == reports[0][state][name] for report in reports)
    found = reports[0][state][name]
    return {each: tuple(rest) for each, (verdict, *rest) in found["relations"].items() if verdict == "deviates"}, {
        each for each, (verdict, *_) in found["relations"].items() if verdict == "note"
    }


@pytest.mark.parametrize(
    ("cases", "ranks", "release"),
    [
        (SOME, 2, None),
        *(
            pytest.param(tuple(cases), ranks, release, marks=exhaustive, id=f"{ranks} ranks, {release}")
            for cases, ranks in ((ONE, 1), (TWO, 2), (FOUR, 4))
            for release in (None, "megatron-0.19")
        ),
    ],
)
def test_right_configurations_of_megatron_hold(run, cases, ranks, release):
    """53 configurations, each on two releases."""
    reports = run(*cases, ranks=ranks, release=release)
    for name in cases:
        deviates, notes = verdicts(reports, name)
        assert not deviates, (name, deviates)
        assert notes == ({NOTES[name]} if name in NOTES else set()), name
        found = reports[0]["without"][name]
        assert found["status"] == 0, (name, found)
        checked = {COPIES, WEIGHTS, NORM} - ({WEIGHTS} if "one micro-batch" in name else set())
        assert {found["relations"][each][0] for each in checked} == {"holds"}, name
        noise = float(found["relations"][COPIES][2].rpartition(" ")[2].removesuffix(")"))
        assert noise < (0.02 if "bf16" in name else 1e-6), name


def test_the_number_of_right_configurations():
    assert (len(ONE), len(TWO), len(FOUR)) == (10, 33, 10)


@pytest.mark.parametrize("cases", [("clears", "own norm"), pytest.param(tuple(FAULTS), marks=exhaustive)], ids=len)
def test_faults(run, cases):
    reports = run(*cases)
    wanted = {
        "clears": {
            COPIES: ("0.250", "0.250 x the micro-batch's own gradient"),
            WEIGHTS: (
                "[0.000 0.000 0.000 0.250]",
                "unexpected weights; their sum is 0.250, and 3 of 4 micro-batches have weight 0",
            ),
        },
        "unreduced": {
            MEAN: ("", "0.67 of the gradient is not the mean over 2 ranks (noise 3e-07)"),
            RANKS: ("0.57", f"data-parallel ranks hold different gradients: {NAMES} and 25 more"),
        },
        "summed": {MEAN: ("2.000", "2.000 x the mean over 2 ranks")},
        "lacks": {
            NORM: ("0.984 x", "5.278, and the norm of the gradient is 5.364"),
            "optimizer parameters": (
                "27 of 28",
                "the optimizer lacks 1 that require a gradient: output_layer.weight",
            ),
            "optimizer step": ("27 of 28 moved", "have a gradient and did not move: output_layer.weight"),
        },
        "own norm": {NORM: ("0.746 x", "4, and the norm of the gradient is 5.364")},
        "draws": {},
        "own data": {},
    }
    for name in cases:
        assert verdicts(reports, name)[0] == wanted[name], name
    for name, why in {
        "draws": "the window's gradient does not repeat itself from the same data and random state (0.45)",
        "own data": "the forward step does not read from the data iterator that the schedule gets",
    }.items():
        if name in cases:
            assert reports[0]["without"][name]["relations"] == {COPIES: ["not checked", "", why]}
            assert reports[0]["without"][name]["status"] == 2


def test_what_is_not_known_is_refused(run):
    reports = run(*REFUSED, ranks=1)
    for name, why in {
        "another release": "megatron-core 0.20 is not one of 0.15 to 0.19",
        "8 bits": "the model keeps states of 8-bit formats between its forward passes",
        "another wrapper": "Mine is not megatron-core's DistributedDataParallel",
        "twice": "the schedule ran twice before a step of megatron-core's optimizer",
        "another optimizer": f"Mine is not one of {LEAVES}",
    }.items():
        assert reports[0]["without"][name]["relations"] == {COPIES: ["not checked", "", why]}, name
        assert reports[0]["without"][name]["status"] == 2


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        (("EP, seq_aux, distributed",), 2),
        *(pytest.param(tuple(TWO)[part::3], 2, marks=exhaustive, id=f"two ranks, {part}") for part in range(3)),
        pytest.param(tuple(FOUR), 4, marks=exhaustive, id="four ranks"),
    ],
)
def test_megatron_goes_on_as_if_it_had_not_been_rehearsed(run, cases, ranks):
    """Norms and weights of three steps, and the next random number, bit for bit."""
    for rank, report in enumerate(run("--go-on", *cases, ranks=ranks)):
        for name in cases:
            assert report[name]["same"], name
            assert report[name]["ended"] == "status 0", "without --go-on, at the first step"
            results = report[name]["results"]
            assert (results is None) == bool(rank)
            assert rank or results["status"] == 0, name


GLOBAL, PER_TOKEN = "megatron-core-moe-auxiliary-global", "megatron-core-moe-auxiliary-per-token"
LOGGED = "x the loss that Megatron logs"
HALF = {ROUTER: ("0.500", f"0.500 {LOGGED}")}
KNOWN = [
    pytest.param(GLOBAL, None, {"global": HALF}, id="global"),
    pytest.param(
        PER_TOKEN,
        None,
        {
            "per token": HALF,
            "per token, seq": {ROUTER: ("0.250", f"0.250 {LOGGED}")},
            "per token, z": HALF,
        },
        marks=exhaustive,
        id="per token",
    ),
    pytest.param(
        "megatron-core-gdn-norm-gradient",
        None,
        {
            "gdn": {
                REPLICAS: (
                    "2 on several ranks",
                    "1 have different gradients on ranks that hold copies: layers.0.out_norm.weight",
                )
            }
        },
        marks=exhaustive,
        id="gdn",
    ),
    pytest.param(
        "megatron-core-moe-auxiliary-context",
        "megatron-0.15",
        {"context": HALF, "context, z": HALF},
        marks=exhaustive,
        id="context",
    ),
    pytest.param(
        "megatron-core-moe-auxiliary-padding",
        "megatron-0.19",
        {"padding": {ROUTER: ("2.000", f"2.000 {LOGGED}")}},
        marks=exhaustive,
        id="padding",
    ),
]


@pytest.mark.parametrize(("patch", "release", "cases"), KNOWN)
def test_a_known_bug_of_megatron_deviates_without_its_patch(run, patch, release, cases):
    reports = run("--patch", patch, *cases, release=release)
    assert all(report["status"] == "applied" for report in reports)
    for name, wanted in cases.items():
        assert verdicts(reports, name)[0] == wanted
        assert verdicts(reports, name, "with") == ({}, set())


FIRST = "counted on the first tensor-parallel rank only"
SINKS = f"4.854, and the norm of the gradient is 5.081; {FIRST}: layers.sinks.softmax_offset, "
EXPERTS = "layers.first.weight0, layers.first.weight1"
BIASES = "layers.first.bias0, layers.first.bias1, layers.first.weight0"
ADAPTED = "layers.adapted.base_layer.weight, layers.adapted.lora_A.default.weight, layers.whole.weight"
TWICE = f"counted on each tensor-parallel rank, which hold copies: {ADAPTED}"
NORMS = {
    "megatron-core-attention-sink-norm": dict.fromkeys(
        ("sinks", "sinks, distributed"), ("0.955 x", f"{SINKS}layers.sinks_te.softmax_offset")
    ),
    "megatron-core-grouped-experts-norm": {
        "experts": (
            "0.730 x",
            f"12.09, and the norm of the gradient is 16.55; {FIRST}: {EXPERTS}, layers.first.weight2 and 5 more",
        ),
        **dict.fromkeys(
            ("experts, EP", "experts, EP, distributed"),
            ("0.717 x", f"12.61, and the norm of the gradient is 17.59; {FIRST}: {BIASES} and 5 more"),
        ),
    },
    "megatron-core-duplicated-norm": dict.fromkeys(
        ("duplicated", "duplicated, distributed"),
        ("1.326 x", f"13.67, and the norm of the gradient is 10.31; {TWICE}"),
    ),
}


@exhaustive
@pytest.mark.parametrize("patch", NORMS)
def test_a_norm_that_is_not_the_gradients(run_ranks, patch):
    """TransformerEngine's real layers, which cannot be called here: any gradient shows what the norm counts."""
    levels = megatron_with_transformer_engine("2.13")
    if "duplicated" in patch:
        levels = (*levels, Level("tests.harness.loading:mcore_bridge_adapters"))
    reports = run_ranks(WORKER, "--patch", patch, *NORMS[patch], levels=levels, ranks=2)
    assert all(report["status"] == "applied" for report in reports)
    for name, wanted in NORMS[patch].items():
        assert verdicts(reports, name)[0] == {NORM: wanted}
        assert verdicts(reports, name, "with") == ({}, set())
