"""A GPTModel of two layers on tensor-parallel ranks, for training steps of frameworks around it.

To be imported after `megatron_on_cpu.install()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY = 64


class Attention(DotProductAttention):
    """megatron-core's own, which refuses packed sequences: here they are kept apart by the mask."""

    def forward(
        self, query: Any, key: Any, value: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> Any:
        if packed_seq_params is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        length = query.shape[0]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if packed_seq_params is not None:
            sequence = torch.searchsorted(packed_seq_params.cu_seqlens_q[1:], torch.arange(length), right=True)
            hidden |= sequence[:, None] != sequence
        return super().forward(query, key, value, hidden[None, None], attn_mask_type=AttnMaskType.padding)


class LayerNorm(torch.nn.LayerNorm):
    """In place of megatron-core's, which on a CPU refuses sequence parallelism: its gradient has to be reduced."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def make_model(
    bf16: bool,
    *,
    length: int = 24,
    attention: type = Attention,
    position: str = "rope",
    stage: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
    tied: bool = False,
    dropout: float = 0.0,
    **settings: Any,
) -> Any:
    """Within megatron-core's DistributedDataParallel; the same weights every time.

    Args:
        bf16: parameters in bfloat16, and logits upcast by `Float16Module`; else float32 throughout.
        length: of the longest sequence.
        attention: the class of the attention within a layer.
        position: the kind of position embedding.
        stage: what the `GPTModel` of a pipeline's stage is told besides.
        ddp: more of the `DistributedDataParallelConfig`.
        tied: whether the embeddings are the output's weights, too.
        dropout: of hidden states.
        settings: of the `TransformerConfig`.
    """
    config = TransformerConfig(
        num_layers=settings.pop("num_layers", 2),
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=dropout,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        **settings,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    spec.submodules.self_attention.submodules.core_attention = attention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = LayerNorm
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([spec] * (config.num_layers // stages), LayerNorm),
        vocab_size=VOCABULARY,
        max_sequence_length=length,
        position_embedding_type=position,
        share_embeddings_and_output_weights=tied,
        **(stage or {}),
    )
    if gpt.post_process and not tied:
        with torch.no_grad():
            gpt.output_layer.weight.mul_(20)  # distributions with some shape
    module = Float16Module(config, gpt) if bf16 else gpt
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {}))
    return DistributedDataParallel(config, ddp_config, module)
