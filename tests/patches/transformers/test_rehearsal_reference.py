"""Relations with a reference, without checkpointing, without compilation, and of a data loader's rows."""

from __future__ import annotations

import math

import peft
import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from rlhf_patches.rehearsal import reference, rows, switches
from tests.harness.forkserver import TRL
from tests.patches.transformers import rehearsal_reference_ranks as runs

WORKER = runs.__name__
LOSS, PASSES = reference.LOSS, reference.PASSES
CHECKPOINTING, COMPILED = switches.CHECKPOINTING, switches.COMPILED
EQUAL = "policy and reference are equal"
ROWS = {
    "equal": (LOSS, "holds", EQUAL),
    "IPO": (LOSS, "holds", EQUAL),
    "two losses": (LOSS, "holds", EQUAL),
    "unknown loss": (LOSS, "not checked", "the initial value of loss_type discopop is not known"),
    "weighted": (LOSS, "not checked", "use_weighting is set"),
    "another reference": (LOSS, "not checked", "the weights of policy and reference differ"),
    "new adapter": (LOSS, "holds", EQUAL),
    "adapter trained before": (LOSS, "holds", EQUAL),
    "own loss": (LOSS, "not checked", "Own.compute_loss is not TRL's own"),
    "dropout kept": (PASSES, "note", "the reference changes with the random state, as by dropout"),
    "checkpointing": (CHECKPOINTING, "holds", "the gradient without it"),
    "reentrant": (CHECKPOINTING, "holds", "the gradient without it"),
    "little memory": (CHECKPOINTING, "not checked", "with --memory low"),
    "recomputed otherwise": (CHECKPOINTING, "deviates", "the gradient is not that without checkpointing"),
    "compiled": (COMPILED, "holds", "the gradient without it"),
    "compiled wrongly": (COMPILED, "deviates", "the gradient is not that of the model as it is written"),
    "drops": (rows.NAME, "note", "2 are left out in each epoch (dataloader_drop_last)"),
}
VALUES = {"equal": math.log(2), "IPO": 25.0, "two losses": math.log(2) + 0.5, "new adapter": math.log(2)}


SOME = ("equal", "new adapter", "recomputed otherwise", "drops")
exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize("cases", [SOME, pytest.param(tuple(sorted({*ROWS} - {*SOME})), marks=exhaustive)])
def test_what_is_known_of_a_run(run_ranks, cases):
    (found,) = run_ranks(WORKER, *cases, levels=TRL, ranks=1)
    for case in cases:
        name, verdict, text = ROWS[case]
        row = found[case][name]
        assert (row["verdict"], text in row["text"]) == (verdict, True), (case, row)
        if case in VALUES:
            assert abs(float(row["measured"]) - VALUES[case]) < 1e-4, case
        if name == LOSS:
            assert found[case][PASSES]["verdict"] == "holds", case
        if verdict != "deviates":
            assert not [row for row in found[case].values() if row["verdict"] == "deviates"], case
            assert found[case][rows.NAME]["verdict"] == ("note" if case == "drops" else "holds"), case


@pytest.mark.parametrize(
    ("case", "verdict", "text"),
    [
        ("same rows", "deviates", "rank 1 trains on the same rows as rank 0"),
        pytest.param("other rows", "holds", "", marks=exhaustive),
    ],
)
def test_rows_of_ranks(run_ranks, case, verdict, text):
    for found in run_ranks(WORKER, case, levels=TRL, ranks=2, ACCELERATE_USE_CPU="true"):
        row = found[case][rows.NAME]
        assert (row["verdict"], row["text"]) == (verdict, text)


# -- adapters


def adapted(**settings):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    settings = {"r": 2, "target_modules": "all-linear", **settings}
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, ""),
        ({"modules_to_save": ["lm_head"]}, ""),
        ({"init_lora_weights": False}, "the adapter is not at its start: B of"),
        ({"use_dora": True}, "is not known to begin as the base model"),
        ({"trainable_token_indices": [1]}, "TrainableTokens"),
    ],
)
def test_an_adapter_at_its_start(settings, why):
    found = reference._adapted(adapted(**settings), None)
    assert (why in found) if why else not found


