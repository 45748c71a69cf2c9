"""One mini-batch through verl's real engine for critics, on FSDP, and the same in float64 from the definition.

``--out FOLDER [CASE ...]``, with the folder of a verl release on sys.path, on data-parallel ranks. The model is a
transformers one with a value head. Each case splits the mini-batch into other micro-batches, or averages it in another
way.
"""

from __future__ import annotations

import copy
import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from rlhf_patches.proving import states

PATCH = "verl-critic-loss-scale"
PROMPTS, RESPONSES = (3, 5, 4, 2, 5, 3, 1, 4), (9, 2, 12, 4, 12, 1, 7, 10)
PROMPT, RESPONSE = max(PROMPTS), max(RESPONSES)
CLIP = 0.5


@dataclass(frozen=True)
class Case:
    """Rows per micro-batch and rank, how the loss is averaged, rows without a token that counts, and what is set."""

    rows: int
    mode: str = "token-mean"
    padding: tuple[int, ...] = ()
    sized: bool = True
    """Whether the trainer sets global_batch_size, as verl's own do."""


CASES = {
    "one micro-batch": Case(4),
    "two": Case(2),
    "four": Case(1),
    "two, seq-mean-token-mean": Case(2, "seq-mean-token-mean"),
    "two, seq-mean-token-sum": Case(2, "seq-mean-token-sum"),
    "two, seq-mean-token-sum-norm": Case(2, "seq-mean-token-sum-norm"),
    "padding alone": Case(1, padding=(2, 5)),
    "one micro-batch, seq-mean-token-sum": Case(4, "seq-mean-token-sum"),
    "two, no size": Case(2, sized=False),
    "two, seq-mean-token-mean, no size": Case(2, "seq-mean-token-mean", sized=False),
}


def on_cpu() -> None:
    """verl computes on the GPU that is current, and where there is none, on none."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")


def make_rows(case: Case) -> dict[str, torch.Tensor]:
    """The global mini-batch: prompts padded on the left, responses on the right, a tool's answer in the longest."""
    generator = torch.Generator().manual_seed(5)
    prompts, responses = torch.tensor(PROMPTS), torch.tensor(RESPONSES)
    place = torch.arange(PROMPT + RESPONSE)
    mask = (place >= PROMPT - prompts[:, None]) & (place < PROMPT + responses[:, None])
    counted = mask[:, PROMPT:].clone()
    counted[responses == RESPONSE, 4:7] = False
    counted[list(case.padding)] = False
    values, returns = (torch.randn(counted.shape, generator=generator) for _ in range(2))
    return {
        "input_ids": torch.randint(1, 64, mask.shape, generator=generator) * mask,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": counted.long(),
        "values": values * 0.3,
        "returns": returns,
    }


@functools.cache
def make_model() -> Any:
    """Token classification with one label, as verl makes a critic."""
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    torch.manual_seed(2)
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)
    config = Qwen2Config(vocab_size=64, num_hidden_layers=2, num_labels=1, classifier_dropout=0.0, **sizes)
    return Qwen2ForTokenClassification(config).eval()


@functools.cache
def mesh(ranks: int) -> Any:
    """One for all models: another one has groups of its own."""
    return torch.distributed.init_device_mesh("cpu", (ranks,))


def make_config(mode: str) -> Any:
    from verl.workers.config import CriticConfig

    config = object.__new__(CriticConfig)  # 0.7's constructor wants a tokenizer
    vars(config).update(loss_agg_mode=mode, cliprange_value=CLIP)
    return config


