"""DeepSpeed's mixture of experts with more than two experts a token: which tokens an expert takes."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="deepspeed-topk-drops",
    summary="an expert that has room takes every token that has chosen it",
    harm="wrong gradient",
    bug="tokens with negative router logits are dropped from experts that have room",
    when="DeepSpeed's MoE layer with k above 2 and drop_tokens, its default",
    excluded_by=("drop_tokens=false", "k=1|2"),
    symptom="""\
A mixture of experts on DeepSpeed's `MoE` layer with `k` of 3 or more learns little; many tokens pass no expert, or
fewer than k, although `exp_counts` is far below the capacity. It is worst where a router's logits are mostly negative:
in a test 43 choices of tokens are left then, of 229 for which experts have room. No error.""",
    cause="""\
`topkgating` lets each expert take its `capacity` tokens with the largest logits. Tokens that have not chosen it are in
that choice with 0, which is above a negative logit, and no less than one of 0, as a token of zeros has: they fill the
places, and are masked out afterwards.""",
    repair="""\
Tokens that have not chosen an expert count as minus infinity, so an expert's places go to those that have. Where an
expert is full, those with the largest logits stay, as released (0.19.0 and later go by probabilities); where every
logit that was chosen is above 0, nothing changes, bit for bit.

Left alone: `drop_policy="position"`, which `topkgating` takes and the layer never asks for; k of 1 and 2, which have
functions of their own; and a capacity above the number of tokens, which raises, as released.""",
    changes_numbers="""\
From 0.15.0 to 0.18.9 a `MoE` layer with k above 2 has dropped tokens whose logits were negative from experts that had
room, as if the capacity was smaller, and did so in evaluation too. With the patch each expert takes what its capacity
allows: outputs have more experts in them. A model that was trained without it goes on from there, but wants its
evaluation repeated, and its capacity factor looked at again.""",
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