def test_an_adapter_and_its_copy():
    model = adapted(init_lora_weights=False)
    torch.manual_seed(1)
    model.add_adapter("ref", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert reference._adapted(model, None) == "the adapters default and ref differ"
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, each in named.items():
            if ".ref." in name:
                each.copy_(named[name.replace(".ref.", ".default.")])
    assert reference._adapted(model, None) == ""
    with torch.no_grad():
        model.base_model.model.lm_head.weight.add_(1)
    assert reference._adapted(adapted(modules_to_save=["lm_head"]), None) == ""
    other = adapted(modules_to_save=["lm_head"])
    with torch.no_grad():
        other.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    assert "was trained before" in reference._adapted(other, None)


@pytest.mark.parametrize(
    ("name", "loss", "rounding", "verdict"),
    [
        (reference.LOSS, 0.69315, 0.0, "holds"),
        (reference.LOSS, 0.6906, 0.0, "deviates"),
        (reference.LOSS, 0.6906, 0.001, "holds"),
        (reference.RATIO, 0.6932, 0.0, "holds"),
        (reference.RATIO, 0.70, 0.0, "deviates"),
    ],
)
def test_a_loss_that_is_known(name, loss, rounding, verdict):
    found = reference.judge(name, loss, math.log(2), rounding, 1.0, precomputed=False)
    assert found.verdict.value == verdict


# -- memory


def test_what_autograd_saves_is_counted_and_not_kept():
    layer = torch.nn.Linear(4, 4)
    given = torch.ones(3, 4)
    with switches.counted(layer) as number:
        layer(given).relu().sum()
    assert number[0] == 2 * 3 * 4 * 4  # what the layer and the activation were given or made, in float32
    assert switches.without_memory(torch.device("meta"), layer, lambda: None) == "the free memory of meta is not known"


@pytest.mark.parametrize(("free", "why"), [(95, "without it the micro-batch may need 0.0 GB"), (96, "")])
def test_a_gpu_s_memory(monkeypatch, free, why):
    numbers = {"mem_get_info": (free - 10, 1000), "memory_reserved": 30, "memory_allocated": 20}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, number=number: number)
    layer = torch.nn.Linear(4, 4)
    found = switches.without_memory(torch.device("cuda"), layer, lambda: layer(torch.ones(3, 4)).relu().sum())
    assert (why in found) if why else not found


# -- data loaders


def loader(drop_last=False, ranks=1, length=10, drawn=None):
    data = [*range(length)]
    batches = BatchSampler(SequentialSampler(range(length if drawn is None else drawn)), 2, drop_last)
    shard = BatchSamplerShard(batches, ranks, 0) if ranks > 1 else batches
    return DataLoader(data, batch_sampler=shard)


@pytest.mark.parametrize(
    ("settings", "left", "again"),
    [
        ({}, 0, 0),
        ({"length": 9}, 0, 0),
        ({"length": 9, "drop_last": True}, 1, 0),
        ({"ranks": 2}, 0, 2),
        ({"ranks": 2, "length": 9}, 0, 3),
        ({"ranks": 2, "length": 12}, 0, 0),
        ({"ranks": 2, "drop_last": True}, 2, 0),
    ],
)
def test_rows_are_counted_without_being_read(settings, left, again):
    made = loader(**settings)
    found = rows.epoch(made, settings.get("ranks", 1))
    assert (found.left, found.again, found.why) == (left, again, "")
    if settings.get("ranks", 1) == 2:
        shards = [[*BatchSamplerShard(made.batch_sampler.batch_sampler, 2, rank)] for rank in range(2)]
        drawn = [row for shard in shards for batch in shard for row in batch]
        assert len(drawn) == len(made.dataset) - left + again


def test_a_sampler_or_a_loader_of_the_user_s():
    assert [*rows._notes(rows.epoch(loader(drawn=5), 1))] == ["the sampler draws 5 rows in each epoch"]
    assert "not known to have one batch" in rows.epoch(DataLoader([1, 2], sampler=None, batch_size=None), 1).why
    assert "not accelerate's for these ranks" in rows.epoch(loader(), 2).why


def test_examples_that_become_one_row():
    of_epoch = rows.Epoch(length=8, drawn=8, size=2)
    ids = torch.ones(1, 4, dtype=int)
    assert [*rows._merged({"input_ids": ids, "labels": ids}, of_epoch)] == ["a batch of 2 examples has one row"]
    assert not [*rows._merged({"input_ids": ids, "position_ids": ids}, of_epoch)]
    assert not [*rows._merged({"input_ids": ids.repeat(2, 1)}, of_epoch)]