def prepared(case: Case) -> tuple[Any, Any, Any]:
    """The engine, this rank's rows, and the loss."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig
    from verl.workers.utils.losses import value_loss

    implementation = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    engine = object.__new__(implementation.FSDPEngineWithValueHead)
    engine.module = fully_shard(copy.deepcopy(make_model()), mesh=mesh(torch.distributed.get_world_size()))
    engine.ulysses_sequence_parallel_size, engine.ulysses_device_mesh, engine.use_ulysses_sp = 1, None, False
    engine._autocast_dtype, engine.pad_to_length, engine.engine_config = torch.float32, False, FSDPEngineConfig()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = {name: value.chunk(ranks)[rank] for name, value in make_rows(case).items()}
    present = rows["attention_mask"].bool()
    nested = {
        name: torch.nested.as_nested_tensor(
            [row[mask] for row, mask in zip(rows[name], present, strict=True)], layout=torch.jagged
        )
        for name in ("input_ids", "position_ids")
    }
    ids = {"prompts": rows["input_ids"][:, :PROMPT], "responses": rows["input_ids"][:, PROMPT:]}
    data = TensorDict({**rows, **ids, **nested, "loss_mask": rows["response_mask"]}, batch_size=len(present))
    data["temperature"] = torch.ones(len(present))
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": case.rows, "use_remove_padding": True}
    tu.assign_non_tensor(data, **settings, **({"global_batch_size": len(PROMPTS)} if case.sized else {}))
    return engine, data, functools.partial(value_loss, config=make_config(case.mode))


def engine_step(case: Case) -> dict[str, Any]:
    """What the engine has trained on: gradients, the loss and its metric as verl adds them up over ranks."""
    engine, data, loss_function = prepared(case)
    found = engine.forward_backward_batch(data, loss_function, forward_only=False)
    return {
        "gradient": torch.cat([p.grad.full_tensor().flatten() for p in engine.module.parameters()]),
        "loss": sum(found["loss"]),
        "metric": found["metrics"]["critic/vf_loss"],
    }


def over_ranks(loss: float, metric: Any) -> dict[str, float]:
    """As `TrainingWorker` and `reduce_metrics` do it."""
    of_all: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, (loss, metric))
    losses, metrics = zip(*of_all, strict=True)
    if isinstance(metric, list):
        aggregated = sum(map(sum, metrics)) / sum(map(len, metrics))
    else:
        aggregated = type(metric).aggregate_dp(list(metrics))
    return {"loss": sum(losses) / len(losses), "metric": float(aggregated)}


@functools.cache
def exactly(case: Case) -> tuple[float, torch.Tensor]:
    """The clipped value loss of the global mini-batch and its gradient: float64, a row at a time, without padding."""
    model = copy.deepcopy(make_model()).double()
    rows = make_rows(case)
    of_rows, counts = [], []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids = rows["input_ids"][row, PROMPT - prompt : PROMPT + response]
        # The value of the state in which a token is chosen is at the token before.
        value = model(ids[None]).logits[0, prompt - 1 : -1, 0]
        old, target = (rows[name][row, :response].double() for name in ("values", "returns"))
        clipped = old + (value - old).clamp(-CLIP, CLIP)
        errors = torch.maximum((value - target) ** 2, (clipped - target) ** 2) / 2
        counted = rows["response_mask"][row, :response].double()
        of_rows.append((errors * counted).sum())
        counts.append(counted.sum())
    sums, tokens = torch.stack(of_rows), torch.stack(counts)
    loss = {
        "token-mean": sums.sum() / tokens.sum(),
        "seq-mean-token-mean": (sums / tokens).mean(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-sum-norm": sums.mean() / RESPONSE,
    }[case.mode]
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([part.flatten() for part in gradient])


def observe(case: Case) -> dict[str, Any]:
    """In multiples of what is right: the gradient's norm, the loss and the metric; and the gradient's distance."""
    found = engine_step(case)
    loss, gradient = exactly(case)
    return {
        "norm": (found["gradient"].double().norm() / gradient.norm()).item(),
        "distance": ((found["gradient"] - gradient).norm() / gradient.norm()).item(),
        "numbers": isinstance(found["metric"], list) and found["metric"],
        **{name: value / loss for name, value in over_ranks(found["loss"], found["metric"]).items()},
    }


def of_the_old_critics() -> float:
    """Their loss of a whole mini-batch, which they divide by the number of micro-batches themselves."""
    rows = make_rows(CASES["four"])
    values = rows["values"]
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    arguments = {name: rows[name] for name in ("values", "returns", "response_mask")}
    loss, _ = core_algos.compute_value_loss(vpreds=values * 2, **arguments, cliprange_value=CLIP)
    return float(loss)


def by_hand(mode: str, **numbers: Any) -> dict[str, Any]:
    """``value_loss`` by itself, of data in which no engine has set anything but these."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import value_loss

    rows = make_rows(CASES["four"])
    present = rows["attention_mask"].bool()
    predicted = torch.nested.as_nested_tensor(
        [(row * 0.01)[mask] for row, mask in zip(rows["input_ids"], present, strict=True)], layout=torch.jagged
    )
    ids = {"prompts": rows["input_ids"][:, :PROMPT], "responses": rows["input_ids"][:, PROMPT:]}
    data = TensorDict({**rows, **ids}, batch_size=len(present))
    tu.assign_non_tensor(data, **numbers)
    loss, metrics = value_loss(make_config(mode), {"values": predicted}, data)
    return {"loss": loss.item(), **metrics}


def observations(cases: list[str]) -> dict[str, Any]:
    """Of the cases, of the critics that are right, and of calls without the numbers."""
    modes = ("token-mean", "seq-mean-token-sum")
    tokens = int(make_rows(CASES["four"])["response_mask"].sum())
    return {
        "cases": {name: observe(CASES[name]) for name in cases},
        "old critics": of_the_old_critics(),
        "nothing set": [by_hand(mode) for mode in modes],
        "one rank": by_hand("token-mean", dp_size=1, batch_num_tokens=tokens, global_batch_size=len(PROMPTS))["loss"],
        "none": [by_hand(mode, dp_size=2, batch_num_tokens=None, global_batch_size=None) for mode in modes],
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu()
    torch.distributed.init_process_group("gloo")
    reverted = [name for name in options.cases if name == "two"]
    states.report_cases(PATCH, observations, options.cases, options.out, reverted=reverted)
