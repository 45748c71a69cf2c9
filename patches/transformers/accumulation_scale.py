"""transformers: ``Trainer`` assumes that every forward with ``**kwargs`` divides its loss for gradient
accumulation.
"""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._accumulation"


def _changes(
    *condition: str, none_is_divided: bool = True, engine_divides: bool = False, unless: tuple[str, ...] = ()
) -> tuple[Rewrite, ...]:
    """For releases whose step divides under this condition, or has these statements, and not those of ``unless``."""
    return (
        Rewrite(
            target="transformers.trainer:Trainer.training_step",
            pattern="self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)",
            replacement=f"$LOSS_OF(self, model, inputs, num_items_in_batch, {none_is_divided}, {engine_divides})",
            alongside=condition,
            unless=unless,
            uses={"LOSS_OF": f"{_OURS}:loss_of"},
        ),
        Rewrite(
            target="transformers.trainer:Trainer.compute_loss",
            pattern="return (loss, outputs) if return_outputs else loss",
            replacement="return $COMPUTED(self, loss, outputs, return_outputs)",
            uses={"COMPUTED": f"{_OURS}:computed"},
        ),
    )


_IF_NOT_BELIEVED = "not self.model_accepts_loss_kwargs and self.compute_loss_func is None"
_OR_NOT_COUNTED = "not self.model_accepts_loss_kwargs or num_items_in_batch is None"
_UNLESS_DECLARED = "self.model_accepts_loss_kwargs and num_items_in_batch is not None"
_ENGINE_DOES_NOT = 'kwargs["scale_wrt_gas"] = False'
# 5.5.4 does this by itself, 5.2.0 to 5.5.3 do not.
_ONE_DIVISION = Rewrite(
    target="transformers.trainer:Trainer.create_accelerator_and_postprocess",
    pattern="GradientAccumulationPlugin(**grad_acc_kwargs)",
    replacement="GradientAccumulationPlugin(**{**grad_acc_kwargs, 'num_steps': 1})",
)

