"""The entry point of the built-in patches; the engine finds them as it finds anybody else's."""

from __future__ import annotations

from rlhf_patches import Patch, hookimpl

from .megatron_bridge import no_sync_reentry as megatron_bridge_no_sync
from .megatron_core import forward_pre_hook_reentry
from .megatron_lm import no_sync_reentry as megatron_lm_no_sync
from .nemo_rl import logprob_backward as nemo_rl_logprob
from .skyrl import bf16_logits as skyrl_bf16_logits
from .skyrl import entropy_backward as skyrl_entropy
from .skyrl import fp8_alignment as skyrl_fp8_alignment
from .skyrl import logprob_backward as skyrl_logprob
from .skyrl import loss_outputs_once as skyrl_loss_outputs_once
from .skyrl import sequence_parallel_logits as skyrl_sequence_parallel_logits
from .slime import no_sync_reentry as slime_no_sync
from .swift import kto_sequence_parallel, null_ref_context
from .swift import no_sync_reentry as swift_no_sync
from .trl import chunked_divergence_zero3, chunked_nll_zero3
from .verl import no_sync_reentry as verl_no_sync


@hookimpl
def rlhf_patches() -> list[Patch]:
    """Every built-in patch."""
    return [
        forward_pre_hook_reentry.PATCH,
        megatron_lm_no_sync.PATCH,
        slime_no_sync.PATCH,
        swift_no_sync.PATCH,
        swift_no_sync.PATCH_OF_TRAIN,
        null_ref_context.PATCH,
        null_ref_context.PATCH_OF_DPO,
        null_ref_context.PATCH_HF,
        null_ref_context.PATCH_HF_OF_GRPO,
        null_ref_context.PATCH_HF_OF_DPO,
        null_ref_context.PATCH_HF_OF_GRPO_3,
        kto_sequence_parallel.PATCH,
        megatron_bridge_no_sync.PATCH,
        verl_no_sync.PATCH,
        chunked_nll_zero3.PATCH,
        chunked_divergence_zero3.PATCH,
        skyrl_logprob.PATCH,
        skyrl_entropy.PATCH,
        skyrl_entropy.PATCH_OF_WEIGHTED_SUM,
        skyrl_sequence_parallel_logits.PATCH,
        skyrl_bf16_logits.PATCH,
        skyrl_fp8_alignment.PATCH,
        skyrl_fp8_alignment.PATCH_OF_0_1,
        skyrl_loss_outputs_once.PATCH,
        nemo_rl_logprob.PATCH,
    ]
