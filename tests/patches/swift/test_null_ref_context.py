"""``swift-null-ref-context`` and its kin: ms-swift's own context, on real models with dropout and LoRA.

What is observed is in null_ref_context_ranks.py: as released, patched and reverted, in one process.
"""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest

from rlhf_patches.testing import untouched
from tests.harness import look_alikes
from tests.harness.forkserver import swift
from tests.harness.stuck import stuck_in

# Trainer, the folder of its release (None: the newest), the patch.
MEGATRON = {
    "4.6.0": ("megatron", None, "swift-null-ref-context"),
    "3.9.0": ("megatron", "swift-3.9", "swift-null-ref-context"),
    "3.8.3": ("megatron", "swift-3.8", "swift-null-ref-context"),
}
TRANSFORMERS = {
    "4.6.0 DPO": ("swift.rlhf_trainers.dpo_trainer:DPOTrainer", None, "swift-null-ref-context-hf"),
    "4.3.2 DPO": ("swift.rlhf_trainers.dpo_trainer:DPOTrainer", "swift-4.3", "swift-null-ref-context-hf"),
    "4.3.2 GRPO": ("swift.rlhf_trainers.grpo_trainer:GRPOTrainer", "swift-4.3", "swift-null-ref-context-hf"),
    "3.12.2 GRPO": (
        "swift.trainers.rlhf_trainer.grpo_trainer:GRPOTrainer",
        "swift-3.12",
        "swift-null-ref-context-hf",
    ),
}
RULE_COVERAGE = {
    "minimal scope": "test_every_module_of_the_reference_is_in_eval_mode_and_no_other_is_touched",
    "no side effects": "test_a_turn_is_waited_for_with_a_bound",  # within `untouched`
    "backward compatible": ("test_grpo_chooses_the_batch_size_as_released", "test_contexts_may_overlap"),
    "no new blocking": "test_a_turn_is_waited_for_with_a_bound",
    "as trainable as it was": "test_nothing_is_left_behind",
    "nothing changes": "test_every_module_of_the_reference_is_in_eval_mode_and_no_other_is_touched",
    "results are unchanged": "because `disable_dropout` removes the noise",
    "leaves modes and adapters as they were": "test_contexts_may_overlap",
    "which affects no computation, does not change": "test_grpo_chooses_the_batch_size_as_released",
}
# float32 against float64 through a layer; seen through two: 4e-7. Dropout moves the values by 2e-2 and more.
ROUNDING = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        name if folder is None else pytest.param(name, marks=pytest.mark.exhaustive)
        for name, (_, folder, _) in {**MEGATRON, **TRANSFORMERS}.items()
    ],
)
def case(request, run_ranks):
    """Release, patch, and what was observed."""
    trainer, folder, patch = {**MEGATRON, **TRANSFORMERS}[request.param]
    levels = swift(folder, "swift_megatron" if trainer == "megatron" else "swift_transformers")
    (observed,) = run_ranks("tests.patches.swift.null_ref_context_ranks", trainer, levels=levels, ranks=1)
    assert observed["report"][patch] == "applied"
    return request.param, patch, observed


@pytest.fixture
def released(case):
    return case[2]["released"]


@pytest.fixture
def patched(case):
    return case[2]["patched"]


def test_two_reference_passes_are_the_same_and_kl_of_a_policy_against_itself_is_zero(released, patched):
    """And they are the reference: float64, computed from the weights."""
    before, after = released["two_passes"], patched["two_passes"]
    assert before["passes differ by"] > 1e-2
    assert before["KL of the policy against itself"] > 1e-5
    assert before["off float64 by"] > 1e-2
    assert after["passes differ by"] == 0
    assert after["KL of the policy against itself"] == 0
    assert after["off float64 by"] < ROUNDING


def test_the_pass_of_a_reference_adapter_is_that_adapters(released, patched):
    name = "two_passes_of_the_reference_adapter"
    assert released[name]["passes differ by"] > 1e-2
    assert patched[name]["passes differ by"] == 0
    assert patched[name]["off float64 by"] < ROUNDING
    assert patched[name]["off the model without it by"] > 1e-2, "so the adapter did something"


def test_no_checkpointed_forward_in_the_reference_pass(case, released, patched):
    """TransformerEngine's "Input x is not allocated!" came from one. Training steps keep their recompute."""
    if case[0] not in MEGATRON:
        pytest.skip("Megatron's recompute; the other trainers switch theirs off by themselves")
    name = "checkpointed_forwards"
    assert released[name] == {"in the reference pass": 1, "in the training step": 1}
    assert patched[name] == {"in the reference pass": 0, "in the training step": 1}


def test_after_an_exception_the_policy_is_trained_and_not_its_reference(released, patched):
    before, after = released["trained_after_an_exception"], patched["trained_after_an_exception"]
    assert before["default"] == 0
    assert before["ref_adapter"] > 1
    assert after["default"] > 1
    assert after["ref_adapter"] == 0


