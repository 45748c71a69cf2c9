"""FP8: pad sequences to the lengths that TransformerEngine needs on each rank, not only to divisible lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

_MODULE = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"

TOKENS = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""For each ``TransformerConfig.fp8_recipe``, the divisor of the number of tokens on a rank."""

_counts: Counter[str] = Counter()


def token_multiple(config: Any) -> int | None:
    """The number of tokens, over all ranks, that must divide the length of every sequence; None without FP8.

    Args:
        config: the model's ``TransformerConfig``; the function reads ``fp8``, ``fp8_recipe`` and ``sequence_parallel``.
            A recipe that is not in `TOKENS`, including ``custom``, counts as 128, a multiple of all others.
    """
    if not getattr(config, "fp8", None):
        return None
    from megatron.core import parallel_state

    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    context_parallel = parallel_state.get_context_parallel_world_size()
    recipe = getattr(config, "fp8_recipe", None)
    on_a_rank = TOKENS.get(str(getattr(recipe, "value", recipe)), max(TOKENS.values()))
    # Sequence parallelism splits the part of each context-parallel rank; TransformerEngine checks the smallest part.
    parts = context_parallel * (tensor_parallel if config.sequence_parallel else 1)
    # Context parallelism gives each rank two chunks of a sequence.
    layout = tensor_parallel * (2 * context_parallel if context_parallel > 1 else 1)
    return math.lcm(layout, on_a_rank * parts)


def observed() -> dict[str, int]:
    """How many batches have been padded so far in this process, by the multiple."""
    return dict(_counts)


def _multiple_of(model: Any) -> int | None:
    from megatron.core.utils import get_model_config

    multiple = token_multiple(get_model_config(model))
    if multiple is not None:
        _counts[f"batches padded to multiples of {multiple} tokens"] += 1
    return multiple


def _longer(tensor: Any, columns: int) -> Any:
    """``[B, S, ...]`` with that many columns of zeros appended on the right."""
    import torch

    zeros = tensor.new_zeros(tensor.shape[0], columns, *tensor.shape[2:])
    return torch.cat([tensor, zeros], dim=1)


def _with_padding_as_tokens(attention_mask: Any, missing: Any, columns: int) -> Any:
    """``[B, S + columns]``: the mask, and on its right ``missing`` (``[B]``) true positions in each row."""
    import torch

    positions = torch.arange(columns, device=attention_mask.device)
    padding = (positions < missing[:, None]).to(attention_mask.dtype)
    return torch.cat([attention_mask, padding], dim=1)


