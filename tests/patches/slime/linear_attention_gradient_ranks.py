"""What goes back through slime's layer for linear attention, against one rank in float64: ``--out FOLDER TP CP [SP]``.

On gloo ranks, with slime's file of one tag on sys.path, or the stand-in for it (standins/slime_linear_attention). The
attention is one of our own: a decaying sum over the tokens before, of each sequence by itself, between two projections.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig

NAME = "slime-linear-attention-gradient"
LENGTHS, HIDDEN, DECAY = (16, 24), 6, 0.8


def numbers() -> dict[str, torch.Tensor]:
    """Of the whole batch, in float64."""
    generator = torch.Generator().manual_seed(5)
    tokens = sum(LENGTHS)
    sizes = {
        "states": (tokens, 1, HIDDEN),
        "of loss": (tokens, 1, HIDDEN),
        "in": (HIDDEN, HIDDEN),
        "out": (HIDDEN,) * 2,
    }
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


def attention(states: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens, hidden]``, of the sequences one after another."""
    found = []
    for sequence in (states @ into).tanh().split(LENGTHS, 1):
        age = torch.arange(sequence.shape[1])[:, None] - torch.arange(sequence.shape[1])
        weights = (DECAY ** age.clamp(min=0).to(states.dtype)) * (age >= 0)
        found.append(weights @ sequence)
    return torch.cat(found, 1).tanh() @ out


def exact() -> dict[str, torch.Tensor]:
    """Gradients of the hidden states and of both weights, of one rank."""
    given = numbers()
    leaves = [given[name].requires_grad_() for name in ("states", "in", "out")]
    output = attention(leaves[0].transpose(0, 1), *leaves[1:]).transpose(0, 1)
    found = torch.autograd.grad((output * given["of loss"]).sum(), leaves)
    return dict(zip(("states", "in", "out"), found, strict=True))


def places(tensor: int, sequence_parallel: bool) -> torch.Tensor:
    """Of the batch's tokens those of this rank: of each sequence a chunk from each end; then a tensor-parallel part."""
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    found, start = [], 0
    for length in LENGTHS:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        found += [chunks[rank], chunks[2 * ranks - 1 - rank]] if ranks > 1 else [torch.cat(chunks)]
        start += length
    own = torch.cat(found)
    return own.chunk(tensor)[parallel_state.get_tensor_model_parallel_rank()] if sequence_parallel else own


def slimes(function: Any) -> Any:
    """As if the function were written in a module of slime's."""
    names = {**function.__globals__, "__name__": "slime_plugins.models.qwen3_next"}
    return FunctionType(function.__code__, names, closure=function.__closure__)


def divided(states: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A user's own attention, of which each tensor-parallel rank has a share; it adds up what goes back under CP."""
    if parallel_state.get_context_parallel_world_size() > 1:
        group = parallel_state.get_context_parallel_group()
        states = states.view_as(states)
        states.register_hook(lambda gradient: torch.distributed.nn.functional.all_reduce(gradient, group=group))
    rank, ranks = (getattr(parallel_state, f"get_tensor_model_parallel_{of}")() for of in ("rank", "world_size"))
    own = attention(states, into.chunk(ranks, 1)[rank], out.chunk(ranks)[rank])
    return tensor_parallel.reduce_from_tensor_model_parallel_region(own)


def observe(tensor: int, sequence_parallel: bool, folder: Path) -> dict[str, Any]:
    module = importlib.import_module("slime_plugins.models.hf_attention")

    class Layer(module.HuggingfaceAttention):  # type: ignore[name-defined]
        @slimes
        def hf_forward(self, hidden_states: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
            return attention(hidden_states, weights["in"], weights["out"])

    class Own(module.HuggingfaceAttention):  # type: ignore[name-defined]
        def hf_forward(self, hidden_states: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
            return divided(hidden_states, weights["in"].detach(), weights["out"].detach())

    given = {name: one.float() for name, one in numbers().items()}
    weights = {name: given[name].requires_grad_() for name in ("in", "out")}
    own = places(tensor, sequence_parallel)
    states_of_rank = given["states"][own].requires_grad_()
    args = SimpleNamespace(sequence_parallel=sequence_parallel, hf_checkpoint=str(folder))
    layer = Layer(args, TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1), 1)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    output, _ = layer(states_of_rank, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=bounds))
    (output * given["of loss"][own]).sum().backward()
    for one in weights.values():  # as distributed data parallelism adds them up
        torch.distributed.all_reduce(one.grad, group=parallel_state.get_context_parallel_group())
    states_of_own = given["states"][own].detach().requires_grad_()
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)
    output, _ = Own(args, config, 1)(states_of_own, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=bounds))
    (output * given["of loss"][own]).sum().backward()
    right = exact()
    found = {"states": (states_of_rank.grad, right["states"][own])}
    found["own"] = (states_of_own.grad, right["states"][own])
    found.update({name: (one.grad, right[name]) for name, one in weights.items()})
    return {
        **{name: ((one.double() - of).norm() / of.norm()).item() for name, (one, of) in found.items()},
        "bits": states_of_rank.grad.flatten().tolist(),
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("tensor", type=int)
    parser.add_argument("context", type=int)
    parser.add_argument("sequence", nargs="?")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(options.tensor, context_parallel_size=options.context)
    folder = options.out / f"model{torch.distributed.get_rank()}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": HIDDEN}))
    importlib.import_module("slime_plugins.models.hf_attention")
    states.report(NAME, lambda: observe(options.tensor, options.sequence == "SP", folder), options.out)
