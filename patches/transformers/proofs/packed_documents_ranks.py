"""Losses of packed documents by transformers' own models: ``--out FOLDER``.

Each case before apply() of transformers-packed-documents, after it, and after revert(): the gradient of packed rows,
and that of the same documents one by one, in float64.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "transformers-packed-documents"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOCUMENTS, VOCABULARY = (7, 5, 9), 32
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "initializer_range": 0.3}
SIZES |= {"experts_implementation": "eager", "attention_dropout": 0.0, "pad_token_id": 0}
SIZES |= {"use_cache": False}  # as Trainer sets it
OF: dict[str, dict[str, Any]] = {
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Afmoe": {"num_dense_layers": 1, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "Qwen3": {"use_sliding_window": True, "max_window_layers": 1},
}


def made(family: str, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **OF[family], attn_implementation=attention)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def documents(lengths: tuple[int, ...] = DOCUMENTS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator, device="cpu").to(DEVICE) for length in lengths]


def summed(model: Any, ids: torch.Tensor, starts: tuple[int, ...], **given: Any) -> torch.Tensor:
    """The loss of all tokens except each document's first."""
    labels = ids.clone()
    labels[:, list(starts)] = -100
    logits = model(input_ids=ids, **given).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def packed(rows: int, lengths: tuple[int, ...] = DOCUMENTS) -> dict[str, torch.Tensor]:
    ids, positions = torch.cat(documents(lengths)), torch.cat([torch.arange(length) for length in lengths])
    return {"ids": ids.expand(rows, -1), "position_ids": positions.expand(rows, -1)}


def right(
    model: Any, alone: Any, rows: int = 1, lengths: tuple[int, ...] = DOCUMENTS, compiled: bool = False, **given: Any
) -> dict[str, Any]:
    """Packed rows compared with the documents alone, in float64."""
    alone = alone.double()
    starts = tuple(sum(lengths[:number]) for number in range(len(lengths)))
    called = torch.compile(model, backend="eager") if compiled else model
    loss = summed(called, starts=starts, **packed(rows, lengths), **given)
    wanted = rows * sum(summed(alone, document[None], (0,)) for document in documents(lengths))
    found, wished = gradients(model, loss), gradients(alone, wanted)
    return {
        "loss": abs(float(loss) / float(wanted) - 1),
        "gradient": max(float((found[name] - wished[name]).norm() / wished[name].norm()) for name in wished),
        "parameters": len(wished),
    }


def bits(make: Callable[[], Any], given: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """A digest of the logits and of every gradient; and the changes of a forward to the model."""
    model, touched = make(), ""
    ids = torch.stack([torch.cat(documents())] * 2)
    try:
        with untouched(model):
            model(input_ids=ids, **given(model))
    except AssertionError as error:
        touched = str(error)
    logits = model(input_ids=ids, **given(model)).logits
    found = gradients(model, logits.square().sum())
    digest = hashlib.sha256(logits.detach().cpu().numpy().tobytes())
    for name in sorted(found):
        digest.update(found[name].cpu().numpy().tobytes())
    return {"digest": digest.hexdigest(), "touched": touched, "logits": float(logits.detach().norm())}


def left(_: Any) -> dict[str, Any]:
    mask = torch.ones(2, sum(DOCUMENTS), dtype=torch.long)
    mask[0, :6] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)}


def jumps(_: Any) -> dict[str, Any]:
    """Positions from 3 on, and a gap; never 0."""
    positions = torch.arange(sum(DOCUMENTS)) + 3
    positions[5:] += 7
    return {"position_ids": positions[None]}


def with_cache(model: Any) -> dict[str, Any]:
    return {**beside(model), "past_key_values": DynamicCache(config=model.config)}


def beside(_: Any) -> dict[str, Any]:
    return {"position_ids": packed(2)["position_ids"]}


LEFT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a mask": left,
    "not packed": lambda _: {"position_ids": torch.arange(sum(DOCUMENTS))[None]},
    "no positions": lambda _: {},
    "other jumps": jumps,
    "a cache": with_cache,
}


def generated(make: Callable[[], Any]) -> list[int]:
    ids = torch.stack([torch.cat(documents())] * 2)
    mask = left(None)["attention_mask"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return make().generate(ids, attention_mask=mask, **options).flatten().tolist()


def cases() -> dict[str, Callable[[], Any]]:
    """The observations, by name; for the families that this release of transformers has."""
    kinds = [
        each
        for each in (("GptOss", "eager"), ("Afmoe", "eager"), ("Afmoe", "sdpa"))
        if hasattr(transformers, f"{each[0]}Config")
    ]
    found: dict[str, Callable[[], Any]] = {}
    for kind in kinds:
        name, make = ", ".join(kind), functools.partial(made, *kind)
        for how, rows, compiled in (("packed", 1, False), ("2 rows", 2, False), ("compiled", 1, True)):
            found[f"{name}, {how}"] = functools.partial(compared, make, kind[0], rows=rows, compiled=compiled)
        for how, given in LEFT.items():
            found[f"{name}, {how}"] = functools.partial(bits, make, given)
        found[f"{name}, generated"] = functools.partial(generated, make)
    return {**found, "Qwen3, packed": functools.partial(compared, functools.partial(made, "Qwen3"), "Qwen3")}


def compared(make: Callable[[], Any], family: str, **given: Any) -> dict[str, Any]:
    return right(make(), made(family), **given)


def main() -> None:
    parser, known = states.parser(), cases()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(known))
    options = parser.parse_args()
    if DEVICE != "cpu":  # the setting is a mode, which would also apply there
        torch.set_default_device(DEVICE)
    states.report(NAME, lambda: {name: known[name]() for name in options.cases if name in known}, options.out)
