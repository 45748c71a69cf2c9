"""Every built-in patch. Written by tools/derive.py (``make docs``); a test compares."""

from __future__ import annotations

from .deepspeed import offload_accumulation as deepspeed_offload_accumulation
from .megatron_bridge import no_sync_reentry as megatron_bridge_no_sync_reentry
from .megatron_core import forward_pre_hook_reentry as megatron_core_forward_pre_hook_reentry
from .megatron_lm import no_sync_reentry as megatron_lm_no_sync_reentry
from .nemo_rl import logprob_backward as nemo_rl_logprob_backward
from .peft import adapter_freeze as peft_adapter_freeze
from .skyrl import bf16_logits as skyrl_bf16_logits
from .skyrl import entropy_backward as skyrl_entropy_backward
from .skyrl import fp8_alignment as skyrl_fp8_alignment
from .skyrl import logprob_backward as skyrl_logprob_backward
from .skyrl import loss_outputs_once as skyrl_loss_outputs_once
from .skyrl import sequence_parallel_logits as skyrl_sequence_parallel_logits
from .slime import no_sync_reentry as slime_no_sync_reentry
from .swift import kto_sequence_parallel as swift_kto_sequence_parallel
from .swift import no_sync_reentry as swift_no_sync_reentry
from .swift import null_ref_context as swift_null_ref_context
from .swift import vocab_parallel_logprob_gradient as swift_vocab_parallel_logprob_gradient
from .transformer_engine import cross_entropy_backward as transformer_engine_cross_entropy_backward
from .trl import chunked_divergence_zero3 as trl_chunked_divergence_zero3
from .trl import chunked_nll_zero3 as trl_chunked_nll_zero3
from .verl import no_sync_reentry as verl_no_sync_reentry

PATCHES = (
    deepspeed_offload_accumulation.PATCH,
    megatron_bridge_no_sync_reentry.PATCH,
    megatron_core_forward_pre_hook_reentry.PATCH,
    megatron_lm_no_sync_reentry.PATCH,
    nemo_rl_logprob_backward.PATCH,
    peft_adapter_freeze.PATCH,
    skyrl_bf16_logits.PATCH,
    skyrl_entropy_backward.PATCH,
    skyrl_fp8_alignment.PATCH,
    skyrl_logprob_backward.PATCH,
    skyrl_loss_outputs_once.PATCH,
    skyrl_sequence_parallel_logits.PATCH,
    slime_no_sync_reentry.PATCH,
    swift_kto_sequence_parallel.PATCH,
    swift_no_sync_reentry.PATCH,
    swift_null_ref_context.PATCH,
    swift_null_ref_context.PATCH_HF,
    swift_vocab_parallel_logprob_gradient.PATCH,
    transformer_engine_cross_entropy_backward.PATCH,
    trl_chunked_divergence_zero3.PATCH,
    trl_chunked_nll_zero3.PATCH,
    verl_no_sync_reentry.PATCH,
)
