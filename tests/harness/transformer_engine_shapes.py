"""The shapes that TransformerEngine refuses, asked of megatron-core's own linear layers: no FP8, only the refusals.

What release 2.10, which SkyRL 0.2.0 requires, checks in its linear layers while FP8 is on:

* forward, every recipe: the tokens that came in, before any gather, are a multiple of 8
  (`assert_dim_for_fp8_exec`);
* before sequence parallelism gathers them, MXFP8 and blockwise scaling: they are a multiple of the block, 32 or 128
  (`assert_dim_for_all_gather`);
* MXFP8: every tensor's tokens are a multiple of 32 (its quantizer);
* backward: the weight's gradient multiplies along all tokens of the layer, which are cuBLAS's leading dimension
  there, and have to be a multiple of 16 (`CanonicalizeGemmInput`).

Blockwise scaling without a gather: TransformerEngine's page says 128, the code asks for the 16 above.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

BLOCKS = {"mxfp8": 32, "blockwise": 128}
LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def refuse_shapes(model: torch.nn.Module, config: Any) -> list[int]:
    """Let the layers that would run in FP8 refuse what TransformerEngine refuses.

    Returns:
        the number of tokens that each layer gets, filled in as they get it.

    Raises:
        AssertionError, RuntimeError: later, in forward or backward, as TransformerEngine does.
    """
    seen: list[int] = []

    def check(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        tokens = math.prod(arguments[0].shape[:-1])
        seen.append(tokens)
        assert tokens % 8 == 0, (
            "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last "
            f"dimension to be divisible by 16, but got tensor with dims={list(arguments[0].shape)}"
        )
        gathers = config.sequence_parallel and isinstance(module, ColumnParallelLinear)
        block = BLOCKS.get(config.fp8_recipe, 1)
        assert not gathers or tokens % block == 0, "All-gather requires quantizable tensor for quantizer"
        if config.fp8_recipe == "mxfp8" and tokens % 32:
            raise RuntimeError(f"MXFP8 requires tensor dims that are divisible by 32 (got {tokens})")
        of_the_layer = tokens * (config.tensor_model_parallel_size if gathers else 1)

        def check_gradient(gradient: torch.Tensor) -> None:
            if of_the_layer % 16:
                raise RuntimeError("Leading dimension requirement on A for FP8 GEMM. Caller must pad.")

        if output[0].requires_grad:
            output[0].register_hook(check_gradient)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LAYERS:
            module.register_forward_hook(check)
    return seen