PATCH = Patch(
    name="transformers-accumulation-scale",
    summary="with gradient accumulation or several ranks, models other than causal LMs keep their gradient's size",
    harm="wrong gradient",
    bug="the gradient is multiplied by accumulation steps and ranks (in 5.2.0 to 5.5.3 a causal LM's is divided)",
    when="gradient accumulation or several ranks; T5, BERT, classifiers, forwards with **kwargs; mixtures of experts",
    symptom="""\
`Trainer` with `gradient_accumulation_steps` above 1 trains T5, BART, BERT (masked LM too), DeBERTa and every classifier
on a gradient that is too large by the number of steps, and on several ranks also by the number of ranks: with eight
steps on eight GPUs, by 64. Llama's and Qwen's classifiers are affected since 4.54.0, the others since 5.0.0. Causal LMs
with label smoothing are affected until 5.14.1, and models that take `**kwargs` and are trained without `labels` until
4.52.4. TRL 1.5's PRMTrainer and GKDTrainer are affected too. The auxiliary loss of a mixture of experts counts once for
every micro-batch. No error. The logged loss is too large by the same factor. Adam and clipping hide the factor of the
gradient.

In 5.2.0 to 5.5.3 the reverse holds: a causal LM's gradient is too **small** by the number of steps, and the log does
not show it. The gradient of the other models is right, but their logged loss is wrong.""",
    cause="""\
`Trainer` assumes that a forward which takes `**kwargs` divides its loss by `num_items_in_batch`, the number of tokens
of all micro-batches. So `training_step` does not divide by the number of micro-batches, and with
`average_tokens_across_devices`, the default since 4.54.0, `compute_loss` multiplies by the number of ranks. Most of
these forwards ignore `num_items_in_batch`, or use it in one branch only. In 5.2.0 to 5.5.3 the Accelerator receives
the number of micro-batches too, and divides every loss once more.""",
    repair="""\
The patch acts if all code that computes the loss is known by identity: the model's forward and the function that
`loss_function` resolves to are transformers' own (or Liger's, or TRL's) and not replaced. `compute_loss` is
transformers' own, or passes on the very tensor that transformers' own returned, or is that of one of these TRL
trainers: `SFTTrainer`; `GKDTrainer` to 1.6.0, `ORPOTrainer` to 0.19.1, `DPOTrainer` and `CPOTrainer` to 0.13.0. The
patch then reads from the top of the loss's autograd graph what that code did. A term that is divided by
`num_items_in_batch`, and a term that is a sum, stay bit for bit the same. The patch divides a mean over the micro-batch
by the number of micro-batches, and does not multiply it by the number of ranks. If an auxiliary loss is added to a
divided loss, the patch removes the auxiliary loss's excess. The gradient is that of the micro-batches' mean, and so is
the logged loss. In 5.2.0 to 5.5.3 the Accelerator no longer divides, as in 5.5.4. The patch checks the code at the
first micro-batch of each window.

The patch supports DistributedDataParallel, FSDP, DeepSpeed, PEFT, gradient checkpointing and mixed precision.

**The patch does not change any other loss, and logs one line on rank 0.** Such losses are those with:

- your own model, loss, head, label smoother, or `compute_loss_context_manager`;
- your own `training_step`, training loop or `_clip_grad_norm`, which may divide gradients;
- a replaced entry of `LOSS_MAPPING`, or of a function that transformers' losses use;
- a forward hook or pre-hook outside the base model;
- a hook of a gradient (of a parameter, a module, the loss, or before the optimizer's step), except W&B's;
- a function that was compiled from a string;
- a `compute_loss` that does more than pass on the loss;
- another `backward` of the Accelerator;
- an Accelerator that divides as well (`ACCELERATE_GRADIENT_ACCUMULATION_STEPS`);
- a compiled model whose loss holds no `num_items_in_batch`;
- `torch.nn.DataParallel`, or DeepSpeed's sequence parallelism.

transformers requires a `compute_loss_func` to divide by `num_items_in_batch`, so the patch skips it and logs nothing.
The patch honors `loss_is_scaled_for_ga` and `accepts_loss_kwargs`.

`rlhf-patches rehearse -- COMMAND` [measures such a run](../rehearse.md): by which factor its gradient is too large.

[Every class of transformers](../transformers-accumulation.md) that a small configuration builds was trained, as
released and with the patch.

Not repaired: 4.46.0 to 4.48.0, where other statements are wrong; for evaluation, see `transformers-eval-loss`. The
patch cannot see your own division in a callback, an optimizer or the learning rate: remove it. Up to 4.54.1 an
incomplete last window of an epoch is divided as if it were complete; these releases do the same for models without
`**kwargs`.""",
    references=(
        "https://github.com/huggingface/transformers/issues/47688",
        "https://github.com/huggingface/transformers/pull/47690",
        "https://github.com/huggingface/transformers/pull/47836",
        "https://github.com/huggingface/transformers/issues/46731",
        "https://github.com/huggingface/transformers/issues/47261",
        "https://github.com/huggingface/transformers/pull/45349",
    ),
    variants=(
        Variant(
            Guard("transformers", ">=4.48.1,<4.49.0"),
            _changes(_IF_NOT_BELIEVED, none_is_divided=False, engine_divides=True, unless=(_ENGINE_DOES_NOT,)),
        ),
        Variant(
            Guard("transformers", ">=4.49.0,<4.53.0"),
            _changes(_IF_NOT_BELIEVED, _ENGINE_DOES_NOT, none_is_divided=False),
        ),
        Variant(Guard("transformers", ">=4.53.0,<5.2.0"), _changes(_OR_NOT_COUNTED)),
        Variant(Guard("transformers", ">=5.2.0,<5.19.0"), (*_changes(_OR_NOT_COUNTED), _ONE_DIVISION)),
        Variant(Guard("transformers", ">=5.19.0,<=5.24.0"), _changes(_UNLESS_DECLARED)),
    ),
    obsolete_when=(
        "when the oldest transformers in use checks what a forward did with num_items_in_batch; no release so far does"
    ),
    changes_numbers="""\
T5, BERT, classifiers and similar models were trained on a gradient that was multiplied by the accumulation steps and
the ranks (since 4.54.0 or 5.0.0), causal LMs in 5.2.0 to 5.5.3 on a gradient that was divided by the accumulation
steps. With the patch both have the size that one large batch gives. With Adam the tuned learning rate still fits,
unless `max_grad_norm` clipped the larger gradient, or epsilon matters. With SGD multiply the learning rate by the
factor that is gone (for causal LMs of 5.2.0 to 5.5.3, divide it). Review clipping and learning rate of a run that was
tuned without the patch; you can continue to train its checkpoints.""",
    conditions=(
        Condition("transformers.trainer:Trainer.training_step", f"{__package__}._conditions:alone", "gradient x"),
    ),
)
