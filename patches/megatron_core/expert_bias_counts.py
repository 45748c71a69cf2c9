"""megatron-core: tokens per expert are counted in float32, also in a model in bf16 or fp16."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_COUNTS = f"{__package__}._expert_counts"

REWRITES = (
    Rewrite(
        target="megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias",
        pattern="hasattr(self, 'expert_bias')",
        alongside=("self.expert_bias.data = self.expert_bias.data.to(torch.float32)",),
        # Called only if there is something to do: a forward that compiled with `fullgraph=True` still compiles.
        replacement="(getattr(getattr(self, 'local_tokens_per_expert', None), 'dtype', None)"
        " not in (torch.bfloat16, torch.float16) or $KEEP(self)) and hasattr(self, 'expert_bias')",
        uses={"KEEP": f"{_COUNTS}:keep_counts"},
    ),
    Rewrite(
        # A router that has not run on this rank: all ranks sum in one precision.
        target="megatron.core.distributed.finalize_model_grads:_update_router_expert_bias",
        pattern="tokens_per_expert_list.append(module.local_tokens_per_expert)",
        replacement="tokens_per_expert_list.append($FLOAT(module.local_tokens_per_expert))",
        uses={"FLOAT": f"{_COUNTS}:in_float32"},
    ),
)

PATCH = Patch(
    name="megatron-core-expert-bias-counts",
    summary="expert biases follow the tokens that each expert got, in bf16 and fp16 as well",
    harm="wrong weights",
    bug="tokens per expert are counted in bf16 or fp16, so expert biases move in the wrong direction or not at all",
    when="moe_router_enable_expert_bias (DeepSeek-V3's balancing), and a model in bf16 or fp16",
    excluded_by=("moe_router_enable_expert_bias=false",),
    symptom="""\
With `moe_router_enable_expert_bias` and bf16, the experts of a mixture do not become balanced: the bias of an expert
that got too many tokens rises, or that of one that got too few falls. Above 256, bf16 cannot represent every count.
40840 tokens are counted as 41216 or 40704, depending on the order in which ranks are summed, and the direction depends
on it. A counter that grows in small steps stops: at 1024 in bf16, adding 3 tokens has no effect. In fp16, rounding
begins at 2048, and counters overflow to infinity above 65504. No error is raised.""",
    cause="""\
The router creates its counters in float32, and `Float16Module` converts every floating-point buffer to the model's
precision. The router puts `expert_bias` back into float32 before each forward, but not `local_tokens_per_expert`.
Micro-batches are summed in this precision, and then ranks.""",
    repair="""\
Where the router puts its expert bias back into float32, the patch does the same for its counters, and ranks are summed
in float32. A count is then exact up to 16.7 million tokens per expert and step. A bias moves by the configured rate,
not by its rounding (0.9995 of 1e-3 in bf16). The counters are in no checkpoint, and they count the same tokens as
before.

A model in float32 and a router without expert bias are not affected.""",
    changes_numbers="""\
Since megatron-core 0.12.0, with bf16 or fp16, an expert's bias could move in the wrong direction if its tokens were
within one rounding of the mean: 0.4 % of it in bf16 for each addition. With the patch, each bias follows its count. A
run that was balanced with a higher `moe_router_bias_update_rate`, or with an additional auxiliary loss, may need less
of them.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/7081",),
    # main had version 0.20.0 on 2026-08-22, and had the defect; the repair is later than that.
    variants=(Variant(Guard("megatron-core", ">=0.12.0rc2,<=0.20.0"), REWRITES),),
    obsolete_when="when the oldest megatron-core in use counts tokens in integers (PR #7081)",
    conditions=(
        Condition(
            "megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias",
            f"{__package__}._conditions:counts_in_half",
        ),
    ),
)
