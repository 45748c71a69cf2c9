"""Relations of a training loop beside its gradients: evaluation, autocast, the data loader's workers and rows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..definitions.words import plural
from . import labels, pieces, states
from .loop_models import Models
from .relation import Relation, Verdict

EVALUATION = "evaluation mode"
AUTOCAST = "autocast"
WORKERS = "data loader workers"
ROWS = "rows of a batch"
_ASKED = 4
_NOT_REPEATED = "two passes from the same state differ: a random generator of its own, a counter, or lost data"
_PACKED = ("position_ids", "cu_seqlens", "cu_seq_lens_q", "seq_idx", "seq_lens", "num_tokens")


class Inputs:
    """Keeps what models were last called with, by hooks on the models themselves.

    Args:
        models: the models that a loop trains.
    """

    def __init__(self, models: Models) -> None:
        self.kept: dict[torch.nn.Module, tuple[Any, Any]] = {}
        self._hooks = [
            each.register_forward_pre_hook(self._keep, with_kwargs=True)
            for each in models.roots
            if type(each).__name__ != "OptimizedModule"  # a hook would be traced
        ]

    def _keep(self, module: torch.nn.Module, given: Any, named: Any) -> None:
        if module.training and torch.is_grad_enabled() and module not in self.kept:
            self.kept[module] = states.copy_of(given), states.copy_of(named)

    def trained_on(self) -> labels.Trained | None:
        """Return what a language model was trained on; texts, if there is one tokenizer."""
        tokenizers = sys.modules.get("transformers.tokenization_utils_base")
        kind = getattr(tokenizers, "PreTrainedTokenizerBase", None)
        for _, named in self.kept.values():
            if "labels" in named:
                found = [each for each in gc.get_objects() if issubclass(type(each), kind)] if kind is not None else []
                return labels.read(named, found[0] if len(found) == 1 else None)
        return None

    def close(self) -> None:
        for each in self._hooks:
            each.remove()
        self._hooks = []


def evaluation_relation(inputs: Inputs) -> Relation | None:
    """Two forward passes in evaluation mode are equal, whatever the random state. Weights and modes are restored."""
    for root, (given, named) in inputs.kept.items():
        inner = root.module if isinstance(root, torch.nn.parallel.DistributedDataParallel) else root
        modes = [(each, each.training) for each in inner.modules()]
        random, buffers, counters = states.Random.now(), states.Buffers(inner), states.Counters(inner)
        try:
            inner.eval()
            made = [_output(inner, given, named, each) for each in (random, random, random.another())]
            if made[0] is None:
                continue
            if not _same(made[0], made[1]):
                return Relation(EVALUATION, Verdict.NOTE, "", _NOT_REPEATED)
            if _same(made[0], made[2]):
                return Relation(EVALUATION, Verdict.HOLDS, "0", "two passes with other random states are equal")
            with pieces.without_dropout(inner) as has_dropout:
                plain = [_output(inner, given, named, each) for each in (random, random.another(), random)]
            again = [_output(inner, given, named, each) for each in (random, random.another())]
            repeats = _same(made[0], again[0]) and _same(made[2], again[1])
            if has_dropout and repeats and _same(plain[0], plain[1]) and _same(plain[0], plain[2]):
                text = f"dropout stays on in {type(inner).__name__}.eval()"
                return Relation(EVALUATION, Verdict.DEVIATES, "", text)
            if not repeats:
                return Relation(EVALUATION, Verdict.NOTE, "", _NOT_REPEATED)
            return Relation(EVALUATION, Verdict.NOTE, "", "the model draws random numbers in evaluation mode")
        except Exception:  # the user's forward() may do other things in evaluation mode
            continue
        finally:
            for module, training in modes:
                module.training = training
            buffers.put_back()
            counters.put_back()
            random.put_back()
    return None


def _output(model: torch.nn.Module, given: Any, named: Any, random: states.Random) -> list[torch.Tensor] | None:
    random.put_back()
    with torch.no_grad():
        made = model(*states.copy_of(given), **states.copy_of(named))
    found = [*_tensors(made)]
    return found or None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _same(one: Sequence[torch.Tensor] | None, other: Sequence[torch.Tensor] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    return all(
        a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(one, other, strict=True)
    )


def autocast_relation(products: Mapping[bool, int], entered: bool) -> Relation | None:
    """Within autocast, matrix products are in 16 bits.

    Args:
        products: the number of matrix products in the losses' graphs, in 16 bits and in others.
        entered: whether the loop entered autocast.
    """
    total = products[True] + products[False]
    if not entered or not total:
        return None
    measured = f"{products[True]} of {total}"
    if not products[True]:
        text = "the loop enters autocast, and no matrix product is in 16 bits"
        return Relation(AUTOCAST, Verdict.DEVIATES, measured, text)
    return Relation(AUTOCAST, Verdict.HOLDS, measured, "matrix products in 16 bits")


# -- data


def data_relations(loaders: Sequence[Any]) -> list[Relation]:
    """Ask the loop's data sets for examples again; the program's own iterators are left alone."""
    found: list[Relation] = []
    for loader in loaders:
        random = states.Random.now()
        try:
            found += [each for each in (_workers(loader), _rows(loader)) if each is not None]
        except Exception:  # the user's data set
            continue
        finally:
            random.put_back()
    unique = {(each.name, each.verdict, each.text): each for each in found}
    wrong = [each for each in unique.values() if each.verdict is not Verdict.HOLDS]
    return wrong or [*unique.values()]


def _workers(loader: Any) -> Relation | None:
    """Workers draw different random numbers for the same example."""
    if loader.num_workers < 2 or loader.batch_size is None or not _has_length(loader.dataset):
        return None
    asked = torch.utils.data.DataLoader(
        loader.dataset,
        batch_size=1,
        sampler=[0] * (2 * _ASKED),
        num_workers=2,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        collate_fn=_first,
        timeout=30,
    )
    drawn = [[*_tensors(_as_tensors(each))] for each in asked]
    own, other = drawn[0::2], drawn[1::2]
    if not drawn[0] or all(_same(own[0], each) for each in own[1:]):
        return None  # it draws nothing
    if all(_same(a, b) for a, b in zip(own, other, strict=True)):
        text = "two workers draw the same random numbers: worker_init_fn gives each the same seed"
        return Relation(WORKERS, Verdict.DEVIATES, f"{loader.num_workers} workers", text)
    return Relation(WORKERS, Verdict.HOLDS, f"{loader.num_workers} workers")


def _first(examples: Sequence[Any]) -> Any:
    return examples[0]


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tensors(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_tensors(each) for each in value]
    return torch.as_tensor(value) if isinstance(value, (int, float)) or hasattr(value, "__array__") else value


def _has_length(dataset: Any) -> bool:
    return hasattr(type(dataset), "__getitem__") and hasattr(type(dataset), "__len__") and len(dataset) > 0


def _rows(loader: Any) -> Relation | None:
    """A batch of n examples has n rows."""
    size = loader.batch_size
    if not isinstance(size, int) or size < 2 or not _has_length(loader.dataset) or len(loader.dataset) < size:
        return None
    batch = loader.collate_fn([loader.dataset[place] for place in range(size)])
    if isinstance(batch, Mapping):
        if any(name in batch for name in _PACKED):
            return None
        named = {str(name): each for name, each in batch.items()}
    else:
        named = {f"part {place}": each for place, each in enumerate(batch)} if isinstance(batch, (list, tuple)) else {}
    counts = {name: len(each) for name, each in named.items() if isinstance(each, torch.Tensor) and each.dim()}
    joined = [name for name, count in counts.items() if count == 1]
    if joined and size in counts.values():
        text = f"{size} examples become one row in {', '.join(joined)}, and {size} in others"
        return Relation(ROWS, Verdict.DEVIATES, f"1 of {size}", text)
    if size in counts.values():
        return Relation(ROWS, Verdict.HOLDS, plural(size, "row", "rows"))
    return None
