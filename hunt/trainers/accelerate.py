"""A loop of one's own with accelerate's Accelerator, on gloo ranks: steps, resumed epochs, and what metrics are of."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer


def accelerator(fsdp: int | None, precision: str, efficient: bool = False, **options: Any) -> Any:
    """As on GPUs: on CPU ranks accelerate never chooses FSDP."""
    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    torch.set_num_threads(1)
    made = Accelerator(cpu=True, mixed_precision=precision, **options)
    if fsdp:
        # FSDP1 has to be told where an optimizer is made before the model is sharded.
        own = {"use_orig_params": True} if fsdp == 1 else {}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp, cpu_ram_efficient_loading=efficient, **own)
        if precision != "no":
            plugin.set_mixed_precision(precision)
        # FSDP1 does not take "cpu:0" for "cpu".
        for state in (made.state, PartialState()):
            state._shared_state.update(
                distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, device=torch.device("cpu")
            )
    return made


def full(tensor: Any) -> Any:
    """Of all ranks, where it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@trainer("accelerate/loop")
def loop(
    *,
    fsdp: int | None = None,
    ranks: int = 1,
    accumulation: int = 1,
    groups: str = "one",
    schedule: str | None = None,
    rare: str = "all",
    dtype: str = "float32",
    precision: str = "no",
    efficient: bool = False,
    quantized: bool = False,
) -> Outcome:
    """By the definition if ``fsdp`` is None; 0 is DDP. With ``efficient`` loading only rank 0 has the weights."""
    from hunt import loops

    if fsdp is None:
        return loops.by_definition(groups=groups, schedule=schedule, rare=rare, dtype=dtype, quantized=quantized)
    from accelerate import DistributedDataParallelKwargs

    unused = DistributedDataParallelKwargs(find_unused_parameters=rare != "all")
    made = accelerator(fsdp, precision, efficient, gradient_accumulation_steps=accumulation, kwargs_handlers=[unused])
    whole_model = loops.model(groups, dtype, quantized)
    if efficient and made.process_index:
        for layer in (whole_model.first, whole_model.rare):
            layer.weight.data.zero_()
    sgd = loops.optimizer(whole_model, groups, dtype)
    falling = loops.scheduler(sgd, schedule)
    model, optimizer = made.prepare(whole_model, sgd)

    def whole() -> dict[str, Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model) if fsdp == 1 else contextlib.nullcontext():
            return {
                name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): full(each).detach().clone()
                for name, each in model.named_parameters()
            }

    kept = loops.Kept(whole(), dtype)
    for batch in loops.batches(rare, getattr(loops.torch, dtype if precision == "no" else "float32")):
        losses = []
        for micro_batch in loops.micro_batches(batch, accumulation, made.process_index, ranks):
            with made.accumulate(model):
                losses.append(loss := loops.loss_of(model, *micro_batch))
                made.backward(loss)
                norm = made.clip_grad_norm_(model.parameters(), 1e9) if made.sync_gradients else None
                optimizer.step()
                optimizer.zero_grad()
        if falling:
            falling.step()
        rates = [group["lr"] for group in sgd.param_groups if group["params"]]
        kept.step(whole(), loops.mean_over_ranks(sum(losses) / accumulation), rates, full(norm))
    return kept.found


def loaded(rows: int, micro_batch: int, shuffled: bool) -> tuple[Any, Any]:
    """An Accelerator, and a loader of the numbers up to ``rows``, with a sampler that has a seed."""
    import torch
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(3)
    chosen = accelerator(None, "no", dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    data = torch.arange(rows).reshape(-1, 1)
    return chosen, chosen.prepare(torch.utils.data.DataLoader(data, batch_size=micro_batch, shuffle=shuffled))


@trainer("accelerate/metrics")
def metrics(*, evaluated: int = 5, ranks: int = 1, micro_batch: int = 1) -> Outcome:
    """Which samples a metric is of; the process group has ``ranks``."""
    import torch

    if micro_batch != 1:
        raise CannotRun("it trains nothing: its samples are looked at one by one")
    chosen, batches = loaded(evaluated, micro_batch, shuffled=False)
    found = torch.cat([chosen.gather_for_metrics(batch).flatten() for batch in batches])
    return {"metrics": {"samples": found.sort().values}}


@trainer("accelerate/loader")
def loader(
    *, rows: int = 8, micro_batch: int = 2, steps: int = 4, resume_at: int | None = None, dropout: float = 0.0
) -> Outcome:
    """Which samples a loop gets from a shuffled loader, epoch by epoch; there is no model to have ``dropout``."""
    seen: list[Any] = []

    def go_on(chosen: Any, batches: Any, stop: int) -> None:
        start = len(seen)
        for epoch in range(start // len(batches), -(-stop // len(batches))):
            batches.set_epoch(epoch)
            skipped = max(0, start - epoch * len(batches))
            for batch in chosen.skip_first_batches(batches, skipped) if skipped else batches:
                if len(seen) == stop:
                    return
                seen.append(batch.flatten())

    chosen, batches = loaded(rows, micro_batch, shuffled=True)
    go_on(chosen, batches, resume_at or steps)
    if resume_at is not None:
        with tempfile.TemporaryDirectory() as folder:
            chosen.save_state(folder)
            chosen, batches = loaded(rows, micro_batch, shuffled=True)
            chosen.load_state(folder)
        go_on(chosen, batches, steps)
    return {"samples": {f"batch {number}": batch for number, batch in enumerate(seen)}}
