"""A window of megatron-core's schedules: recorded while the run trains on it, and run again with its micro-batches."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import states, window

_COUNTS = ("is_first_batch", "golden_per_param_grad_ready_counts", "per_param_grad_ready_counts")
"""What a group of buckets counts to overlap its reduction; a window of another size has other counts."""


class Window:
    """The run's own window, and replays of it.

    Args:
        schedule: megatron-core's function, as ``get_forward_backward_func`` returns it.
        named: the arguments that the run gave it.
    """

    def __init__(self, schedule: Callable[..., Any], named: dict[str, Any]) -> None:
        self._schedule, self.named = schedule, named
        model = named["model"]
        self.chunks: list[Any] = list(model) if isinstance(model, list) else [model]
        self.config = core("utils").get_model_config(self.chunks[0])
        self.size = int(named["num_microbatches"])
        self.tokens: list[float] = []
        """The numbers of tokens that the loss function returned on this rank, by micro-batch."""
        self.items: dict[tuple[int, int], list[Any]] = {}
        self._random: dict[tuple[int, int], tuple[states.Random, Any]] = {}
        self._calls: list[int] = []
        self._at = (0, 0)
        self._choice: Sequence[int] | None = None
        self.drew = False
        """Whether the forward step drew random numbers in a replay."""
        self.began = Modules([])

    # -- the run's own window

    def record(self) -> Any:
        """Run the window as the run does; what the data iterators yield is kept."""
        self.began = Modules(self.chunks)
        self._calls, self._choice = [0] * len(self.chunks), None
        return self._schedule(**{**self.named, **self._data(self._noting), "forward_step_func": self._forward_step})

    def take(self, items: dict[int, list[Any]]) -> None:
        """Have the micro-batches of another process, by their places in its window, and this process's state."""
        self.items = {(0, place): [*each] for place, each in items.items()}
        self.began = Modules(self.chunks)
        self._random = dict.fromkeys(self.items, (states.Random.now(), _tracked()))

    @property
    def reads(self) -> bool:
        """Whether this rank's forward step took something from its data iterator."""
        return any(self.items.values())

    @property
    def waits(self) -> bool:
        """Whether no gradient is reduced before the window's last micro-batch is complete."""
        groups = [group for chunk in self.chunks for group in _bucket_groups(chunk)]
        overlaps = any(chunk.ddp_config.overlap_grad_reduce for chunk in self.chunks)
        return self.config.grad_sync_func is None and not (overlaps and any(_COUNTS[0] not in vars(g) for g in groups))

    def replay(self, choice: Sequence[int], *, scaled: bool = False, reduces: bool = True) -> None:
        """Compute the gradient of a window of these micro-batches of the run's, in the model's gradient buffers.

        Args:
            choice: their places in the run's window.
            scaled: whether the loss is multiplied by `window.SCALE`.
            reduces: whether ranks reduce the gradient; else each has its own.
        """
        self._calls, self._choice = [0] * len(self.chunks), choice
        self.began.put_back()  # the window's end may have changed it, such as a router's bias
        for chunk in self.chunks:
            for group in _bucket_groups(chunk):
                fresh = dict(zip(_COUNTS, (True, {}, {}), strict=True))  # the reduction waits for the whole window
                vars(group).update({name: value for name, value in fresh.items() if name in vars(group)})
            chunk.zero_grad_buffer()
        named = {**self.named, **self._data(self._replaying), "forward_step_func": self._forward_step}
        own, timers, finalize = self.config.grad_scale_func, self.config.timers, self.config.finalize_model_grads_func
        self.config.timers = None
        if not reduces:
            self.config.finalize_model_grads_func = lambda *given, **named: None
        if scaled:
            self.config.grad_scale_func = lambda loss: window.SCALE * (loss if own is None else own(loss))
        before = len(self.tokens)
        try:
            with _calculator(self.size, len(choice)), _not_validated():
                self._schedule(**{**named, "num_microbatches": len(choice)})
                self._finalize(self.tokens[before:])
        finally:
            self.config.grad_scale_func, self.config.timers = own, timers
            self.config.finalize_model_grads_func = finalize
            del self.tokens[before:]

    def _finalize(self, tokens: list[float]) -> None:
        """Finalize the gradient if the run does so by a call of its own, after the schedule."""
        if self.config.finalize_model_grads_func is None:
            number = torch.tensor(int(sum(tokens)), device=next(self.chunks[0].parameters()).device)
            per_token = self.config.calculate_per_token_loss
            core("distributed").finalize_model_grads(self.chunks, number if per_token else None)

    # -- what the schedule calls

    def _data(self, kind: Callable[[Any, int], Any]) -> dict[str, Any]:
        given = self.named["data_iterator"]
        if isinstance(given, list):
            return {"data_iterator": [None if each is None else kind(each, at) for at, each in enumerate(given)]}
        return {"data_iterator": None if given is None else kind(given, 0)}

    def _forward_step(self, iterator: Any, model: Any, *more: Any, **named: Any) -> Any:
        """The user's function; random states are those of the micro-batch in the run's window."""
        place = next((at for at, chunk in enumerate(self.chunks) if chunk is model), 0)
        number = self._calls[place]
        self._calls[place] += 1
        if self._choice is None:
            self._at = place, number
            self.items.setdefault(self._at, [])
            self._random[self._at] = states.Random.now(), _tracked()
        else:
            self._at = place, self._choice[number]
            random, tracked = self._random[self._at]
            random.put_back()
            _track(tracked)
        output, loss_function = self.named["forward_step_func"](iterator, model, *more, **named)
        if self._choice is not None:
            self.drew |= not (states.Random.now().equals(random) and states.same(_tracked(), tracked))
        return output, loss_function if loss_function is None else self._counting(loss_function)

    def _counting(self, loss_function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*given: Any, **named: Any) -> Any:
            found = loss_function(*given, **named)
            if isinstance(found, tuple) and len(found) == 3:
                self.tokens.append(float(found[1]))
            return found

        return loss

    def _noting(self, iterator: Any, place: int) -> Any:
        return _Iterator(iterator, lambda read: self._note(read()))

    def _note(self, item: Any) -> Any:
        self.items[self._at].append(states.copy_of(item))
        return item

    def _replaying(self, iterator: Any, place: int) -> Any:
        left: list[Any] = []
        at: list[int] = []

        def take(_: Any) -> Any:
            if at != [self._calls[place]]:  # another forward step
                at[:], left[:] = [self._calls[place]], self.items[self._at]
            if not left:
                raise LookupError("the forward step takes more from its data iterator than in the run's own window")
            return states.copy_of(left.pop(0))

        return _Iterator(iterator, take)


