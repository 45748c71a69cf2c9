"""PEFT: ``disable_adapter()`` raises while FSDP shows views instead of parameters."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Signature, Variant, Wrap

PATCH = Patch(
    name="peft-disable-adapter-fsdp",
    summary="adapters can be disabled and enabled while FSDP has gathered a model's parameters",
    harm="crash",
    bug="disable_adapter() raises while FSDP has gathered the parameters",
    when="FSDP1 with use_orig_params, and the policy without its adapter as the reference",
    excluded_by=(
        "fsdp_config.fsdp_version=2|absent",
        "fsdp_config.fsdp_use_orig_params=false",
        "use_peft=false|absent",
    ),
    symptom="""\
The policy without its adapter is the reference, `with model.disable_adapter():`, and the model is wrapped in FSDP1
with `use_orig_params=True`. PyTorch raises "you can only change requires_grad flags of leaf variables" if this happens
between the policy's forward and its backward pass (DPO and others that compute the reference second, with
`SHARD_GRAD_OP` or `_HYBRID_SHARD_ZERO2`), or within the forward pass of a module that FSDP has wrapped (with any
strategy).""",
    cause="""\
`enable_adapters` sets `requires_grad` of all registered parameters. While FSDP has gathered them, these are views of
its flat parameter, and a view's flag cannot be set.""",
    repair="""\
The patch sets no flags of views, as 0.19.0: the views are gone after the backward pass, and the parameters behind them
keep their flags. If entering `disable_adapter()` froze the parameters, and they are views on exit, the patch makes the
parameters behind the views trainable again; 0.19.0 leaves them frozen.

Not repaired: `set_adapter`, called by itself on views, raises as before, since the adapter could not become trainable;
and LN tuning, which has its own `enable_adapters`. FSDP2 and `use_orig_params=False` show no views.""",
    references=(
        "https://github.com/huggingface/peft/issues/1442",
        "https://github.com/huggingface/peft/issues/2977",
        "https://github.com/huggingface/peft/pull/3001",
    ),
    variants=(
        Variant(
            Guard("peft", ">=0.6.0,<0.19.0"),
            (
                Wrap(
                    target="peft.tuners.tuners_utils:BaseTunerLayer.enable_adapters",
                    implementation=f"{__package__}._requires_grad:of_leaves",
                    fingerprints={"09fece30f4ad1e70": "0.6.0 to 0.18.1"},
                ),
                Wrap(
                    target="peft.utils.other:ModulesToSaveWrapper.enable_adapters",
                    implementation=f"{__package__}._requires_grad:of_leaves",
                    fingerprints={
                        "fc16b170707bafb0": "0.6.0 to 0.14.0",
                        "09a0859a9a73b9db": "0.15.0 to 0.17.1",
                        "a5acc78407dd7ec6": "0.18.0rc0 to 0.18.1",
                    },
                ),
            ),
        ),
    ),
    signatures=(
        Signature("RuntimeError", "you can only change requires_grad flags of leaf variables", specific=False),
    ),
    obsolete_when="when the oldest PEFT in use is 0.19.0",
)
