"""megatron-core's GPT on ranks that share it in one way or another: how it is divided, and put together again."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hunt import groups
from hunt.trainers import CannotRun

LENGTHS = (16, 9, 12, 5, 14, 7, 3, 10)
LENGTH = max(LENGTHS)


@dataclass(frozen=True)
class Layout:
    """Ranks of each kind, of which the others are data parallel; with several chunks, a rank has as many stages."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    sequence: bool = False

    def start(self, ranks: int) -> None:
        """The groups; experts are never divided."""
        sizes = {"pipeline_model_parallel_size": self.pipeline, "context_parallel_size": self.context}
        if self.expert > 1:
            sizes |= {"expert_model_parallel_size": self.expert, "expert_tensor_parallel_size": 1}
        if self.chunks > 1:
            sizes["virtual_pipeline_model_parallel_size"] = self.chunks
        groups.start_megatron(self.tensor, ranks, **sizes)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the TransformerConfig."""
        return {
            "sequence_parallel": self.sequence,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.chunks if self.chunks > 1 else None,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": 1 if self.expert > 1 else None,
            # Two ranks are each other's next and previous one: without it, Megatron refuses them in its arguments.
            "overlap_p2p_comm": self.chunks > 1,
            "batch_p2p_comm": self.chunks == 1,
        }


def layout(parallel: str, ranks: int, experts: int = 1) -> Layout:
    """All ranks share the model as it is said, or each has it whole."""
    sizes: dict[str, Any] = {
        "": {},
        "tensor": {"tensor": ranks},
        "sequence": {"tensor": ranks, "sequence": ranks > 1},
        "stages": {"pipeline": ranks},
        "interleaved": {"pipeline": ranks, "chunks": 2 if ranks > 1 else 1},
        "context": {"context": ranks},
    }[parallel]
    return Layout(**sizes, expert=experts)


def chunks(divided: Layout, pipeline: str, **settings: Any) -> list[Any]:
    """The parts of the model that this rank has, each within DistributedDataParallel, with weights by their names."""
    from megatron.core import parallel_state

    from tests.harness import small_gpt

    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    made = []
    for chunk in range(divided.chunks):
        at: dict[str, Any] = {"vp_stage": chunk} if divided.chunks > 1 else {}
        here = {"ignore_virtual": False, **at}
        stage = {"pre_process": first(**here), "post_process": last(**here), **at}
        layers = 4 if pipeline == "interleaved" else 2
        try:
            made.append(small_gpt.make_model(False, stage=stage, num_layers=layers, **divided.settings, **settings))
        except AssertionError as error:
            if divided.context == 1:
                raise
            raise CannotRun(f"megatron-core without TransformerEngine: {error}") from error
    for name, parameter in named(made):
        fill(name, parameter)
    return made


def named(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Parameters of this rank, by the names that they have on a rank that has all."""
    from megatron.core import parallel_state

    for chunk in model:
        numbers = [layer.layer_number - 1 for layer in chunk.module.decoder.layers]
        config = chunk.module.config
        own = (config.num_moe_experts or 0) // config.expert_model_parallel_size
        before = own * parallel_state.get_expert_model_parallel_rank() if own else 0
        for name, parameter in chunk.module.named_parameters():
            name = re.sub(r"(?<=layers\.)\d+", lambda found: str(numbers[int(found[0])]), name)  # noqa: B023
            yield re.sub(r"(?<=experts\.)\d+", lambda found: str(before + int(found[0])), name), parameter  # noqa: B023


def part(parameter: Any) -> tuple[int, int, int]:
    """Along which dimension a parameter is divided, which part of it this rank has, of how many."""
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, 0, 1
    kind = "tensor_model" if getattr(parameter, "allreduce", True) else "expert_tensor"
    rank, size = (getattr(parallel_state, f"get_{kind}_parallel_{what}")() for what in ("rank", "world_size"))
    return max(parameter.partition_dim, 0), rank, size


