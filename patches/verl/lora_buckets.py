"""verl's LoRA adapters that are sent in several buckets: load all of their tensors in one call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released


def received(receive: Callable[..., Any], update: Callable[[list[Any]], Any], adapter: Any) -> None:
    """``receive(on_bucket_received=update)``; for an adapter, call ``update`` once with the tensors of all buckets.

    Args:
        receive: calls its argument with each bucket, a list of names and tensors.
        update: loads its argument into the engine.
        adapter: true if the tensors belong to an adapter.
    """
    if not adapter or _is_replaced(update):
        receive(on_bucket_received=update)
        return
    tensors: list[Any] = []
    sizes: list[int] = []

    def copied(bucket: Any) -> None:
        # The tensors are views of a buffer, which the next bucket overwrites.
        before = len(tensors)
        tensors.extend((name, tensor.clone()) for name, tensor in dict(bucket).items())
        sizes.append(len(tensors) - before)

    receive(on_bucket_received=copied)
    rlhf_patches.decided(PATCH.name, len([*filter(None, sizes)]) > 1)
    if not tensors:
        return
    update(tensors)
    # The engine maps its KV cache next, and cannot use memory that torch caches. The receiver, which empties the
    # device's cache itself, has already done so.
    tensors.clear()
    device = importlib.import_module("verl.utils.device").get_torch_device()
    if hasattr(device, "empty_cache"):  # torch.cpu has none
        device.empty_cache()


def _is_replaced(update: Any) -> bool:
    """Whether a user's function loads the tensors, which may add up the buckets itself."""
    # known: the rewritten call passes a lambda of verl's, whose `self` is the worker's extension
    own = dict(zip(update.__code__.co_freevars, update.__closure__ or (), strict=True)).get("self")
    other = own and _released.others(own.cell_contents, "_update_weights", packages=("verl",))
    if other:
        _released.stays(PATCH.name, f"{other} is not verl's own", "the adapter")
    return bool(other)


_TARGET = "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension.update_weights_from_ipc"
_CALL = "lambda weights: self._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)"

PATCH = Patch(
    name="verl-lora-buckets",
    summary="vLLM loads the whole LoRA adapter when it is sent in several buckets",
    harm="wrong data",
    affects_rollouts=True,
    bug="vLLM samples with the first bucket's part of the adapter, and with the base model in the other layers",
    when="vLLM with unmerged LoRA, and an adapter larger than update_weights_bucket_megabytes",
    excluded_by=("actor_rollout_ref.model.lora.merge=true",),
    symptom="""\
With LoRA and `lora.merge=False`, once the adapter is larger than `update_weights_bucket_megabytes` (2048 by default, a
few hundred in some recipes), rollouts come from a policy that has only some of its LoRA layers, after every update. The
gap between the trainer's log-probabilities and the engine's (`training/rollout_probs_diff_mean`) grows with training.
There is no error.""",
    cause="""\
The engine's worker calls `add_lora` with each bucket, under one id. vLLM does not load an adapter again under an id
that it already knows, so all buckets but the first are lost.""",
    repair="""\
The patch copies the tensors of an adapter out of the buckets and calls `add_lora` once with all of them, as in 0.9.0.
Until this call all copies are in the worker's memory. A worker whose `_update_weights` is not verl's own gets the
buckets as released, because it may add them up itself; rank 0 logs one warning. Weights that do not belong to an
adapter are loaded bucket by bucket, as before.""",
    changes_numbers="""\
In verl 0.7.1 and 0.8.0, runs with an adapter larger than a bucket were trained on samples of another policy. With the
patch they are on-policy. A resumed run continues with samples of its own policy.""",
    references=(
        "https://github.com/verl-project/verl/pull/6688",
        "https://github.com/verl-project/verl/pull/7327",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.1,<0.9.0"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern=f"receiver.receive_weights(on_bucket_received={_CALL})",
                    replacement=f"$RECEIVED(receiver.receive_weights, {_CALL}, peft_config and base_sync_done)",
                    uses={"RECEIVED": f"{__name__}:{received.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
    conditions=(Condition(_TARGET, f"{__package__}._conditions:loads_weights"),),
)
