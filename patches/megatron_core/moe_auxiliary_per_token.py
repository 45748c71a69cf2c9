"""megatron-core: auxiliary losses under ``calculate_per_token_loss``, on ranks that share a sequence."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_GROUP = "self.tp_cp_group.size()"
_BEFORE_GROUPS = "parallel_state.get_tensor_and_context_parallel_world_size()"

# With a padding mask the number is a tensor, and already covers all those ranks: the all-reduce over the tokens of
# each expert writes into the tensor that they are counted from.
_OF_A_MASK = f"(1 if isinstance(num_tokens, torch.Tensor) else {_GROUP})"


def _scaled(method: str, attached: str, ranks: str = _GROUP, alongside: str | None = None) -> Rewrite:
    return Rewrite(
        target=f"{_ROUTER}.{method}",
        pattern=f"MoEAuxLossAutoScaler.apply({attached})",
        replacement=f"MoEAuxLossAutoScaler.apply({attached} * {ranks})",
        alongside=(alongside,) if alongside else (),
    )


_OF_ONE = (
    'self.attach_and_log_load_balancing_loss(probs, seq_aux_loss_coeff, aux_loss, "seq_load_balancing_loss", '
    "self.tp_cp_group, valid_token_count=local_num_tokens,)"
)
_OF_SEQUENCES = Rewrite(
    target=f"{_ROUTER}._apply_seq_aux_loss",
    pattern=_OF_ONE,
    alongside=("self.topk * bsz",),
    replacement=_OF_ONE.replace("local_num_tokens", "local_num_tokens * bsz"),
)

PATCH = Patch(
    name="megatron-core-moe-auxiliary-per-token",
    summary="auxiliary losses do not shrink with TP, CP and the micro-batch under calculate_per_token_loss",
    harm="wrong gradient",
    bug="load balancing and z-losses are too weak, by TP x CP",
    when="--calculate-per-token-loss, a mixture of experts, and TP, CP or the sequence-level loss",
    excluded_by=("calculate_per_token_loss=false",),
    symptom="""\
With `--calculate-per-token-loss`, the load balancing losses and the z-loss of a mixture of experts are too small by a
factor of TP x CP: with TP 4 and CP 2, they have an eighth of the configured coefficient. In 0.16.0 to 0.18.2,
`seq_aux_loss` is also divided by the size of the micro-batch. Experts become more and more unbalanced. No error is
raised. The logged losses are right.""",
    cause="""\
With this option, each gradient is divided by the number of all tokens at the end of a step, so the router multiplies
its losses by the number of tokens. The router uses only the tokens that it sees. Tensor-parallel ranks (with sequence
parallelism) and context-parallel ranks share a sequence, so each rank multiplies by the tokens of its own part only.
Since 0.16.0, `_apply_seq_aux_loss` uses the tokens of one sequence.""",
    repair="""\
The patch also multiplies the losses by the number of ranks that share a sequence, and `seq_aux_loss` by the number of
sequences. The gradient then equals that of one rank, and that without `--calculate-per-token-loss`.

Without the option, results are bitwise identical. With it they are so on one such rank, except for `seq_aux_loss` with
a micro-batch of several sequences. The load balancing loss with a padding mask (since 0.16.0) is not affected: its
number of tokens is already that of all ranks as released.

Under context parallelism, the losses are right if the loss function counts tokens as Megatron's own `pretrain_gpt.py`
does. In 0.12, it returns the number of the whole sequence on each rank. With a loss function that returns a rank's own
number, the losses of 0.12 are CP times too large with the patch, and TP times too small without it. Disable the patch
for such a run, and multiply its coefficients by TP. Since 0.13, `pretrain_gpt.py` returns a rank's own number. With the
number of the whole sequence on each rank, as slime returns it, the losses are still too small by CP with the
patch.""",
    references=(
        "https://github.com/NVIDIA/Megatron-LM/pull/5047",
        "https://github.com/NVIDIA/Megatron-LM/pull/5798",
    ),
    variants=(
        Variant(
            Guard("megatron-core", ">=0.12.0rc2,<=0.12.3"),
            (
                _scaled(
                    "apply_load_balancing_loss",
                    "activation, aux_loss * activation.shape[0]",
                    _BEFORE_GROUPS,
                    alongside="parallel_state.get_tensor_and_context_parallel_group()",
                ),
                _scaled("apply_z_loss", "logits, z_loss * logits.shape[0]", _BEFORE_GROUPS, alongside=_BEFORE_GROUPS),
            ),
        ),
        Variant(
            Guard("megatron-core", ">=0.13.0rc0,<=0.13.1"),
            (
                _scaled("apply_load_balancing_loss", "activation, aux_loss * activation.shape[0]"),
                _scaled("apply_z_loss", "logits, z_loss * logits.shape[0]", alongside=_GROUP),
            ),
        ),
        Variant(
            Guard("megatron-core", ">=0.14.0,<0.16.0"),
            (
                _scaled("attach_and_log_load_balancing_loss", "activation, aux_loss * activation.shape[0]"),
                _scaled("apply_z_loss", "logits, z_loss * logits.shape[0]"),
            ),
        ),
        Variant(
            Guard("megatron-core", ">=0.16.0,<0.19.0"),
            (
                _scaled("attach_and_log_load_balancing_loss", "activation, aux_loss * num_tokens", _OF_A_MASK),
                _scaled("apply_z_loss", "logits, z_loss * num_tokens"),
                _OF_SEQUENCES,
            ),
        ),
    ),
    obsolete_when="when the oldest megatron-core in use is 0.19",
    changes_numbers="""\
Since megatron-core 0.12.0, with `--calculate-per-token-loss`, auxiliary losses of a mixture had 1 / (TP x CP) of the
configured weight (`seq_aux_loss`, since 0.16.0, also divided by the micro-batch's size). With the patch, they have the
full weight. To keep the balance of a run that was tuned without the patch, divide its coefficients by TP x CP (that of
`seq_aux_loss`, since 0.16.0, also by the micro-batch's size).""",
    conditions=(
        Condition(f"{_ROUTER}.apply_load_balancing_loss", f"{__package__}._conditions:tokens_of_a_rank"),
        Condition(f"{_ROUTER}.apply_z_loss", f"{__package__}._conditions:z_loss_of_a_rank"),
    ),
)
