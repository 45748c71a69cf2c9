"""transformers: ``Trainer`` believes that every forward with ``**kwargs`` divides its loss for the accumulation."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._accumulation"


def _changes(
    *condition: str, none_is_divided: bool = True, engine_divides: bool = False, unless: tuple[str, ...] = ()
) -> tuple[Rewrite, ...]:
    """Of releases whose step divides under this condition, or has these statements, and not those of ``unless``."""
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
# What 5.5.4 does by itself, and 5.2.0 to 5.5.3 do not.
_ONE_DIVISION = Rewrite(
    target="transformers.trainer:Trainer.create_accelerator_and_postprocess",
    pattern="GradientAccumulationPlugin(**grad_acc_kwargs)",
    replacement="GradientAccumulationPlugin(**{**grad_acc_kwargs, 'num_steps': 1})",
)

PATCH = Patch(
    name="transformers-accumulation-scale",
    summary="gradient accumulation above 1 or several ranks: what is no causal LM keeps its gradient's size",
    harm="wrong gradient",
    bug="the gradient is multiplied by the accumulation steps and the ranks (in 5.2.0 to 5.5.3 a causal LM's divided)",
    when="gradient accumulation or several ranks; T5, BERT, classifiers and others that take **kwargs; mixtures",
    symptom="""\
`Trainer` with `gradient_accumulation_steps` above 1 trains T5, BART, BERT (masked LM too), DeBERTa and every classifier
on a gradient that is so many times too large, and on several ranks so many times more: eight steps on eight GPUs, 64
times. Llama's and Qwen's classifiers since 4.54.0, the others since 5.0.0; with label smoothing causal LMs too, until
5.14.1; what takes `**kwargs` and is trained without `labels`, until 4.52.4; TRL 1.5's PRMTrainer and GKDTrainer. A
mixture's auxiliary loss counts once for every micro-batch. No error: the logged loss is too large by the same factor;
Adam and clipping hide the gradient's. In 5.2.0 to 5.5.3 it is the other way round: a causal LM's gradient is so many
times too **small**, and nothing shows it, while that of the others is right, and their logged loss is not.""",
    cause="""\
A forward that takes `**kwargs` is believed to divide its loss by `num_items_in_batch`, the number of tokens of all
micro-batches. So `training_step` does not divide by the number of micro-batches, and with
`average_tokens_across_devices`, the default since 4.54.0, `compute_loss` multiplies by the ranks. Most of these
forwards do nothing with that number, or only in one branch. In 5.2.0 to 5.5.3 the Accelerator is given the number of
micro-batches too, and divides every loss once more.""",
    repair="""\
It acts where all code that makes the loss is known by identity: the model's forward and what `loss_function` resolves
to are transformers' own (or Liger's, or TRL's), unreplaced, and `compute_loss` is transformers' own, hands on the very
tensor that it returned, or is one of TRL's that were read (`SFTTrainer`; `GKDTrainer` to 1.6.0, `ORPOTrainer` to
0.19.1, `DPOTrainer` and `CPOTrainer` to 0.13.0). The top of the loss's autograd graph then says what that code did: a
term that is divided by the number it was given keeps its bits, as does a sum; a mean over the micro-batch is divided
by the number of micro-batches, and not multiplied by the ranks; of an auxiliary loss beside a divided loss, the
multiples are taken off. The gradient is that of the micro-batches' mean, and so is the loss that is logged. In 5.2.0
to 5.5.3 the Accelerator divides nothing, as in 5.5.4. What is known is asked at the first micro-batch of each window.

It works with DistributedDataParallel, FSDP, DeepSpeed, PEFT, checkpointing and mixed precision.

**All else is left as released, and one line on rank 0 says so**: a model, a loss or a head of your own, a replaced
entry of `LOSS_MAPPING`, a forward hook or pre-hook outside the base model, a `training_step` of your own, which may
divide gradients, a `compute_loss` that does more than hand on, a label smoother of your own, another `backward` of the
Accelerator, a compiled model whose loss holds no `num_items_in_batch`, `torch.nn.DataParallel`, DeepSpeed's sequence
parallelism, an Accelerator that divides as well (`ACCELERATE_GRADIENT_ACCUMULATION_STEPS`). A `compute_loss_func`
divides by the number, as transformers asks of it: it is left, and nothing is said. `loss_is_scaled_for_ga` and
`accepts_loss_kwargs` mean what they say.

`rlhf-patches rehearse -- COMMAND` [measures such a run](../rehearse.md): by which factor its gradient is too large.

[Every class of transformers](../transformers-accumulation.md) that a small configuration builds was trained, as
released and with the patch.

Not repaired: 4.46.0 to 4.48.0, where other statements are wrong; in evaluation, see `transformers-eval-loss`. A
division of your own in a callback, a gradient's hook or the learning rate cannot be seen: take it out. Until 4.54.1 the
last window of an epoch counts as if it were complete, as it does there for every model that takes no `**kwargs`.""",
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
        "when the oldest transformers in use asks what a forward did with the number; none released so far does"
    ),
    changes_numbers="""\
T5, BERT, classifiers and the like were trained on a gradient that was multiplied with the accumulation steps and the
ranks (since 4.54.0 or 5.0.0), causal LMs in 5.2.0 to 5.5.3 on one that was divided by the accumulation steps. With the
patch both have the size that one large batch gives. With Adam the learning rate means what it did, but where
`max_grad_norm` cut the larger gradient off, or epsilon counts; with SGD it has to be that many times larger (smaller
for what 5.2.0 to 5.5.3 trained). Look at clipping and learning rate again in a run that was tuned with it; checkpoints
can be trained on.""",
    conditions=(
        Condition("transformers.trainer:Trainer.training_step", f"{__package__}._conditions:alone", "gradient x"),
    ),
)
