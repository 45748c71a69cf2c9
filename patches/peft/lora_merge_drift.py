"""PEFT's LoRA: each merge and unmerge rounds the base weights."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

_LINEAR = "peft.tuners.lora.layer:Linear"

PATCH = Patch(
    name="peft-lora-merge-drift",
    summary="base weights in bf16 or fp16 are the same, bit for bit, after a LoRA adapter was merged and unmerged",
    harm="wrong weights",
    bug="frozen base weights change with every merge and unmerge of an adapter",
    when="LoRA on a model in bfloat16 or float16, and merge_adapter() at each synchronization with vLLM",
    excluded_by=("use_peft=false|absent",),
    symptom="""\
The bug affects RLHF with LoRA on a model in bfloat16, if the trainer sends weights to vLLM by `merge_adapter()` and
`unmerge_adapter()` (TRL, ms-swift). The frozen base weights change slightly with every synchronization, without an
error. After 100 synchronizations they have changed by 0.6 to 3 % of their mean size (measured here; more with larger
adapters). The change affects the trained model, the reference (the same weights without the adapter) and the saved
adapter: loaded onto the original model, the adapter gives a different policy from the evaluated one.""",
    cause="""\
`Linear.merge` adds the adapter's product to the weight and rounds the sum to the weight's dtype; `Linear.unmerge`
subtracts the product and rounds again. The second rounding does not recover what the first one dropped.""",
    repair="""\
`merge` keeps a copy of the weight. `unmerge` restores the copy if nothing but the merge has changed the weight since.
To check this, it merges the same adapters into the copy again: the result must be the present weight, bit for bit.
PEFT's own `unmerge` runs in these cases:

- the weight, the adapter or its scaling has changed in between;
- DoRA, another variant or `lora_bias` is merged;
- the weight is quantized, in float32, a shard (DTensor), or partitioned by ZeRO-3, which drops merged weights itself;
- the adapter is one of an embedding, a convolution or `target_parameters`;
- there is no memory for the copy.

`merge_and_unload` makes no copy, since its result cannot be unmerged. The merged weights, which vLLM gets, are
unchanged. `rlhf_patches.report()` counts the layers that were unmerged in each of the two ways.

**Memory:** while an adapter is merged, a second copy of the layers' weights, 2 bytes per number, in *host* memory on
every rank that merges (15 GB for 7 billion adapted parameters), and two more copies of a layer's weight on its own
device during its `unmerge`. **Time:** a copy to the host and back each time.

Not repaired: an exception between the two calls leaves the adapter merged, because the callers do not call `unmerge`
then. PEFT 0.6 has the bug too.""",
    references=(
        "https://github.com/huggingface/trl/issues/6688",
        "https://github.com/modelscope/ms-swift/issues/10154",
    ),
    variants=(
        Variant(
            Guard("peft", ">=0.7.0,<=0.21.2"),
            (
                Wrap(
                    target=f"{_LINEAR}.merge",
                    implementation=f"{__package__}._base_weights:merging",
                    fingerprints={
                        "a19839d2bbbcf3a2": "0.7.0 to 0.8.1",
                        "421c362526b5fad8": "0.8.2",
                        "8f05325679df36e8": "0.9.0: DoRA",
                        "e1b65b872c5b7bd9": "0.10.0",
                        "c8084a6111db891d": "0.11.0 to 0.11.1",
                        "bd18347bdf79457f": "0.12.0 to 0.13.2",
                        "7e38470d9c244f2b": "0.14.0 to 0.15.2: lora_bias",
                        "10fd0892206862f1": "0.16.0 to 0.17.1: variants",
                        "9947fa49a8990ebd": "0.18.0rc0 to 0.20.0",
                        "51f15b0f10d1dc3f": "0.21.0 to 0.21.2",
                    },
                ),
                Wrap(
                    target=f"{_LINEAR}.unmerge",
                    implementation=f"{__package__}._base_weights:unmerging",
                    fingerprints={
                        "f94441219986c1a4": "0.7.0 to 0.8.2",
                        "f5782b7e8e4c7fc8": "0.9.0 to 0.11.1",
                        "042630b3be765c39": "0.12.0 to 0.13.2",
                        "973472f1c1808461": "0.14.0 to 0.15.2",
                        "6b56bf7bea0a9325": "0.16.0 to 0.21.2",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest PEFT in use unmerges exactly; no release so far does",
    observations=f"{__package__}._base_weights:observed",
    changes_numbers="""\
In every release since 0.6 each weight synchronization has changed half-precision base weights at random. An adapter
from such a run was trained on weights that no longer exist: loaded onto the original model it computes other outputs
than in training. Evaluate it again, and continue its training if it is worse.""",
    conditions=(Condition(f"{_LINEAR}.unmerge"),),
)
