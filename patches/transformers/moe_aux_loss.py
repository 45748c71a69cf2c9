"""transformers: ``Trainer`` multiplies the router's auxiliary loss by the number of ranks."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="transformers-moe-aux-loss",
    summary="the router's auxiliary loss has its configured weight on any number of ranks",
    harm="wrong gradient",
    bug="the router's auxiliary loss counts once per rank",
    when="a mixture of experts with output_router_logits, on several ranks",
    excluded_by=(
        "model_family=qwen2|qwen3|llama|mistral",
        "num_processes=1",
    ),
    symptom="""\
`Trainer`, or code that uses its `compute_loss` (TRL's SFT), trains a mixture of experts with its load-balancing loss
(`output_router_logits=True`; TRL 1.14's `SFTTrainer` switches it on by default). On 64 ranks that loss counts 64
times: the router is balanced at the cost of learning, and the logged loss is too high. No error.""",
    cause="""\
The model's loss is the sum over this rank's tokens divided by the tokens of all ranks, plus `router_aux_loss_coef`
times the auxiliary loss. Data parallelism takes the mean over ranks, so `compute_loss` multiplies by their number: the
first part needs this, the second does not. The bug occurs with `average_tokens_across_devices`, the default since
4.54.0.""",
    repair="""\
The patch subtracts the excess of the second part: coefficient times auxiliary loss times (ranks - 1). The gradient is
then that of the cross-entropy, averaged over all tokens, plus the coefficient times the mean of the ranks' auxiliary
losses (Fedus et al., Switch Transformers, 2021, equations 4 to 6). The patch acts in training and in evaluation.

The patch uses the coefficient with which the model's forward computed the loss. For forwards that are not
transformers', TRL's or Liger-Kernel's, outputs without `aux_loss` (NLLB-MoE, Switch Transformers), tuples
(`return_dict=False`), `DataParallel`, DeepSpeed's sequence parallelism and losses of your own (`compute_loss_func`,
label smoothing), nothing changes.

Under gradient accumulation the auxiliary losses of the micro-batches add up, since 4.46.0:
`transformers-accumulation-scale` repairs this.""",
    references=(
        "https://github.com/huggingface/transformers/issues/48690",
        "https://github.com/huggingface/transformers/pull/48691",
        "https://github.com/huggingface/transformers/pull/48706",
        "https://arxiv.org/abs/2101.03961",
    ),
    variants=(
        Variant(
            Guard("transformers", ">=4.46.2,<=5.24.0"),
            (
                Rewrite(
                    target="transformers.trainer:Trainer.compute_loss",
                    pattern="loss *= $FACTOR",
                    replacement=("loss = $MULTIPLIED(self, model, outputs, loss, $FACTOR, labels, num_items_in_batch)"),
                    alongside=("self.args.average_tokens_across_devices", "outputs = model(**inputs)"),
                    uses={"MULTIPLIED": f"{__package__}._router_loss:multiplied"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest transformers in use scales the cross-entropy alone; no release so far does",
    changes_numbers="""\
Since 4.54.0 (with `average_tokens_across_devices=True` since 4.46.2) the router's auxiliary loss has counted once per
data-parallel rank. With the patch it counts once. To keep the balance of a run that was tuned without the patch,
multiply `router_aux_loss_coef` by its number of ranks.""",
    conditions=(
        Condition(
            "transformers.trainer:Trainer.compute_loss", f"{__package__}._conditions:routers_of_ranks", "router loss x"
        ),
    ),
)
