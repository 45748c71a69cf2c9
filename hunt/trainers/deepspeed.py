"""A loop of one's own on DeepSpeed's engine, on gloo ranks."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer


@trainer("deepspeed/engine")
def engine(
    *,
    zero: int | None = None,
    offload: bool = False,
    ranks: int = 1,
    accumulation: int = 1,
    by_hand: bool = False,
    groups: str = "one",
    schedule: str | None = None,
    rare: str = "all",
    dtype: str = "float32",
    accumulate: str | None = None,
) -> Outcome:
    """By the definition if ``zero`` is None; with ``by_hand`` the loop says itself where a step ends."""
    from hunt import loops

    if zero is None:
        return loops.by_definition(groups=groups, schedule=schedule, rare=rare, dtype=dtype)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    from rlhf_patches.patches.deepspeed.proofs import on_cpu

    if zero == 3 and deepspeed.__version__ < "0.16" and not shutil.which("numactl"):
        raise CannotRun("ZeRO-3 of this release asks the program numactl about CPUs")
    rank, low = on_cpu.start(), dtype != "float32"
    model = loops.model(groups, dtype)
    sgd = loops.optimizer(model, groups, dtype)
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    falling = loops.scheduler(sgd, schedule)
    offloaded = on_cpu.OFFLOADED if offload else {}
    made = on_cpu.engine(
        model,
        {"stage": zero, "stage3_param_persistence_threshold": 0, **offloaded},  # see `whole`
        sgd,
        gradient_accumulation_steps=1 if by_hand else accumulation,
        bf16={"enabled": low},
        data_types={"grad_accum_dtype": accumulate},
        **({"scheduler": warm_up} if schedule == "warm-up" else {}),
    )

    def whole() -> dict[str, Any]:
        named = dict(made.module.named_parameters())
        with contextlib.ExitStack() as gathered:
            for each in named.values():  # of several at once it waits for the last only, too early with gloo
                gathered.enter_context(deepspeed.zero.GatheredParameters([each], enabled=zero == 3))
            # Where masters are kept they count; ZeRO-1 finds them from the first step on.
            masters = {name: safe_get_full_fp32_param(each) for name, each in named.items() if low}
            found = {name: each if (it := masters.get(name)) is None else it for name, each in named.items()}
            return {name: each.detach().clone() for name, each in found.items()}

    kept = loops.Kept(whole(), dtype)
    for batch in loops.batches(rare, getattr(loops.torch, dtype)):
        losses = []
        for number, micro_batch in enumerate(loops.micro_batches(batch, accumulation, rank, ranks)):
            losses.append(loss := loops.loss_of(made, *micro_batch))
            last = number == accumulation - 1
            if by_hand:
                made.set_gradient_accumulation_boundary(last)
            made.backward(loss / accumulation if by_hand else loss)
            if last or not by_hand:
                made.step()
        if falling:
            falling.step()
        norm = made.get_global_grad_norm()
        rates = [group["lr"] for group in sgd.param_groups]
        kept.step(whole(), loops.mean_over_ranks(sum(losses) / accumulation), rates, norm)
    return kept.found


@trainer("deepspeed/muon")
def muon(
    *, optimizer: str = "muon", stage: int | None = None, ranks: int = 1, accumulation: int = 1, offload: bool = False
) -> Outcome:
    """What three of Muon's steps add to the weights; by the definition in float64 if ``stage`` is None."""
    import torch

    from rlhf_patches.patches.deepspeed.proofs import muon, on_cpu

    # From 0.19.3 to 0.19.7 it refuses to offload with reduce_scatter.
    offloaded = {**on_cpu.OFFLOADED, "reduce_scatter": False} if offload else {}
    case = muon.Case(stage=stage, micro_batches=accumulation, zero=offloaded)
    if stage is None:
        end = muon.exactly(case, ranks)
    else:
        muon.start()
        try:
            made = muon.engine(case, muon.fresh(case))
        except ValueError as error:
            raise CannotRun(f"this DeepSpeed has no Muon: {error}") from error
        muon.train(made, case, torch.distributed.get_rank(), ranks)
        end = muon.weights(made)
    start = torch.cat([parameter.detach().double().flatten() for parameter in muon.fresh(case).parameters()])
    return {"update": {"all steps": end - start}}


@trainer("deepspeed/half")
def half(*, half: str, stage: int | None = None, ranks: int = 1, accumulation: int = 1) -> Outcome:
    """What four steps of SGD add to a layer's weights; by the definition in float64 if ``stage`` is None."""
    from rlhf_patches.patches.deepspeed.proofs import half_precision_ranks as steps

    steps.start()
    start = steps.fresh(half).weight.detach().double()
    if stage is None:
        end = steps.exactly(start, accumulation)
    else:
        made = steps.made(half, stage, accumulation)
        steps.train(made, half, accumulation, "backward")
        end = made.module.weight.detach().double()
    return {"update": {"all steps": end - start}}
