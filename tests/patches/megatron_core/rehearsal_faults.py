"""Faults of a training on megatron-core, and right things that frameworks do, for rehearsals of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import package_info, parallel_state
from megatron.core import rerun_state_machine as rerun
from megatron.core.distributed import DistributedDataParallel

if TYPE_CHECKING:
    from tests.patches.megatron_core.rehearsal_ranks import Training


def _clears(training: Training) -> None:
    """The forward step clears the gradient."""
    own = training.forward_step

    def forward_step(iterator: Any, model: Any) -> Any:
        model.zero_grad_buffer()
        return own(iterator, model)

    training.forward_step = forward_step  # type: ignore[method-assign]


def _unreduced(training: Training) -> None:
    """Nothing averages the gradient over ranks."""
    training.chunks[0].config.finalize_model_grads_func = lambda *given, **named: None


def _summed(training: Training) -> None:
    """The gradient is the sum over ranks."""
    for group in training.chunks[0].bucket_groups:
        for bucket in group.buckets:
            bucket.gradient_scaling_factor = 1.0


def _lacks(training: Training) -> None:
    """A parameter is not in the optimizer."""
    training.optimizer.param_groups[0]["params"].pop()


def _draws(training: Training) -> None:
    """The loss has a random number of its own."""
    own, generator = training.forward_step, torch.Generator().manual_seed(3)

    def forward_step(iterator: Any, model: Any) -> Any:
        output, loss = own(iterator, model)
        times = 1 + torch.rand((), generator=generator)
        return output, lambda given: (loss(given)[0] * times, {})

    training.forward_step = forward_step  # type: ignore[method-assign]


def _own_data(training: Training) -> None:
    """The forward step has data from elsewhere."""
    own, batches = training.forward_step, iter(training._batches())
    training.forward_step = lambda iterator, model: own(batches, model)  # type: ignore[method-assign]


def _own_norm(training: Training) -> None:
    """An optimizer of the user's own computes half of the norm."""
    for each in getattr(training.optimizer, "chained_optimizers", [training.optimizer]):
        own = each.get_main_grads_for_grad_norm
        each.get_main_grads_for_grad_norm = lambda own=own: own()[::2]


def _another_release(training: Training) -> None:
    package_info.VERSION = (0, 20, 0, "")


def _8_bits(training: Training) -> None:
    training.chunks[0].config.fp8 = "hybrid"


def _another_wrapper(training: Training) -> None:
    training.chunks[0].__class__ = type("Mine", (DistributedDataParallel,), {})


def _twice(training: Training) -> None:
    """Two windows of the schedule's before a step."""
    own = training.step

    def step(schedule: Callable[..., Any]) -> Any:
        def both(**named: Any) -> None:
            schedule(**named)
            schedule(**named)

        return own(both)

    training.step = step  # type: ignore[method-assign]


def _another_optimizer(training: Training) -> None:
    leaf = training.optimizer.chained_optimizers[0]
    leaf.__class__ = type("Mine", (type(leaf),), {})


def _unmarked(training: Training) -> None:
    """Nothing sums a layer norm's gradient over the ranks that divide the sequence."""
    training.chunks[0].module.decoder.layers[1].input_layernorm.weight.sequence_parallel = False


def _divided(training: Training) -> None:
    """The user's loss is divided by the number of tensor-parallel ranks, once too often."""
    own, number = training.forward_step, parallel_state.get_tensor_model_parallel_world_size()

    def forward_step(iterator: Any, model: Any) -> Any:
        output, loss = own(iterator, model)
        return output, lambda given: (loss(given)[0] / number, {})

    training.forward_step = forward_step  # type: ignore[method-assign]


def _summed_over_ranks(training: Training) -> None:
    """As slime's: the user's loss is a sum over micro-batches and data-parallel ranks, divided by a number of rows."""
    own, number = training.forward_step, training.case.micro_batches
    ranks = parallel_state.get_data_parallel_world_size()
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, number * (ranks if number % ranks else 1), 1, ranks)
    training.case = dataclasses.replace(training.case, micro_batches=calculator.get_num_microbatches())

    def forward_step(iterator: Any, model: Any) -> Any:
        output, loss = own(iterator, model)
        return output, lambda given: (loss(given)[0] * calculator.get_num_microbatches() * ranks / number, {})

    training.forward_step = forward_step  # type: ignore[method-assign]


def _validated(training: Training) -> None:
    """As Megatron-LM's `train_step` does: megatron-core validates the losses, and may ask for the window again."""
    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine, own, own_step = rerun.get_rerun_state_machine(), training.forward_step, training.step
    training.iterators = [rerun.RerunDataIterator(each) for each in training.iterators]

    def forward_step(iterator: Any, model: Any) -> Any:
        output, loss = own(iterator, model)

        def validated(given: Any) -> Any:
            found = loss(given)
            machine.validate_result(result=found[0], rejection_func=torch.isnan, message="NaN")
            return found

        return output, validated

    def step(schedule: Callable[..., Any]) -> Any:
        def repeated(**named: Any) -> None:
            while machine.should_run_forward_backward(named["data_iterator"]):
                schedule(**named)

        return own_step(repeated)

    training.forward_step, training.step = forward_step, step  # type: ignore[method-assign]


def _get_next(training: Training) -> None:
    """The data iterator is slime's kind: it has ``get_next(keys)`` and is no iterator."""
    own = training.forward_step

    class Rows:
        def __init__(self, batches: Iterator[Any]) -> None:
            self.batches, self.offset = batches, 0

        def get_next(self, keys: list[str]) -> dict[str, Any]:
            self.offset += 1
            batch = next(self.batches)
            return {key: batch[key] for key in keys}

    def forward_step(iterator: Any, model: Any) -> Any:
        assert iterator.offset >= 0
        return own(iter([iterator.get_next(["tokens", "counted"])]), model)

    training.iterators = [Rows(each) for each in training.iterators]  # type: ignore[misc]
    training.forward_step = forward_step  # type: ignore[method-assign]


def _wider(training: Training) -> None:
    """The script fills the vocabulary up to a multiple of the tensor-parallel ranks."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        weight = training.chunks[0].module.output_layer.weight
        own = training.chunks[0].module.output_layer.sharded_state_dict

        def larger(*given: Any, **named: Any) -> Any:
            found = own(*given, **named)
            each = found["output_layer.weight"]
            found["output_layer.weight"] = dataclasses.replace(
                each, global_shape=(each.global_shape[0] + weight.shape[0], each.global_shape[1])
            )
            return found

        training.chunks[0].module.output_layer.sharded_state_dict = larger


BREAKING: dict[str, Callable[[Training], None]] = {
    "clears": _clears,
    "unreduced": _unreduced,
    "summed": _summed,
    "lacks": _lacks,
    "draws": _draws,
    "own data": _own_data,
    "own norm": _own_norm,
    "another release": _another_release,
    "8 bits": _8_bits,
    "another wrapper": _another_wrapper,
    "twice": _twice,
    "another optimizer": _another_optimizer,
    "unmarked": _unmarked,
    "divided": _divided,
    "summed over ranks": _summed_over_ranks,
    "summed over ranks, 3": _summed_over_ranks,
    "validated": _validated,
    "get_next": _get_next,
    "wider": _wider,
}
