"""Which tokens an expert takes in DeepSpeed's mixture of experts with more than two experts per token."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="deepspeed-topk-drops",
    summary="an expert with free capacity takes every token that chose it",
    harm="wrong gradient",
    bug="experts drop tokens with negative router logits although they have free capacity",
    when="DeepSpeed's MoE layer with k above 2 and drop_tokens, its default",
    excluded_by=(
        "drop_tokens=false",
        "model_family=qwen2|qwen3|llama|mistral",
    ),
    symptom="""\
A mixture of experts with DeepSpeed's `MoE` layer and `k` of 3 or more learns little. Many tokens pass through fewer
than k experts, or through none, although `exp_counts` is far below the capacity. The effect is largest when most of a
router's logits are negative: in a test, 43 of 229 choices that fit the capacity remain. With many experts, such as 64
and `k` of 4, chosen logits are above 0, and nothing is lost. No error is raised.""",
    cause="""\
`topkgating` lets each expert take its `capacity` tokens with the largest logits. Tokens that did not choose the expert
take part with a logit of 0. This is larger than a negative logit, and not less than a logit of 0, which a token of
zeros has. These tokens fill the places and are masked out afterwards.""",
    repair="""\
Tokens that did not choose an expert have a logit of minus infinity, so the expert's places go to tokens that chose it.
When an expert is full, it keeps the tokens with the largest logits, as released (0.19.0 and later use probabilities).
If every chosen logit is above 0, results are bitwise identical.

The patch does not change `drop_policy="position"`, which `topkgating` accepts and the layer never uses, or k of 1 and
2, which have their own functions. A capacity above the number of tokens raises, as released.""",
    changes_numbers="""\
From 0.15.0 to 0.18.9, a `MoE` layer with k above 2 dropped tokens with negative logits from experts that had free
capacity, as if the capacity was smaller, in evaluation too. With the patch, each expert takes what its capacity allows,
so more experts contribute to the outputs. Training of an existing model can continue. Repeat its evaluation, and check
its capacity factor again.""",
    references=("https://github.com/deepspeedai/DeepSpeed/pull/7986",),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.15.0,<0.19.0"),
            (
                Rewrite(
                    target="deepspeed.moe.sharded_moe:topkgating",
                    pattern="torch.zeros_like(logits).scatter(1, top_idx, top_gate)",
                    alongside=("top_gate, top_idx = torch.topk(logits, k=k, dim=1)",),
                    replacement="torch.full_like(logits, float('-inf')).scatter(1, top_idx, top_gate)",
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.0",
    conditions=(Condition("deepspeed.moe.sharded_moe:topkgating", f"{__package__}._conditions:drops_by_logits"),),
)