def fill(name: str, parameter: Any) -> None:
    """What a parameter starts from depends on nothing but its name."""
    import torch

    dimension, rank, size = part(parameter)
    shape = list(parameter.shape)
    shape[dimension] *= size
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    whole = whole * (0.4 if "output_layer" in name else 0.1) + ("norm.weight" in name)
    with torch.no_grad():
        parameter.copy_(whole.chunk(size, dimension)[rank])


def gradients(model: Sequence[Any]) -> dict[str, Any]:
    """Whole ones of the whole model; where ranks have the same and disagree, each one's."""
    import torch

    mine = {name: (*part(parameter), parameter.main_grad) for name, parameter in named(model)}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    found: dict[str, list[Any]] = {}
    dimensions, others = {}, {}
    for of_rank, parts in enumerate(every):
        for name, (dimension, at, size, gradient) in parts.items():
            dimensions[name] = dimension
            have = found.setdefault(name, [None] * size)
            if have[at] is None:
                have[at] = gradient
            elif not torch.allclose(have[at], gradient, rtol=1e-4, atol=1e-6):
                others[f"{name} on rank {of_rank}"] = gradient
    return {name: torch.cat(parts, dimensions[name]) for name, parts in found.items()} | others


class Stream:
    """Of a CPU: what is put on it is done already."""

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def let_experts_run() -> None:
    """Megatron's dispatchers copy counts on a stream of their own, from a GPU alone."""
    import torch
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Without TransformerEngine, 0.16's router asks whether this is None, and has not defined it.
    vars(moe_utils).setdefault("te_general_gemm", None)

    cuda: Any = torch.cuda
    stream = Stream()
    cuda.Stream = cuda.current_stream = lambda *_, **__: stream

    def copied(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    vars(token_dispatcher)["maybe_move_tensor_to_cpu"] = copied


def rows_of_this_rank(order: str, micro_batch: int, accumulation: int) -> Sequence[Any]:
    """Micro-batches of row numbers."""
    import torch
    from megatron.core import parallel_state

    if len(LENGTHS) % (micro_batch * accumulation):
        raise CannotRun("Megatron has micro-batches of one size")
    rows = torch.arange(len(LENGTHS)) if order == "given" else torch.arange(len(LENGTHS)).flip(0)
    mine = rows.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    return mine.split(micro_batch)


class Data:
    """Rows of tokens, and of each as many counted as its length says.

    Attributes:
        tokens: with one more than is seen of them.
        counted: a mean of means over micro-batches is one of all where each row has as many tokens.
        per_token: the loss is that of all tokens that count; else a mean over each micro-batch.
        noted: what the losses of this rank add.
    """

    def __init__(self, per_token: bool) -> None:
        import torch

        from tests.harness import small_gpt

        generator = torch.Generator().manual_seed(3)
        self.per_token = per_token
        self.tokens = torch.randint(small_gpt.VOCABULARY, (len(LENGTHS), LENGTH + 1), generator=generator)
        lengths = torch.tensor(LENGTHS if per_token else [9] * len(LENGTHS))
        self.counted = torch.arange(LENGTH) < lengths[:, None]
        self.noted: list[Any] = []

    def forward_step(self, iterator: Iterator[Any], model: Any) -> Any:
        """As Megatron's schedules call it, on each stage."""
        chosen = next(iterator)
        losses = model(self.tokens[chosen, :-1], None, None, labels=self.tokens[chosen, 1:])

        def loss_of(output: Any) -> Any:
            counted = self.counted[chosen]
            total, number = (output * counted).sum(), counted.sum()
            self.noted.append(total.detach() / (1 if self.per_token else number))
            return (total, number.int(), {}) if self.per_token else (total / number, {})

        return losses, loss_of

    def loss(self, divided: Layout, micro_batches: int) -> Any:
        """Of the step, on every rank."""
        import torch
        from megatron.core import parallel_state

        loss = torch.stack([torch.zeros(()), *self.noted]).sum() / divided.tensor
        torch.distributed.all_reduce(loss)
        means = micro_batches * parallel_state.get_data_parallel_world_size()
        return loss / (self.counted.sum() if self.per_token else means)
