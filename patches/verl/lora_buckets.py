"""verl's LoRA adapters that are sent in several buckets: the engine gets all of them at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def received(receive: Callable[..., Any], update: Callable[[list[Any]], Any], adapter: Any) -> None:
    """``receive(on_bucket_received=update)``; of an adapter ``update`` gets all tensors, once they are there.

    Args:
        receive: calls what it is given with each bucket, a list of names and tensors.
        update: gives the engine what it is called with.
        adapter: true if the tensors are those of an adapter.
    """
    if not adapter:
        receive(on_bucket_received=update)
        return
    tensors: list[Any] = []
    # The buffer that they are views of is written again for the next bucket.
    receive(on_bucket_received=lambda bucket: tensors.extend((name, tensor.clone()) for name, tensor in bucket))
    update(tensors)
    # What is mapped next is the engine's KV cache, which gets nothing that torch keeps. The receiver, which empties the
    # device's cache itself, has done so by now.
    tensors.clear()
    device = importlib.import_module("verl.utils.device").get_torch_device()
    if hasattr(device, "empty_cache"):  # torch.cpu has none
        device.empty_cache()


_CALL = "lambda weights: self._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)"

PATCH = Patch(
    name="verl-lora-buckets",
    summary="a LoRA adapter that is sent in several buckets reaches vLLM whole",
    harm="wrong data",
    affects_rollouts=True,
    bug="vLLM samples with the first bucket's part of the adapter, and the base model elsewhere",
    when="vLLM with LoRA that is not merged, and an adapter larger than update_weights_bucket_megabytes",
    excluded_by=("actor_rollout_ref.model.lora.merge=true",),
    symptom="""\
With LoRA and `lora.merge=False`, once the adapter is larger than `update_weights_bucket_megabytes` (2048 by default, a
few hundred in some recipes), rollouts come from a policy that has only some of its LoRA layers, after every update; the
gap between the trainer's log-probabilities and the engine's (`training/rollout_probs_diff_mean`) grows with training.
No error.""",
    cause="""\
The engine's worker calls `add_lora` with each bucket, under one id. vLLM loads an adapter whose id it knows already
no second time: all but the first bucket are lost.""",
    repair="""\
The tensors of an adapter are copied out of the buckets, and `add_lora` is called once, with all of them, as in 0.9.0.
They are in the worker's memory together until then. Weights that are no adapter's are loaded bucket by bucket, as
before.""",
    changes_numbers="""\
In verl 0.7.1 and 0.8.0 runs with an adapter larger than a bucket were trained on samples of another policy. With the
patch they are on-policy. A run that is resumed goes on with samples of its own.""",
    references=(
        "https://github.com/verl-project/verl/pull/6688",
        "https://github.com/verl-project/verl/pull/7327",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.1,<0.9.0"),
            (
                Rewrite(
                    target=(
                        "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension.update_weights_from_ipc"
                    ),
                    pattern=f"receiver.receive_weights(on_bucket_received={_CALL})",
                    replacement=f"$RECEIVED(receiver.receive_weights, {_CALL}, peft_config and base_sync_done)",
                    uses={"RECEIVED": f"{__name__}:{received.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
)
