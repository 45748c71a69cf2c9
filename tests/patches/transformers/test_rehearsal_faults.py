"""Relations of the step, of rows and neighbors and of the checkpoint, on real trainers with a fault and without."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
import transformers

from rlhf_patches import settings
from rlhf_patches.rehearsal import applied, checkpoint, neighbors, sharding, swap
from rlhf_patches.rehearsal.ranks import Mine
from tests.harness.forkserver import TRL
from tests.patches.transformers import rehearsal_faults_ranks as runs

WORKER = runs.__name__


def rows_of(run_ranks, *cases, ranks=1):
    return run_ranks(WORKER, *cases, levels=TRL, ranks=ranks)


STEPS = {
    "clipped": ("holds", "norm 0.965, max_grad_norm 0.1"),
    "clipped by hand": ("note", "expected 1.000 x (no clipping); Before.on_pre_optimizer_step may do that on purpose"),
    "cleared": ("deviates", "the whole gradient was cleared before the step"),
    "head cleared": ("note", "1 have no gradient at the step: lm_head.weight; Before.on_pre_optimizer_step"),
    **dict.fromkeys(("scaled", "scaled, not fused"), ("holds", "max_grad_norm 0.1")),
    **dict.fromkeys(("infinite", "infinite, not fused"), ("not checked", "the float16 scaler skipped the step")),
    "skipped": ("not checked", "the window was not checked"),
}


def test_the_gradient_at_the_step(run_ranks):
    (found,) = rows_of(run_ranks, *STEPS)
    for case, (verdict, text) in STEPS.items():
        row = found[case][applied.NAME]
        assert row["verdict"] == verdict, case
        assert text in row["text"], case
    assert found["clipped"][applied.NAME]["measured"] == "0.104 x"
    for case in ("scaled", "scaled, not fused"):
        assert found[case]["micro-batch weights"]["verdict"] == "holds"
    row = found["skipped"]["micro-batch weights"]
    assert (row["verdict"], row["text"]) == ("not checked", "the window's gradient is not finite (float16 scaler)")


def test_a_rank_that_clips_alone(run_ranks):
    for found in rows_of(run_ranks, "on one rank", ranks=2):
        row = found["on one rank"][applied.NAME]
        assert row["verdict"] == "deviates"
        assert row["text"].startswith("rank 1 steps with another gradient than rank 0, and both had the same")
        assert found["on one rank"]["gradient across ranks"]["verdict"] == "holds"


PLACES = {
    "transformers/llama": ("holds", ""),
    "transformers/t5": ("holds", ""),
    "transformers/bert-classes": ("holds", ""),
    "trl/dpo": ("not checked", "DPOTrainer's loss is not known to be a mean over rows"),
    "trl/grpo": ("not checked", "GRPOTrainer's loss is not known to be a mean over rows"),
    "first row": ("deviates", "the gradient depends on the rows' places"),
    "own first row": ("note", "the loss leaves out rows, or it compares rows"),
    "own rows": ("holds", ""),
}


def test_rows_in_other_places_and_beside_others(run_ranks):
    (found,) = rows_of(run_ranks, *PLACES, "mixes", "gpt-oss")
    for case, (verdict, text) in PLACES.items():
        row = found[case][swap.NAME]
        assert row["verdict"] == verdict, case
        assert text in row["text"], case
        if case != "first row":
            row = found[case][neighbors.ROWS]
            assert (row["verdict"], row["measured"]) == ("holds", "0e+00"), case
    row = found["first row"][neighbors.ROWS]
    assert (row["verdict"], row["text"]) == ("not checked", "the micro-batch has one row")
    row = found["mixes"][neighbors.ROWS]
    assert (row["verdict"], row["text"]) == (
        "deviates",
        "relative error of the log-probabilities: another row's tokens change a row",
    )
    row = found["gpt-oss"][neighbors.DOCUMENTS]
    assert (row["verdict"], row["text"]) == (
        "deviates",
        "relative error of the log-probabilities: another document's tokens change a document",
    )


SAVES = {
    **{f"saves {name}": ("holds", "") for name in runs.RIGHT},
    "saves LoRA": ("holds", ""),
    "saves half": ("note", "the saved weights are coarser than the trained ones: model.embed_tokens.weight"),
    "saves zeros": ("note", "1 of the trained parameters are not as trained when it is loaded: lm_head.weight"),
    "saves no key": ("deviates", "1 of the trained parameters are not as trained when it is loaded: lm_head.weight"),
    "saves no head": ("deviates", "when it is loaded: base_model.model.lm_head.weight"),
    "saves nothing, skipped": ("not checked", "the optimizer's step was not reached"),
}


def test_what_was_trained_is_saved(run_ranks):
    (found,) = rows_of(run_ranks, *SAVES)
    for case, (verdict, text) in SAVES.items():
        row = found[case][checkpoint.NAME]
        assert row["verdict"] == verdict, case
        assert text in row["text"], case
        if verdict != "not checked":
            assert found[case][applied.NAME]["verdict"] == "holds", case
    assert found["saves zeros"][checkpoint.NAME]["text"].endswith("SavesZeros._save may do that on purpose")


def test_experts_that_a_resumed_run_does_not_load(run_ranks):
    case = "saves transformers/mixtral"
    (released,), (repaired,) = (rows_of(run_ranks, case, "--patches", patches) for patches in ("off", "on"))
    row = released[case][checkpoint.NAME]
    assert row["verdict"] == "deviates"
    assert "3 of the trained parameters are not as trained when it is loaded" in row["text"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in row["text"]
    assert repaired[case][checkpoint.NAME]["verdict"] == "holds"
    acted = repaired[case]["acted"]
    assert "transformers-resume-weights" in acted["repaired"] + acted["ran"]


@pytest.mark.parametrize(
    ("case", "verdict", "text"),
    [
        ("saves on ranks", "holds", ""),
        pytest.param("saves shards", "not checked", "are sharded (FullyShard)", marks=pytest.mark.exhaustive),
    ],
)
def test_checkpoints_of_ranks(run_ranks, case, verdict, text):
    for found in rows_of(run_ranks, case, ranks=2):
        row = found[case][checkpoint.NAME]
        assert row["verdict"] == verdict
        assert text in row["text"]


# -- the limit of time

HANGS = """
import sys, threading
from rlhf_patches.rehearsal import time_limit
time_limit.Limit(0.2, lambda relation: print("in", relation), first=True)
time_limit.at("swapped rows")
threading.Event().wait({wait})
print("went on")
"""


@pytest.mark.parametrize(("wait", "status", "says"), [(60, 2, "in swapped rows"), (0, 0, "went on")])
def test_a_relation_that_takes_too_long(wait, status, says):
    done = subprocess.run([sys.executable, "-c", HANGS.format(wait=wait)], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout.strip()) == (status, says)


@pytest.mark.parametrize(
    ("word", "seconds"), [("time-limit=90", 90.0), ("1,time-limit=0.5,save", 0.5), ("go-on", None), ("", None)]
)
def test_the_limit_s_word(word, seconds):
    assert settings.time_limit({"RLHF_PATCHES_REHEARSE": word}) == seconds


@pytest.mark.parametrize("word", ["time-limit=", "time-limit=0", "time-limit=inf", "time-limit=-1", "time-limit=x"])
def test_a_limit_that_is_none(word):
    with pytest.raises(settings.SettingsError, match="expected a number of seconds above 0"):
        settings.rehearse({"RLHF_PATCHES_REHEARSE": word})


# -- where gradients cannot be read

SEVERAL = "several GPUs in one process (torch.nn.DataParallel)"


@pytest.mark.parametrize(
    ("kind", "devices", "why"),
    [("NO", 0, ""), ("MULTI_GPU", 2, SEVERAL), ("FSDP", 1, "are sharded (FSDP)"), ("TP", 1, "are sharded (TP)")],
)
def test_where_gradients_cannot_be_read(kind, devices, why):
    accelerator = types.SimpleNamespace(distributed_type=types.SimpleNamespace(value=kind))
    trainer = types.SimpleNamespace(accelerator=accelerator, args=types.SimpleNamespace(n_gpu=devices))
    _, found = sharding.of(trainer, torch.nn.Linear(2, 2))
    assert (why in found) if why else not found


# -- the inputs


def test_every_second_row_or_document_has_other_tokens():
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    made = neighbors.changed({"input_ids": ids, "attention_mask": mask, "labels": ids}, MODEL)
    assert made.name == neighbors.ROWS
    assert made.other["input_ids"].tolist() == [[4, 3, 2, 0], [4, 5, 6, 7], [1, 9, 0, 0]]
    assert made.mine.tolist() == [[False] * 4, [True] * 4, [False] * 4]
    assert "labels" not in made.inputs
    assert made.inputs["use_cache"] is made.other["use_cache"] is False
    one = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]]), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    made = neighbors.changed(one, MODEL)
    assert made.name == neighbors.DOCUMENTS
    assert made.other["input_ids"].tolist() == [[3, 2, 3, 4, 5]]
    assert made.mine.tolist() == [[False, False, True, True, True]]
    rollouts = {f"{part}_{kind}": torch.ones(2, 2, dtype=int) for part in ("prompt", "completion") for kind in KINDS}
    rollouts["prompt_ids"][0, 0] = 7
    made = neighbors.changed(rollouts, MODEL)
    assert made.other["input_ids"].tolist() == [[7, 7, 7, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([1], "a list, not a mapping"),
        ({"labels": torch.zeros(2)}, "no input_ids"),
        ({"input_ids": torch.tensor([[1, 2]])}, "one row"),
        ({"input_ids": torch.tensor([[1, 1], [1, 1]])}, "all tokens are equal"),
        ({"input_ids": torch.tensor([[1, 2], [2, 3]]), "inputs_embeds": 1}, "inputs_embeds is not known"),
        ({"input_ids": torch.tensor([[1, 2], [2, 3]]), "position_ids": torch.zeros(1, 2)}, "number of rows"),
    ],
)
def test_what_cannot_be_changed_says_why(inputs, why):
    assert why in neighbors.changed(inputs, MODEL).why


def test_rows_change_places():
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "labels": torch.tensor([7, 8, 9])}
    (first, second), (one, other) = swap.windows(inputs, within=False)
    assert first["input_ids"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert second["input_ids"].tolist() == [[2, 1], [4, 3], [6, 5]]
    assert second["labels"].tolist() == [7, 8, 9]
    assert one["input_ids"].tolist() == [[5, 6], [3, 4], [2, 1]]
    assert other["input_ids"].tolist() == [[6, 5], [4, 3], [1, 2]]
    assert one["labels"].tolist() == [9, 8, 7]
    _, (one, other) = swap.windows(inputs, within=True)
    assert one["input_ids"].tolist() == [[5, 6], [3, 4], [1, 2]]
    assert swap.cannot({**inputs, "pixel_values": torch.zeros(3)}).startswith("pixel_values is not known")
    assert swap.cannot(inputs) == ""


KINDS = ("ids", "mask")
MODEL = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
)


# -- the numbers

SKETCH = torch.tensor([3.0, 4.0, 0.0, 12.0], dtype=torch.float64)
MADE = applied.Made(SKETCH, 13.0, (2, 2), ("a", "b"))


@pytest.mark.parametrize(
    ("now", "most", "by", "verdict", "text"),
    [
        (SKETCH, None, "", "holds", "no clipping"),
        (SKETCH, 26.0, "", "holds", "norm 13, max_grad_norm 26"),
        (SKETCH / 13, 1.0, "", "holds", "norm 13, max_grad_norm 1"),
        (SKETCH / 2, 0.0, "", "deviates", "expected 1.000 x (no clipping)"),
        (SKETCH, 1.0, "", "deviates", "expected 0.077 x (norm 13, max_grad_norm 1)"),
        (SKETCH.flip(0), None, "", "deviates", "of the gradient at the step is not the window's"),
        (SKETCH.flip(0), None, "mine", "note", "mine may do that on purpose"),
        (SKETCH * torch.tensor([1.0, 1.0, 0.0, 0.0]), None, "", "deviates", "1 have no gradient at the step: b"),
        (SKETCH / 0.0, None, "", "deviates", "the gradient at the step is not finite"),
        (SKETCH * 0, None, "mine", "deviates", "the whole gradient was cleared"),
    ],
)
def test_one_direction_and_one_factor(now, most, by, verdict, text):
    found = applied.judge(MADE, [Mine(used=now, own=SKETCH)], most, 0.0, by)
    assert (found.verdict.value, text in found.text) == (verdict, True)


def test_ranks_that_already_differed_are_not_told_again():
    other = Mine(used=SKETCH * 2, own=SKETCH * 2)
    assert applied.judge(MADE, [Mine(used=SKETCH, own=SKETCH), other], None, 0.0, "").verdict.value == "holds"
    other = Mine(used=SKETCH * 2, own=SKETCH)
    assert applied.judge(MADE, [Mine(used=SKETCH, own=SKETCH), other], None, 0.0, "mine").verdict.value == "deviates"


def test_rounding_of_a_coarse_gradient():
    rounded = (SKETCH * 1.01, 1.0, 0.0)
    assert applied.judge(MADE, [Mine(used=rounded[0], own=SKETCH)], None, 2**-7, "").verdict.value == "holds"
    assert applied.judge(MADE, [Mine(used=rounded[0], own=SKETCH)], None, 0.0, "").verdict.value == "deviates"
