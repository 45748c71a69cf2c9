"""Keeps logits in the dtype of the model, and computes log-probabilities in chunks."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_MODULE = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.megatron_utils"
_LOGITS = f"{__package__}._logits"
_METHODS = ("forward", "forward_backward_mini_batch")
_CALL = "model(new_sequences, new_position_ids, new_attention_mask, packed_seq_params=packed_seq_params)"

PATCH = Patch(
    name="skyrl-bf16-logits",
    summary="logits stay in the model's dtype, and log-probabilities are computed in chunks",
    harm="memory",
    bug="all logits are copied to float32, and log-probabilities are not computed in chunks",
    when="the Megatron backend and long sequences",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL 0.1.0 and 0.2.0 with the Megatron backend run out of CUDA memory at the end of the forward pass or at the start of
the backward pass, at sequence lengths at which the model itself has memory left.""",
    cause="""\
megatron-core's `Float16Module` casts the logits to fp32 by default. SkyRL passes `chunk_size=None`, so
`DistributedLogprob` computes a whole fp32 softmax, saves it for backward, and allocates a whole fp32 gradient
there.""",
    repair="""\
The patch calls the model with `fp32_output=False`, and the log-probabilities with a chunk size, so that SkyRL's own
function casts one chunk at a time; results are fp32 as before. The size is `trainer.logprobs_chunk_size` if the
configuration has such an attribute (tokens; None for no chunks), as in SkyRL 0.3.0; if not, a chunk's fp32 logits get
128 MiB. The command line of these releases does not know the option: set the attribute
(`cfg.trainer.logprobs_chunk_size = 512`). The patch computes entropies in fp32, in the same chunks. SkyRL's own
functions need five collectives per chunk for log-probabilities and three for entropies; `skyrl-logprob-backward` and
`skyrl-entropy-backward` need no chunks.

Logits stay in fp32, as released, where bfloat16 would change results: with a temperature other than 1, by which SkyRL
divides in place; and with the entropy in the loss (`use_entropy_loss`), unless `skyrl-logprob-backward` and
`skyrl-entropy-backward` compute one gradient for both, since two gradients would be rounded separately. Logits also
stay in fp32 for models in another dtype, and where megatron-core's `Float16Module` has no `fp32_output` (0.10). The
report counts these cases. With context parallelism, packed logits are assembled in their own dtype instead of torch's
default.""",
    references=("https://github.com/NovaSky-AI/SkyRL/pull/1543", "https://github.com/NovaSky-AI/SkyRL/pull/1610"),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<=0.2.0"),
            (
                *(
                    Rewrite(
                        target=f"{_MODULE}:MegatronModelWrapper.{method}",
                        pattern="model",
                        inside=_CALL,
                        replacement=f"$IN_ITS_DTYPE(model, temperature{config})",
                        uses={"IN_ITS_DTYPE": f"{_LOGITS}:in_its_dtype"},
                    )
                    for method, config in zip(_METHODS, ("", ", loss_config"), strict=True)
                ),
                *(
                    Rewrite(
                        target=f"{_MODULE}:MegatronModelWrapper.{method}",
                        pattern="from_parallel_logits_to_logprobs",
                        replacement="$IN_CHUNKS(from_parallel_logits_to_logprobs, self.cfg)",
                        alongside=(
                            "from_parallel_logits_to_logprobs($$$ARGUMENTS, chunk_size=None)",
                            "logits.div_(temperature)",
                        ),
                        uses={"IN_CHUNKS": f"{_LOGITS}:in_chunks"},
                    )
                    for method in _METHODS
                ),
                Rewrite(
                    target=f"{_MODULE}:MegatronModelWrapper.forward_backward_mini_batch",
                    pattern="vocab_parallel_entropy(action_logits)",
                    replacement="$ENTROPY(vocab_parallel_entropy, action_logits, self.cfg)",
                    uses={"ENTROPY": f"{_LOGITS}:entropy"},
                ),
                Rewrite(
                    target=f"{_UTILS}:postprocess_packed_seqs",
                    pattern="torch.empty(s_len_padded, *output.shape[2:], device=output.device)",
                    replacement=(
                        "torch.empty(s_len_padded, *output.shape[2:], dtype=output.dtype, device=output.device)"
                    ),
                ),
            ),
        ),
    ),
    observations=f"{_LOGITS}:observed",
    obsolete_when=(
        "when the oldest SkyRL in use is 0.3.0, which has a chunk size and `fused_lm_head_logprob`, without logits"
    ),
)