def test_nothing_is_left_behind(case, released, patched):
    """Modes, active adapters, disabled adapters, what is trainable: whichever way the context was left."""
    before, after = released["traces"], patched["traces"]
    assert set(before) == set(after)
    assert not any(after.values()), after
    for way, changed in before.items():
        if way.startswith("reference adapter") and not way.endswith("a pass"):
            # The one model that ms-swift had before 3.9 is never the second.
            assert ("active" in changed) == (case[0] != "3.8.3" or "second chunk" not in way), way
    assert "trainable" in before["reference adapter, 1 chunks, a pass"], "PEFT has trained what was frozen"


def test_every_module_of_the_reference_is_in_eval_mode_and_no_other_is_touched(case, released, patched):
    before, after = released["modes_within"], patched["modes_within"]
    for kind, (of_the_reference, others) in after.items():
        assert of_the_reference == 0, kind
        assert others == before[kind][1], kind
        assert before[kind][0] > 0, kind
    assert ("full" in after) == (case[0] in MEGATRON)


def test_a_nested_context_leaves_the_outer_one_as_it_was(released, patched):
    assert released["within_nested_contexts"]["off float64 by"] > 1e-2
    assert patched["within_nested_contexts"]["off float64 by"] < ROUNDING


def test_contexts_may_overlap(released, patched):
    """Enter A, enter B, leave A, leave B, in one thread or two: the last one puts everything back, and none before."""
    assert len(patched["overlapping"]) == 8
    for how, after in patched["overlapping"].items():
        assert after["off float64 by"] < ROUNDING, how
        assert after["left behind"] == [], how
        assert after["gradients"] == released["overlapping"][how]["gradients"] >= 8, how
    for kind, off in patched["an_inner_context_of_another_kind"].items():
        assert off < ROUNDING, kind
    inner = patched["an_inner_context_that_fails"]
    assert inner["failed"]
    assert inner["off float64 by"] < ROUNDING
    assert inner["left behind"] == []


def test_contexts_of_other_models_and_threads_do_not_matter(patched):
    assert patched["two_models"] == []
    assert patched["an_abandoned_context"] == {"left behind": [], "keeps the model": False}
    assert patched["forked_while_another_thread_enters"] == 0


def test_grpo_chooses_the_batch_size_as_released(case, released, patched):
    """Of as many rows as before at a time: `self.model.training` is what the trainer chooses by."""
    if case[0] in MEGATRON:
        pytest.skip("a batch size is all that Megatron's trainers have")
    before, after = released["rows_at_once"], patched["rows_at_once"]
    for observed in (before, after):
        assert observed["in training"] == [1] * 6
        assert observed["in evaluation"] == [6]
    assert before["off float64 by"] > 1e-2
    assert after["passes differ by"] == 0
    assert after["off float64 by"] < ROUNDING
    # One row at a time against six: no more than rounding.
    assert after["KL of the policy against itself"] < ROUNDING**2


def test_reverted_it_is_as_released(case):
    observed = case[2]
    assert observed["reverted"]["modes_within"] == observed["released"]["modes_within"]
    assert observed["reverted"]["two_passes"]["passes differ by"] > 1e-2
    assert observed["reverted"]["trained_after_an_exception"]["default"] == 0


@pytest.mark.parametrize(("version", "status"), [(None, "refused"), ("unknown", "unaffected")])
@pytest.mark.parametrize("patch", ["swift-null-ref-context", "swift-null-ref-context-hf"])
def test_it_keeps_away(tmp_path, patch, version, status):
    """From a context that restores what it changes in a way of its own."""

    def edit(text: str) -> str:
        restoring = r"\n\1try:\n\1    \2\n\1finally:\n\1    self.restore()"
        before, context = text.split("def null_ref_context")
        edited = re.sub(r"\n( +)(yield\b.*)", restoring, context, count=1)
        assert edited != context
        return f"{before}def null_ref_context{edited}"

    row = look_alikes.doctor_row(tmp_path, patch, version=version, edit=edit)
    assert row["status"] == status, row


@pytest.mark.parametrize(("disabled", "status"), [("", "applied"), ("swift-*-hf", "disabled")])
def test_disabled_it_is_not_applied(run_ranks, disabled, status):
    arguments = ("swift-null-ref-context-hf", "swift.rlhf_trainers.rlhf_mixin", "tests.harness.megatron_on_cpu:install")
    levels = swift(None, "swift_transformers")
    settings = {"RLHF_PATCHES_DISABLE": disabled}
    (found,) = run_ranks("tests.harness.keeping_away_ranks", *arguments, levels=levels, ranks=1, **settings)
    assert found["status"] == status
    assert found["as written"] == [status == "disabled"]


def test_a_turn_is_waited_for_with_a_bound(monkeypatch):
    """Another thread is stuck while it enters: this one's pass begins and ends, and leaves nothing behind."""
    torch = pytest.importorskip("torch")
    from rlhf_patches.patches.swift import _reference_pass

    monkeypatch.setattr(_reference_pass, "TIMEOUT", 0.01)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())

    def released():
        yield

    released_context = contextlib.contextmanager(_reference_pass.of_transformers)
    with stuck_in(_reference_pass._turn()), untouched(model):
        with released_context(released, SimpleNamespace(model=model), (), {}):
            assert not model[1].training
        assert model[1].training
