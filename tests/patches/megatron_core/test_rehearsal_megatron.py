"""Rehearsals of megatron-core's schedules and optimizers: right configurations, faults, and known bugs."""

from __future__ import annotations

import functools

import pytest

from rlhf_patches import settings
from rlhf_patches.cli.rehearse import with_sizes
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
SOME = ("DP, distributed", "DP, aux, z", "TP, SP", "PP, tied")


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
    """54 configurations, each on two releases."""
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
    assert (len(ONE), len(TWO), len(FOUR)) == (10, 34, 10)


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


LAYOUT = "gradient in another layout"
IN_TWO_LAYOUTS = [
    (("TP, SP, aux", "unmarked", "divided"), 2, "TP=1"),
    (
        (
            "TP",
            "TP, SP, distributed",
            "TP, bf16",
            "TP, tied",
            "TP, SP, z",
            "TP, gated",
            "TP, groups",
            "summed over ranks",
        ),
        2,
        "TP=1",
    ),
    (("PP", "PP, tied", "PP, tokens", "PP, one micro-batch"), 2, "PP=1"),
    (("EP", "EP, seq_aux, distributed", "EP, expert bias"), 2, "EP=1"),
    (("TP, DP", "TP, PP, tied", "TP, CP", "TP, DP, aux, distributed", "TP, EP, aux"), 4, "TP=1"),
    (("TP, EP, aux",), 4, "TP=1,EP=1"),
    (("TP, PP",), 4, "TP=1,PP=1"),
    (("PP, EP", "EP 4, z"), 4, "EP=1"),
    (("EP 4, z",), 4, "EP=2"),
]


@pytest.mark.parametrize(
    ("cases", "ranks", "layout", "release"),
    [
        (("unmarked",), 2, "TP=1", None),
        *(
            pytest.param(*each, release, marks=exhaustive, id=f"{len(each[0])} against {each[2]}, {release}")
            for each in IN_TWO_LAYOUTS
            for release in (None, "megatron-0.19")
        ),
    ],
)
def test_a_window_in_another_layout(run, cases, ranks, layout, release):
    """The other layout begins with other weights and other data, and has the first one's."""
    reports = run("--against", layout, *cases, ranks=ranks, release=release)
    norm = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    for name in cases:
        deviates, _ = verdicts(reports, name)
        verdict, measured, text = reports[0]["without"][name]["relations"][LAYOUT]
        if name == "unmarked":
            assert deviates.keys() == {REPLICAS, LAYOUT}
            assert text == f"1 of 28 parameters have another gradient with TP 1: {norm}"
        elif name == "divided":
            assert deviates.keys() == {LAYOUT}, "no relation within one layout shows it"
            assert measured == "1"
            assert text.startswith("28 of 28 parameters have another gradient with TP 1: ")
            assert text.endswith("; here 0.500 x that gradient")
        else:
            assert verdict == "holds", (name, text)
            assert text.startswith(f"equal with {layout.replace('=', ' ').replace(',', ', ')} (")
            deviation, noise = (float(each.split(" ")[-1].strip("()")) for each in text.split(", ")[-2:])
            assert deviation < (0.02 if "bf16" in name else 1e-6), name
            assert noise < (0.04 if "bf16" in name else 2e-6), name


def test_the_words_of_a_layout():
    assert settings.layout("TP=1") == settings.layout("tp=1") == {"TP": 1}
    assert settings.layout("TP=1, ETP=2") == settings.layout("tp=1+etp=2") == {"TP": 1, "ETP": 2}
    assert settings.rehearse({"RLHF_PATCHES_REHEARSE": "without,against=TP=1+EP=2"}) == {"without", "against=tp=1+ep=2"}
    for wrong in ("", "TP", "TP=0", "CP=1", "TP=1,TP=2", "TP=1,,EP=1", "TP=-1"):
        with pytest.raises(settings.SettingsError, match="expected sizes of TP, PP, EP or ETP, such as TP=1,EP=1"):
            settings.layout(wrong)


def test_options_of_the_command_change_with_the_layout():
    command = ["torchrun", "--nproc-per-node", "2", "pretrain.py", "--tensor-model-parallel-size", "2", "--lr", "2"]
    assert with_sizes(command, {"TP": 1, "EP": 1}) == [*command[:5], "1", "--lr", "2"]
    assert with_sizes(["a", "--expert_model_parallel_size=4", "4"], {"EP": 2}) == [
        *("a", "--expert_model_parallel_size=2", "4")
    ]


@exhaustive
@pytest.mark.parametrize("case", ["validated", "get_next"])
@pytest.mark.parametrize("release", [None, "megatron-0.19"])
def test_what_frameworks_put_around_a_step(run, case, release):
    """Megatron-LM validates losses of its own window only (``--rerun-mode``); slime's data iterator is none."""
    reports = run("--against", "TP=1", case, release=release)
    assert verdicts(reports, case) == ({}, set())
    assert reports[0]["without"][case]["status"] == 0
    assert {reports[0]["without"][case]["relations"][each][0] for each in (COPIES, WEIGHTS, LAYOUT)} == {"holds"}


@exhaustive
def test_a_loss_that_is_a_sum_over_data_parallel_ranks_has_a_note(run):
    """The micro-batches of the first layout cannot be divided."""
    (verdict, measured, text) = run("--against", "TP=1", "summed over ranks, 3")[0]["without"]["summed over ranks, 3"][
        "relations"
    ][LAYOUT]
    assert (verdict, measured) == ("note", "1")
    assert text.endswith("; here 0.500 x that gradient, as of a loss that is a sum over data-parallel ranks")


@exhaustive
@pytest.mark.parametrize(
    ("patch", "cases", "also"),
    [
        (PER_TOKEN, ("per token", "per token, seq", "per token, z"), {ROUTER}),
        pytest.param(GLOBAL, ("TP, global",), set(), id="with TP 1, of which DP 2 has the bug"),
    ],
)
def test_a_known_bug_deviates_in_another_layout(run, patch, cases, also):
    reports = run("--against", "TP=1", "--patch", patch, *cases)
    for name in cases:
        deviates, _ = verdicts(reports, name)
        assert deviates.keys() == {LAYOUT, *also}
        assert deviates[LAYOUT][1].startswith("23 of 34 parameters have another gradient with TP 1: ")
        assert verdicts(reports, name, "with") == ({}, set())
        assert reports[0]["with"][name]["relations"][LAYOUT][0] == "holds"


@exhaustive
@pytest.mark.parametrize(
    ("case", "layout", "why"),
    [
        ("TP, dropout", "TP=1", "the forward step draws random numbers (dropout), and they depend on the layout"),
        ("wider", "TP=1", "output_layer.weight has other sizes in the two layouts: 96x32 and 64x32"),
        ("PP, chunks", "PP=1", "interleaved pipeline stages"),
        ("DP", "TP=1", "this run has TP 1; expected a smaller size that divides it"),
        ("TP", "TP=4", "this run has TP 2; expected a smaller size that divides it"),
    ],
)
def test_layouts_that_are_not_compared(run, case, layout, why):
    reports = run("--against", layout, case)
    assert reports[0]["without"][case]["relations"][LAYOUT] == ["not checked", "", why]


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
