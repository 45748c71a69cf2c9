"""ZeRO-1 with bfloat16 parameters and gradients accumulated in float32 reduces the last micro-batch too."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "deepspeed-zero1-last-micro-batch"
_EPILOGUE = "deepspeed.runtime.engine:DeepSpeedEngine._backward_epilogue"
_UPSTREAM = "bf16_optimizer = isinstance(self.optimizer, BF16_Optimizer)"


_OF_ENGINE = (
    "allreduce_gradients",
    "buffered_allreduce_fallback",
    "_reduce_non_expert_gradients",
    "_reduce_expert_gradients",
)
_OF_OPTIMIZER = ("get_grads_for_reduction", "update_hp_grads", "backward_epilogue", "clear_lp_grads")


def comes_first(engine: Any) -> bool:
    """Whether DeepSpeed's own functions add and reduce the gradients, over several ranks.

    A user's may add the last micro-batch itself. One rank has nothing to reduce, and the order is right as released.
    """
    if max(getattr(engine.optimizer, "partition_count", ()), default=0) == 1:
        return False
    own = replaced(engine)
    if own:
        _released.stays(_NAME, f"{own} is not DeepSpeed's own", "the gradient")
    return not own


def replaced(engine: Any) -> str:
    """The name of the first function that adds or reduces gradients and is not DeepSpeed's; empty if all are."""
    packages = ("deepspeed", "torch")  # torch.no_grad() decorates some of them
    return _released.others(engine, *_OF_ENGINE, packages=packages) or _released.others(
        engine.optimizer, *_OF_OPTIMIZER, packages=packages
    )


_USES = {"COMES_FIRST": f"{__name__}:{comes_first.__name__}"}

PATCH = Patch(
    name=_NAME,
    summary="ZeRO-1 with float32 accumulation of bfloat16 gradients averages all micro-batches over the ranks",
    harm="wrong gradient",
    bug="ZeRO-1 uses each rank's own gradient of the last micro-batch, not the mean over the ranks",
    when="ZeRO-1 without offload, bf16, and data_types.grad_accum_dtype fp32",
    excluded_by=("zero_optimization.stage=2|3",),
    symptom="""\
ZeRO-1 with `bf16` and `"data_types": {"grad_accum_dtype": "fp32"}`, without offload: each rank uses its own gradient of
a step's last micro-batch, not the mean over the ranks. Without gradient accumulation this is the whole step: each rank
updates its part of the parameters from its own data. No error is raised. Losses and gradient norms drift from those of
ZeRO-2, and depend on how the same batch is split into micro-batches.""",
    cause="""\
`BF16_Optimizer` adds the bfloat16 gradients to the float32 gradients in its `backward_epilogue()`. The engine calls
this function after `allreduce_gradients()`, so it adds the last micro-batch of a step after the reduction. Before
0.18.3, the optimizer's `backward()` added the last micro-batch. 0.18.3 and 0.18.4 have the wrong order too, but choose
another optimizer for this configuration (`FP16_UnfusedOptimizer`, whose loss scale prevents any training): the patch is
applied, and changes nothing.""",
    repair="""\
The epilogue of `BF16_Optimizer` runs before the gradients are reduced, as in 0.19.0. The patch does not change when the
epilogues of other optimizers run, or `exit_backward()`. It changes nothing if `allreduce_gradients`, or another
function of the engine or of its optimizer that adds or reduces these gradients, is not DeepSpeed's own: such a function
may add the last micro-batch itself. Rank 0 then logs one warning that names the function. With one data-parallel rank
the released order is right, and stays.""",
    changes_numbers="""\
Since DeepSpeed 0.18.5, ZeRO-1 with bfloat16 parameters and float32 accumulation used one rank's gradient of the last
micro-batch of each step instead of the mean over all ranks. With the patch, gradients are less noisy and their norms
lower: with one micro-batch per step on N ranks, as from N times the data. If you tuned a run without the patch, check
its learning rate again. Checkpoints reflect the gradients they were trained on; training can continue from them.""",
    references=("https://github.com/deepspeedai/DeepSpeed/pull/7985",),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.18.3,<0.19.0"),
            (
                Rewrite(
                    target=_EPILOGUE,
                    pattern="self._start_timers(self.engine_timers.backward_reduce_timers)",
                    replacement=(
                        "self._start_timers(self.engine_timers.backward_reduce_timers); "
                        "isinstance(self.optimizer, BF16_Optimizer) and $COMES_FIRST(self) "
                        "and self.optimizer.backward_epilogue()"
                    ),
                    alongside=("self.allreduce_gradients()",),
                    unless=(_UPSTREAM,),
                    uses=_USES,
                ),
                Rewrite(
                    target=_EPILOGUE,
                    pattern="self.optimizer.backward_epilogue()",
                    replacement=(
                        "isinstance(self.optimizer, BF16_Optimizer) and $COMES_FIRST(self) "
                        "or self.optimizer.backward_epilogue()"
                    ),
                    unless=(_UPSTREAM,),
                    uses=_USES,
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.0",
    conditions=(Condition(_EPILOGUE, f"{__package__}._conditions:reduces_before_it_adds"),),
)