def packing(function: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Replaces ``preprocess_packed_seqs`` where ``model`` is about to be called.

    SkyRL's function gets sequences that already have their padding, as tokens 0 at the end, and adds none.
    """
    multiple = _multiple_of(model)
    if multiple is None:
        return function

    def preprocess_packed_seqs(input_ids: Any, attention_mask: Any, pre_process: bool = True) -> Any:
        columns = multiple - 1
        missing = -attention_mask.sum(dim=-1) % multiple
        mask = _with_padding_as_tokens(attention_mask, missing, columns)
        packed, packed_seq_params = function(_longer(input_ids, columns), mask, pre_process)
        return (packed if pre_process else input_ids), packed_seq_params

    return preprocess_packed_seqs


def unpacking(function: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Replaces ``remove_left_padding`` where ``model`` is about to be called."""
    multiple = _multiple_of(model)
    if multiple is None:
        return function

    def remove_left_padding(input_ids: Any, attention_mask: Any, position_ids: Any, pre_process: bool = True) -> Any:
        ids, mask, positions = function(input_ids, attention_mask, position_ids, pre_process)
        columns = -mask.shape[1] % multiple
        return (
            _longer(ids, columns) if pre_process else ids,
            _longer(mask, columns),
            _longer(positions, columns),
        )

    return remove_left_padding


def replaying(function: Callable[..., None]) -> Callable[..., None]:
    """Replaces ``setup_per_microbatch_replay_forward``, which computes SkyRL's layout of tokens itself."""

    def setup_per_microbatch_replay_forward(
        rollout_expert_indices: Any, attention_mask: Any, model_config: Any, use_sample_packing: bool = False
    ) -> None:
        multiple = token_multiple(model_config)
        if multiple is not None:
            lengths = attention_mask.sum(dim=-1)
            missing = -lengths % multiple
            if not use_sample_packing:  # all rows are as long as the longest, so one row of that length is enough
                missing = missing * (lengths == lengths.max())
            attention_mask = _with_padding_as_tokens(attention_mask, missing, multiple - 1)
            rollout_expert_indices = _longer(rollout_expert_indices, multiple - 1)
        function(
            rollout_expert_indices, attention_mask, model_config=model_config, use_sample_packing=use_sample_packing
        )

    return setup_per_microbatch_replay_forward


_REPLAY = "setup_per_microbatch_replay_forward($$$ARGUMENTS)"


def _rewrites(name: str, replacement: str, unless: tuple[str, ...] = (), **uses: str) -> tuple[Rewrite, ...]:
    """One name in each of the two methods that call the model."""
    return tuple(
        Rewrite(
            target=f"{_MODULE}:MegatronModelWrapper.{method}",
            pattern=name,
            inside=f"{name}($$$ARGUMENTS)",
            unless=("fp8_enabled = $VALUE", *unless),
            replacement=replacement,
            uses=uses,
        )
        for method in ("forward", "forward_backward_mini_batch")
    )


def _padding(unless: tuple[str, ...] = ()) -> tuple[Rewrite, ...]:
    return (
        *_rewrites(
            "preprocess_packed_seqs",
            "$PACKING(preprocess_packed_seqs, model)",
            unless,
            PACKING=f"{__name__}:{packing.__name__}",
        ),
        *_rewrites(
            "remove_left_padding",
            "$UNPACKING(remove_left_padding, model)",
            unless,
            UNPACKING=f"{__name__}:{unpacking.__name__}",
        ),
    )


PATCH = Patch(
    name="skyrl-fp8-alignment",
    summary="sequences are padded as TransformerEngine's FP8 recipe requires on each rank",
    harm="crash",
    bug="sequences are padded to lengths that TransformerEngine's FP8 rejects",
    when="the Megatron backend with FP8",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL with the Megatron backend and FP8 (`transformer_config_kwargs.fp8`) stops in the first layer or in backward,
with most batches but not all: `AssertionError: FP8 execution requires the product of all dimensions except the last to
be divisible by 8 and the last dimension to be divisible by 16, but got tensor with dims=...`, `Assertion failed:
ret.lda % 16 == 0. Leading dimension requirement on A for FP8 GEMM. Caller must pad.`, `MXFP8 requires tensor dims that
are divisible by 32` or `All-gather requires quantizable tensor for quantizer Float8BlockQuantizer`.""",
    cause="""\
`preprocess_packed_seqs` and `remove_left_padding` pad sequences to a multiple of the number that tensor and context
parallelism need to split the tokens: 1, 2, 4 and so on. Neither considers FP8. Pull request 1543 uses the larger of the
tensor-parallel size and 8: for a size of 6 the result is not a multiple of 6, and with context or sequence parallelism
a rank holds only a part of the tokens. 0.3.0 pads to multiples of 16 on each context-parallel rank, for any recipe.""",
    repair="""\
If the model's config sets `fp8`, the patch pads sequences to the least common multiple of two numbers. Parallelism
needs `tp`, or `2 * tp * cp` with context parallelism. The recipe needs its number from the table, times `cp`, and times
`tp` with `sequence_parallel`, because TransformerEngine checks a rank's part before it gathers it.

| `fp8_recipe` | tokens on a rank are a multiple of | from |
| --- | --- | --- |
| `delayed`, `tensorwise` | 16 | TransformerEngine's FP8 primer ("both dimensions are divisible by 16"), \
`get_fp8_align_size` of megatron-core |
| `mxfp8` | 32 | TransformerEngine's page on MXFP8, `get_fp8_align_size` |
| `blockwise` | 128 | TransformerEngine's page on FP8 blockwise scaling |
| `custom`, any other | 128 | a multiple of all of these |

8, the number of pull request 1543, is what TransformerEngine checks in forward for every recipe (2.10,
`assert_dim_for_fp8_exec`). The weight's gradient multiplies along the tokens, where cuBLAS needs 16.

Padding tokens are at the end of each sequence, like SkyRL's own: causal attention masks them for all other tokens, and
SkyRL drops their outputs; a mixture of experts routes them, as before. Router replay (`moe_enable_routing_replay`,
0.2.0), which computes the positions of tokens itself, gets the same padding. Without `fp8` SkyRL's functions run
unchanged. Only the wrapper's calls are repaired: your own code that calls `preprocess_packed_seqs` gets no more padding
than before.""",
    references=(
        "https://github.com/NovaSky-AI/SkyRL/pull/1543",
        "https://github.com/NovaSky-AI/SkyRL/pull/1828",
        "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html",
        "https://nvidia.github.io/TransformerEngine/features/low_precision_training/fp8_blockwise_scaling/fp8_blockwise_scaling.html",
        "https://nvidia.github.io/TransformerEngine/features/low_precision_training/mxfp8/mxfp8.html",
    ),
    variants=(
        # Without router replay.
        Variant(Guard("skyrl", ">=0.1.0,<0.2.0"), _padding(unless=(_REPLAY,))),
        Variant(
            Guard("skyrl", ">=0.2.0,<0.3.0"),
            (
                *_padding(),
                *_rewrites(
                    "setup_per_microbatch_replay_forward",
                    "$REPLAYING(setup_per_microbatch_replay_forward)",
                    REPLAYING=f"{__name__}:{replaying.__name__}",
                ),
            ),
        ),
    ),
    observations=f"{__name__}:{observed.__name__}",
    obsolete_when="when the oldest SkyRL in use is 0.3.0",
)
