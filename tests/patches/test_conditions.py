"""When bugs bite, told from attributes: on what has them, and on what has not; and by the real frameworks' proofs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace as Has

import pytest

from rlhf_patches.patches import plugin
from rlhf_patches.proving import children, found

PATCHES = {patch.name: patch for patch in plugin.rlhf_patches() if getattr(patch, "conditions", ())}
PACKAGE = "rlhf_patches.patches"
GRPO = {"loss_type": "dapo", "mask_truncated_completions": True}


def args(**settings):
    return Has(args=Has(**settings), model=Has(config=Has(output_router_logits=True), training=True))


@pytest.mark.parametrize(
    ("where", "arguments", "told"),
    [
        ("deepspeed.conditions:accumulates", [Has(gradient_accumulation_steps=1)], False),
        ("deepspeed.conditions:accumulates", [Has(gradient_accumulation_steps=2)], True),
        ("deepspeed.conditions:accumulates_offloaded", [Has(gradient_accumulation_steps=2, cpu_offload=False)], False),
        ("deepspeed.conditions:accumulates_offloaded", [Has(gradient_accumulation_steps=2, cpu_offload=True)], True),
        ("deepspeed.conditions:drops_of_several", [2, True], False),
        ("deepspeed.conditions:drops_of_several", [3, False], False),
        ("deepspeed.conditions:drops_of_several", [3, True], True),
        ("deepspeed.conditions:has_an_empty_group", [None], None),
        ("deepspeed.conditions:has_an_empty_group", [Has(param_groups=[{"params": [1]}])], False),
        ("deepspeed.conditions:has_an_empty_group", [Has(param_groups=[{"params": [1]}, {"params": []}])], True),
        (
            "trl.conditions:part_of_a_generation",
            [Has(**GRPO, args=Has(gradient_accumulation_steps=2, steps_per_generation=4))],
            0.5,
        ),
        (
            "trl.conditions:part_of_a_generation",
            [Has(**GRPO, args=Has(gradient_accumulation_steps=4, steps_per_generation=4))],
            False,
        ),
        ("trl.conditions:part_of_a_generation", [Has(loss_type="grpo")], False),
        ("trl.conditions:masks_truncated", [Has(**GRPO)], True),
        ("trl.conditions:masks_truncated", [Has(**{**GRPO, "loss_type": "bnpo"})], False),
        ("trl.conditions:masks_truncated", [Has(**{**GRPO, "mask_truncated_completions": False})], False),
        ("trl.conditions:has_tools", [{"tool_mask": 1}], True),
        ("trl.conditions:has_tools", [{}], False),
        (
            "trl.conditions:micro_batches",
            [Has(args=Has(gradient_accumulation_steps=4), is_deepspeed_enabled=False)],
            4.0,
        ),
        (
            "trl.conditions:micro_batches",
            [Has(args=Has(gradient_accumulation_steps=4), is_deepspeed_enabled=True)],
            False,
        ),
        ("trl.conditions:micro_batches", [Has(args=Has(gradient_accumulation_steps=1))], False),
        (
            "transformers.conditions:averaged_over_ranks",
            [args(world_size=2, average_tokens_across_devices=True)],
            True,
        ),
        (
            "transformers.conditions:averaged_over_ranks",
            [args(world_size=2, average_tokens_across_devices=False)],
            False,
        ),
        ("transformers.conditions:averaged_over_ranks", [args(world_size=1)], False),
        ("transformers.conditions:routers_of_ranks", [args(world_size=2, average_tokens_across_devices=True)], 2.0),
        ("transformers.conditions:routers_of_ranks", [args(world_size=1)], False),
        ("transformers.conditions:routers_of_ranks", [Has(model=Has())], False),
    ],
)
def test_what_is_told_of_a_call(where, arguments, told):
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)(*arguments)
    assert (type(found), found) == (type(told), told)


@pytest.mark.parametrize("patch", PATCHES.values(), ids=str)
def test_each_is_there_and_imports_no_framework(patch):
    for condition in patch.conditions:
        module, _, name = condition.tells.partition(":")
        tells = getattr(importlib.import_module(module), name)
        assert tells.__code__.co_argcount >= 1
        assert not {"torch", "transformers", "trl", "deepspeed"} & {*tells.__code__.co_names}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=str)
def test_the_real_framework_has_it_where_the_proof_shows_the_bug(patch):
    """On the release of this environment, if that has the bug."""
    from rlhf_patches.definitions.registry import Registered
    from rlhf_patches.offline import evaluate

    (row,) = evaluate.inspect([Registered(patch, "tests")])
    proof = found.proof_of(patch)
    if row.status != "applies" or proof is None or found.missing(proof.proof.needs):
        pytest.skip(f"{patch.name} is not for this environment: {row.status}")
    for report in children.run(proof):
        reached = report.get("reached")
        if reached is None:
            pytest.skip("its worker says nothing of that")
        assert 0 < reached["held"] <= reached["asked"] <= reached["calls"]
