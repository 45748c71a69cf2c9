"""An advice for Muon under ZeRO-3 with a model that is built within `zero.Init`."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_FLAGS = "deepspeed:set_optimizer_flags"
_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._apply_distributed_muon_update"

ADVICE = Advice(
    name="deepspeed-muon-zero-init",
    summary="Muon is Adam for models that are built within zero.Init",
    harm="wrong gradient",
    bug="the Muon optimizer trains every matrix by Adam if the model is built within zero.Init",
    when='"optimizer": {"type": "Muon"}, ZeRO-3, and a model built within zero.Init, as from_pretrained does',
    excluded_by=("zero_optimization.stage=absent|0|1|2",),
    symptom="""\
ZeRO-3 with `"optimizer": {"type": "Muon"}`, and a model that was built within `deepspeed.zero.Init`. transformers does
so in `from_pretrained` with a ZeRO-3 configuration. Adam trains all parameters, at Muon's learning rate. In the tests,
three steps at 0.02 moved the weights 3.1 times as far as Muon does. No error is raised, and no Newton-Schulz iteration
runs.""",
    cause="""\
`set_optimizer_flags` gives Muon the parameters with two dimensions or more. Within `zero.Init` a parameter is an empty
vector, and its shape is in `ds_shape`. The bug was reproduced in 0.18.9 and 0.19.6; 0.19.7 asks for `ds_shape`. Earlier
releases refuse Muon with ZeRO-3. LoRA's matrices are built outside of `zero.Init`, and are trained by Muon.""",
    what_to_do="""\
Use DeepSpeed 0.19.8. Or use ZeRO-2, but not with fp16, in which it divides Muon's updates by the loss scale up to
0.19.7. Or build the model outside of `zero.Init`: with transformers, before `TrainingArguments` reads the DeepSpeed
configuration. Do this for new runs. A checkpoint of an affected run has Adam's state and no momentum. It does not load
where Muon is on, or its groups switch Muon off again: finish such a run as it is, or load its weights alone
(`load_optimizer_states=False`).

An affected run is reported when `deepspeed.initialize` is called. No patch repairs it, since a run that resumes would
load Adam's state into Muon.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/8438",
        "https://github.com/deepspeedai/DeepSpeed/issues/7807",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.18.9,<0.19.7"),
            (
                Shape(target=_FLAGS, pattern="p.ndim >= 2"),
                Shape(target=_STAGE3, pattern="if not self.use_muon: $$$"),  # 0.18.8 and earlier do not have it
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.7",
    conditions=(Condition(_FLAGS, f"{__package__}._muon_conditions:looks_flat"),),
)
