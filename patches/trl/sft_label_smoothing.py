"""TRL: SFT's default loss with label smoothing, or with a loss function of the user's."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Signature, Variant

_TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
_OURS = f"{__package__}._labels_taken"
_CHUNKED = 'self.args.loss_type == "chunked_nll"'

PATCH = Patch(
    name="trl-sft-label-smoothing",
    summary="SFT trains with label smoothing, and with a compute_loss_func, by default",
    harm="crash",
    bug="the first step raises: the metrics need what only a forward pass with labels returns",
    when="SFTTrainer with label_smoothing_factor or a compute_loss_func; loss_type chunked_nll (default since 1.7.0)",
    excluded_by=("trl=dpo|grpo|kto|reward|rloo",),
    symptom="""\
`SFTTrainer` with `label_smoothing_factor` or a `compute_loss_func` raises in its first step: `AttributeError:
'CausalLMOutputWithPast' object has no attribute 'num_valid_tokens'`. TRL 1.7.0 to 1.14.2 do so by default, 1.4.0 to
1.6.0 with `loss_type="chunked_nll"`. Without the patch, `loss_type="nll"` avoids it.""",
    cause="""\
With `chunked_nll` the model's forward computes the loss and counts tokens, if it gets labels. With label smoothing or a
`compute_loss_func` transformers' `Trainer` takes the labels out of the batch and computes the loss from the logits.
The forward then returns the model's own output, and `SFTTrainer` reads the counts that it does not have.""",
    repair="""\
The patch computes entropy and accuracy from the logits then, as `loss_type="nll"` does. Loss, gradient and metrics are
those of `loss_type="nll"`, bit for bit, and need the memory of its logits. Steps that did not raise stay as released.

If transformers does not shift the labels that it smooths, the step raises as released: for a model that is compiled or
under FSDP, and for a class whose name is not among the causal models', such as your own subclass or many
vision-language models. The loss would train the model to repeat its input.""",
    signatures=(Signature("AttributeError", "object has no attribute 'num_valid_tokens'", frames=(_TARGET,)),),
    references=("https://github.com/huggingface/trl/pull/5575",),
    variants=(
        Variant(
            Guard("trl", ">=1.4.0,<1.15.0"),
            (
                Rewrite(
                    _TARGET,
                    _CHUNKED,
                    f"({_CHUNKED} and $COUNTED(self, model, outputs))",
                    matches=2,
                    alongside=("outputs.num_valid_tokens",),
                    uses={"COUNTED": f"{_OURS}:counted"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.15.0",
    conditions=(Condition(_TARGET, f"{_OURS}:taken"),),
)
