"""For proofs: a tiny Llama on a long sequence, beside the same model with exact rotary frequencies in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, FAR = 1024, 512
_HEAD, _THETA = 16, 10_000.0


class Remote(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose rotary embedding is not transformers' own code."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)

        class Own(type(self.model.rotary_emb)):  # type: ignore[misc]
            pass

        self.model.rotary_emb.__class__ = Own


def model(remote: bool = False) -> LlamaForCausalLM:
    """In float32, with weights that bfloat16 and float16 represent."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=2 * _HEAD,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        rope_theta=_THETA,
        tie_word_embeddings=False,
    )
    made = (Remote if remote else LlamaForCausalLM)(config).float()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            parameter.copy_(parameter.bfloat16().half())
    return made


def tokens() -> torch.Tensor:
    """One sequence, 1 x ``TOKENS``."""
    return torch.randint(0, 32, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def log_probabilities(call: Callable[..., Any]) -> torch.Tensor:
    """Of each token but the first, given those before."""
    ids = tokens()
    logits = call(input_ids=ids, use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()


class Exact:
    """What the model computes in float64: log-probabilities, and the gradient of the loss in the embeddings."""

    def __init__(self) -> None:
        whole = copy.deepcopy(model()).double()
        exponents = torch.arange(0, _HEAD, 2, dtype=torch.float64) / _HEAD
        whole.model.rotary_emb = _Angles(_THETA**-exponents)
        ids = tokens()
        logits = whole(input_ids=ids, use_cache=False).logits
        found = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
        (-found.mean()).backward()
        self.log_probabilities = found.detach()
        gradient = whole.model.embed_tokens.weight.grad
        assert gradient is not None
        self.gradient = gradient

    def compared(self, call: Callable[..., Any], step: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """How far a wrapped model is from it.

        Args:
            call: the wrapped model's forward.
            step: runs the backward pass of a loss, and returns the gradient in the embeddings.
        """
        found = log_probabilities(call)
        off = (found.detach().double() - self.log_probabilities).abs()
        gradient = step(-found.mean()).detach().double()
        return {
            "near": float(off[:32].mean()),
            "far": float(off[FAR:].mean()),
            "gradient": float((gradient - self.gradient).norm() / self.gradient.norm()),
            "bits": float(found.detach().double().sum()).hex(),
        }


class _Angles(torch.nn.Module):  # type: ignore[misc]
    """Cosines and sines of exact angles."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids.double()[..., None] * torch.cat([self.frequencies, self.frequencies])
        return angles.cos(), angles.sin()


def kinds(module: torch.nn.Module) -> dict[str, str]:
    """The types of the buffers, by name."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): str(each.dtype).removeprefix("torch.")
        for name, each in module.named_buffers()
    }
