"""PEFT's LoRA in its variants on a small language model: what is done with an adapter, and a step with a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer

NAMES = (
    "lora",
    "rslora",
    "dora",
    "dora-conv1d",
    "lora-bias",
    "embedding",
    "tied",
    "modules-to-save",
    "patterns",
    "bias",
)
REFUSALS = ("supports only 1 adapter with bias", "Only one adapter can be set at a time")
"""What PEFT says where it has no second adapter."""


@trainer(*(f"peft/{name}" for name in NAMES))
def adapter(*, name: str, adapter: str = "random", done: Sequence[str] = (), dtype: str = "float32") -> Outcome:
    """Output, loss, gradient, switches and base weights, once all that is to be done is done."""
    from hunt import lora

    found: dict[str, Any] = {}
    model: Any = lora.base(name, dtype) if adapter == "none" else lora.policy(name, dtype, adapter == "fresh")
    for each in done:
        try:
            model = lora.DOING[each](model, name, found) or model
        except ValueError as error:
            if any(refusal in str(error) for refusal in REFUSALS):
                raise CannotRun(str(error)) from error
            raise
    return lora.of(model, found)


@trainer("peft/margin")
def margin(*, fsdp: int | None = None, ranks: int = 1, reference: str = "second") -> Outcome:
    """A step of a policy whose reference is itself without the adapter, first or second, sharded by torch or not."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from hunt import loops, lora

    peft = lora.policy("modules-to-save", "float32" if fsdp else "float64")
    if fsdp is None:
        loss = lora.margin(peft, peft, lora.tokens(), reference)
        loss.backward()
        return {"loss": {"step 0": loss}, "gradient": lora.gradients(peft)}
    torch.distributed.init_process_group("gloo")
    model = FullyShardedDataParallel(
        peft, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True, device_id=torch.device("cpu")
    )
    mine = lora.tokens().unflatten(0, (ranks, -1))[torch.distributed.get_rank()]
    loss = lora.margin(model, peft, mine, reference)
    loss.backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return {"loss": {"step 0": loops.mean_over_ranks(loss)}, "gradient": lora.gradients(model)}
