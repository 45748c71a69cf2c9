"""``DistributedDataParallel.enable/disable_forward_pre_hook`` may be called twice in a row."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Signature, Variant

_CLASS = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_HANDLES = "self.remove_forward_pre_hook_handles"

PATCH = Patch(
    name="megatron-core-forward-pre-hook-reentry",
    summary="a second disable_forward_pre_hook() or enable_forward_pre_hook() no longer raises",
    harm="crash",
    bug="disabling or enabling forward pre-hooks twice raises KeyError or AssertionError",
    when="--overlap-param-gather, and training that is entered once per rollout",
    excluded_by=("overlap_param_gather=false",),
    signatures=(
        Signature("KeyError", frames=(f"{_CLASS}.disable_forward_pre_hook",)),
        Signature("AssertionError", frames=(f"{_CLASS}.enable_forward_pre_hook",)),
    ),
    symptom="""\
With `--overlap-param-gather`, training that is entered once per rollout fails at the second rollout, or at a save
between two rollouts. `disable_forward_pre_hook` raises `KeyError: GPTModel(...)`, or `enable_forward_pre_hook` raises a
bare `AssertionError` at `assert len(self.remove_forward_pre_hook_handles) == 0`.""",
    cause="""\
`DistributedDataParallel` keeps the handles of its forward pre-hooks in a dictionary. `disable_forward_pre_hook` looks
up every module in it, and `enable_forward_pre_hook` asserts that it is empty, so each may be called only in the other's
state. An RLHF trainer calls them from several independent places: slime's `train()` disables at the start and at the
end of every rollout, and its `save()` disables once more and then enables.""",
    repair="""\
`disable_forward_pre_hook` removes nothing if no hook is registered, and still synchronizes the parameters on request.
`enable_forward_pre_hook` registers nothing if every module already has its hook. A half-registered state (handles of
some modules only) raises as before, because it indicates another error.""",
    references=(
        "https://github.com/THUDM/slime/issues/1779",
        "https://github.com/THUDM/slime/pull/1857",
        "https://github.com/THUDM/slime/pull/2066",
    ),
    # main had version 0.20.0 on 2026-08-22, and had the defect; the newest tag was core_v0.19.0.
    variants=(
        Variant(
            Guard("megatron-core", ">=0.9.0,<=0.20.0"),
            (
                Rewrite(
                    target=f"{_CLASS}.disable_forward_pre_hook",
                    pattern="self.module.modules()",
                    inside="for $MODULE in self.module.modules(): $$$BODY",
                    replacement=f"(self.module.modules() if {_HANDLES} else ())",
                    alongside=(f"del {_HANDLES}[$MODULE]", f"assert len({_HANDLES}) == 0"),
                ),
                Rewrite(
                    target=f"{_CLASS}.enable_forward_pre_hook",
                    pattern=f"len({_HANDLES}) == 0",
                    inside=f"assert len({_HANDLES}) == 0",
                    replacement=f"{_HANDLES}.keys() in (set(), set(self.module.modules()))",
                ),
                Rewrite(
                    target=f"{_CLASS}.enable_forward_pre_hook",
                    pattern="self.module.modules()",
                    inside="for $MODULE in self.module.modules(): $$$BODY",
                    replacement=f"(() if {_HANDLES} else self.module.modules())",
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest megatron-core in use allows both calls in either state; none released so far does",
)
