"""ZeRO-3's Muon runs once per step, on a parameter's whole gradient, whatever its size."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_CLASS = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_UPDATE = f"{_CLASS}._apply_distributed_muon_update"
_USES = f"{__package__}._muon_of_a_step"

PATCH = Patch(
    name="deepspeed-muon-zero3",
    summary="ZeRO-3's Muon runs once per step, on each parameter's whole gradient",
    harm="wrong gradient",
    bug="ZeRO-3's Muon runs on the gradient of each micro-batch, and not at all on parameters above reduce_bucket_size",
    when='"optimizer": {"type": "Muon"}, ZeRO-3, and accumulation or a parameter above reduce_bucket_size',
    excluded_by=("zero_optimization.stage=absent|0|1|2",),
    symptom="""\
ZeRO-3 with `"optimizer": {"type": "Muon"}` trains differently from ZeRO-1 and ZeRO-2. No error is raised.

- With N accumulation steps, a step of the weights is up to N times too long, and is the sum of N updates, each from one
  micro-batch. The momentum decays N times per step.
- A matrix that is larger than `reduce_bucket_size` gets plain SGD. `"reduce_bucket_size": "auto"` of transformers is
  `hidden_size` squared, and then the matrices of every MLP are larger.""",
    cause="""\
`_apply_distributed_muon_update` replaces the gradients of a bucket by Muon's updates whenever a bucket is reduced,
before they are added to those of earlier micro-batches. A parameter that does not fit into a bucket is reduced by
another function, which does not call it. 0.19.8 has the repair.""",
    repair="""\
In a step of several micro-batches, gradients are added as for any other optimizer. `step()` then gathers the sums of
each Muon parameter that had a gradient, and calls the release's own function once, after the check for overflows and
before the norm, as 0.19.8 does. For a parameter above `reduce_bucket_size` it does so in every step. In a step of one
micro-batch, all other parameters get their update where they got it, and the same numbers.

Between `backward()` and `step()`, `safe_get_full_grad` then returns the gradient and not Muon's update. A sum is
rounded to the parameter's dtype before Muon gets it, as the release rounds each micro-batch. The patch does not repair
an optimizer on the CPU or on NVMe, ZenFlow, MiCS, or a subclass or functions of your own in place of DeepSpeed's.
Several `backward()` calls in one step at an accumulation boundary, as with `"gradient_accumulation_steps": 1`, are not
repaired either: Muon has run when the second call shows them. fp16 is not repaired: up to 0.19.7, ZeRO divides Muon's
updates by the loss scale, so that matrices hardly move.""",
    changes_numbers="""\
With N accumulation steps, ZeRO-3's Muon moved weights up to N times too far per step; matrices above
`reduce_bucket_size` moved by SGD, which is hardly at all. With the patch, the learning rate means what it means with
ZeRO-2. If you tuned a run with accumulation, check its learning rate again, and begin at N times the old one. The
momentum in checkpoints has the same name and shape; training can continue from them, and some steps later it is the
new one. A run in progress may also finish with the patch disabled.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8443",
        "https://github.com/deepspeedai/DeepSpeed/pull/8600",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.18.9,<0.19.8"),
            (
                Rewrite(
                    target=_UPDATE,
                    pattern="self.ipg_buckets[communication_data_type].params",
                    replacement="$OF_A_BUCKET(self, self.ipg_buckets[communication_data_type].params)",
                    uses={"OF_A_BUCKET": f"{_USES}:of_a_bucket"},
                ),
                Rewrite(
                    target=f"{_CLASS}.partition_grads",
                    pattern="offload_fp32_offsets = {}",
                    replacement="offload_fp32_offsets = {}; $REDUCED(self, params_to_release)",
                    uses={"REDUCED": f"{_USES}:reduced"},
                ),
                Rewrite(
                    target=f"{_CLASS}.step",
                    pattern="self._pre_step()",
                    replacement="$ENDED(self); self._pre_step()",
                    uses={"ENDED": f"{_USES}:ended"},
                ),
                Rewrite(
                    target=f"{_CLASS}.step",
                    pattern="norm_groups = self._get_norm_groups()",
                    replacement="$ORTHOGONALIZE(self); norm_groups = self._get_norm_groups()",
                    uses={"ORTHOGONALIZE": f"{_USES}:orthogonalize"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.8",
    conditions=(Condition(f"{_CLASS}.partition_grads", f"{__package__}._muon_conditions:orthogonalizes_parts"),),
)