class _Iterator:
    """An iterator in place of the user's, with its attributes. slime's has ``get_next(keys)`` and no ``__next__``."""

    def __init__(self, own: Any, take: Callable[[Callable[[], Any]], Any]) -> None:
        self._own, self._take = own, take

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self._take(lambda: next(self._own))

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._own, name)
        return own if name != "get_next" else lambda *keys, **named: self._take(lambda: own(*keys, **named))


class Modules:
    """The modules' buffers and counters, which a window may change."""

    def __init__(self, chunks: list[Any]) -> None:
        self._kept = [
            each for chunk in chunks for each in (states.Buffers(chunk.module), states.Counters(chunk.module))
        ]

    def put_back(self) -> None:
        for each in self._kept:
            each.put_back()


class Kept:
    """The state that replays change: gradients, random states, buffers, counters."""

    def __init__(self, chunks: list[Any]) -> None:
        self._random, self._tracked, self._modules = states.Random.now(), _tracked(), Modules(chunks)
        self._gradients = [(each, each.detach().clone()) for each in _gradient_buffers(chunks)]
        self._groups = [
            (group, {name: _copied(vars(group)[name]) for name in _COUNTS if name in vars(group)})
            for chunk in chunks
            for group in _bucket_groups(chunk)
        ]

    def put_back(self) -> None:
        self._modules.put_back()
        with torch.no_grad():
            for buffer, value in self._gradients:
                buffer.copy_(value)
        for group, counts in self._groups:
            vars(group).update(counts)
        self._random.put_back()
        _track(self._tracked)


def core(name: str) -> Any:
    """Return a module of megatron-core."""
    return importlib.import_module(f"megatron.core.{name}")


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _gradient_buffers(chunks: list[Any]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _tracked() -> Any:
    """The states of megatron-core's own random generators, of which tensor-parallel ranks have different ones."""
    return states.copy_of(core("tensor_parallel.random").get_cuda_rng_tracker().get_states())


def _track(tracked: Any) -> None:
    tracker = core("tensor_parallel.random").get_cuda_rng_tracker()
    if tracked or tracker.get_states():
        tracker.set_states(
            {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in tracked.items()}
        )


@contextlib.contextmanager
def _calculator(size: int, number: int) -> Iterator[None]:
    """Within the context, ``get_num_microbatches()`` returns another number, if it returned the window's."""
    module = sys.modules.get("megatron.core.num_microbatches_calculator")
    own = getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    if own is None or own.num_micro_batches != size:
        yield
        return
    own.num_micro_batches = number
    try:
        yield
    finally:
        own.num_micro_batches = size


@contextlib.contextmanager
def _not_validated() -> Iterator[None]:
    """Within the context, megatron-core does not validate losses, which it allows only in the run's own windows."""
    module = sys.modules.get("megatron.core.rerun_state_machine")
    machine = getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is None:
        yield
        return
    machine.validate_result = lambda *given, **named: None
    try:
        yield
    finally:
        del machine.validate_result
