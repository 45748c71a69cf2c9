"""One mini-batch through verl's real engine for policies, on FSDP and the CPU, for the tests of its policy losses.

The mini-batch is the one of critic_loss_scale_ranks.py, with advantages and old log-probabilities: eight responses of
1 to 12 tokens, a tool's answer in the longest. It goes in as verl's default trainer gives it, without padding, or as
the older one does, padded to a response length.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlhf_patches.patches.verl.proofs.critic_loss_scale_ranks import (
    CASES,
    PROMPT,
    PROMPTS,
    RESPONSE,
    RESPONSES,
    make_rows,
    mesh,
)

LOSS_KEYS = ("response_mask", "old_log_probs", "advantages")


@functools.cache
def make_model() -> Any:
    """A language model of two layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(2)
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_hidden_layers=2, **sizes)).eval()


def log_probs(model: Any, row: int) -> torch.Tensor:
    """Of one response's tokens, without padding."""
    prompt, response = PROMPTS[row], RESPONSES[row]
    ids = make_rows(CASES["four"])["input_ids"][row, PROMPT - prompt : PROMPT + response]
    logits = model(ids[None]).logits[0, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]


@functools.cache
def mini_batch() -> dict[str, torch.Tensor]:
    """All rows, padded: the ratios are on both sides of the clipping of 0.2, for advantages of either sign."""
    rows = make_rows(CASES["four"])
    generator = torch.Generator().manual_seed(7)
    old, noise = torch.zeros(len(PROMPTS), RESPONSE), torch.randn(len(PROMPTS), RESPONSE, generator=generator)
    with torch.no_grad():
        for row, response in enumerate(RESPONSES):
            old[row, :response] = log_probs(make_model(), row) + 0.2 * noise[row, :response]
    advantages = torch.randn(len(PROMPTS), 1, generator=generator) * (rows["attention_mask"][:, PROMPT:] > 0)
    return {**rows, "old_log_probs": old, "advantages": advantages}


def _without_padding(rows: dict[str, torch.Tensor], keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Every field as a nested tensor, as TransferQueue hands them to the workers of verl's default trainer."""
    present = rows["attention_mask"].bool()
    parts = {
        "input_ids": (rows["input_ids"], present),
        "position_ids": (rows["position_ids"], present),
        "prompts": (rows["input_ids"][:, :PROMPT], present[:, :PROMPT]),
        "responses": (rows["input_ids"][:, PROMPT:], present[:, PROMPT:]),
        **{name: (rows[name], present[:, PROMPT:]) for name in keys},
    }
    nested = {
        name: torch.nested.as_nested_tensor(
            [row[mask] for row, mask in zip(values, masks, strict=True)], layout=torch.jagged
        )
        for name, (values, masks) in parts.items()
    }
    return {**nested, "loss_mask": nested["response_mask"]}


def _padded(rows: dict[str, torch.Tensor], width: int, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """As the older trainer gives it: the model's input nested, the rest as wide as the longest response may be."""
    wide = {name: torch.nn.functional.pad(rows[name], (0, width - RESPONSE)) for name in ("attention_mask", *keys)}
    ids = torch.nn.functional.pad(rows["input_ids"], (0, width - RESPONSE))
    nested = _without_padding(rows, keys)
    return {
        **wide,
        **{name: nested[name] for name in ("input_ids", "position_ids")},
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "loss_mask": wide["response_mask"],
    }


def prepared(rows_per_micro_batch: int, width: int | None = None, **more: Any) -> tuple[Any, Any]:
    """The engine, and this rank's rows.

    Args:
        rows_per_micro_batch: on each rank.
        width: of the padded responses; without padding if None.
        more: fields of responses, of all ranks, besides the mini-batch's own or in their place.
    """
    from tensordict import TensorDict
    from torch.distributed.fsdp import fully_shard
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    functional: Any = importlib.import_module("verl.utils.torch_functional")
    functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False  # a kernel for CUDA
    implementation = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    engine = object.__new__(implementation.FSDPEngineWithLMHead)
    engine.module = fully_shard(copy.deepcopy(make_model()), mesh=mesh(ranks))
    engine.ulysses_sequence_parallel_size, engine.ulysses_device_mesh, engine.use_ulysses_sp = 1, None, False
    engine._autocast_dtype, engine.pad_to_length, engine.engine_config = torch.float32, False, FSDPEngineConfig()
    rows = {name: value.chunk(ranks)[rank] for name, value in {**mini_batch(), **more}.items()}
    keys = dict.fromkeys((*LOSS_KEYS, *more))
    fields = _without_padding(rows, keys) if width is None else _padded(rows, width, keys)
    data = TensorDict(fields, batch_size=len(rows["input_ids"]))
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=rows_per_micro_batch,
        use_remove_padding=True,
        temperature=1.0,
        global_batch_size=len(PROMPTS),
    )
    return engine, data


def step(loss_function: Callable[..., Any], rows_per_micro_batch: int, width: int | None = None) -> dict[str, Any]:
    """What the engine has trained on: the gradient of all ranks, and the logged loss of this one.

    Args:
        loss_function: as verl's worker has it: of model_output, data and dp_group.
        rows_per_micro_batch: on each rank.
        width: of the padded responses; without padding if None.
    """
    engine, data = prepared(rows_per_micro_batch, width)
    found = engine.forward_backward_batch(data, loss_function, forward_only=False)
    gradient = torch.cat([p.grad.full_tensor().flatten() for p in engine.module.parameters()])
    return {"gradient": gradient, "loss": sum(found["loss"])}


def compared(found: dict[str, Any], exact: torch.Tensor) -> dict[str, Any]:
    """The gradient in multiples of ``exact``: its norm, the distance; and all its bits, in one word."""
    gradient = found["gradient"]
    return {
        "norm": (gradient.double().norm() / exact.norm()).item(),
        "distance": ((gradient - exact).norm() / exact.norm()).item(),
        "bits": hashlib.sha256(gradient.numpy().tobytes()).hexdigest(),
        "loss": found["loss"],
    }


@functools.cache
def exactly(loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The gradient of the mean over the sequences: float64, a row at a time, without padding.

    Args:
        loss: a sequence's: of the log-ratios and the advantages of its tokens, and which of them count.
    """
    model = copy.deepcopy(make_model()).double()
    rows = mini_batch()
    losses = []
    for row, response in enumerate(RESPONSES):
        old, advantages, counted = (
            rows[name][row, :response].double() for name in ("old_log_probs", "advantages", "response_mask")
        )
        losses.append(loss(log_probs(model, row) - old, advantages, counted))
    gradient = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
    return torch.cat([part.flatten() for part in gradient])
