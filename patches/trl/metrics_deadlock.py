"""Metrics that reward functions log on some ranks only: one gather collects each rank's metrics with their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def columns(pending: Mapping[str, list[Any]], samples: int) -> Iterator[tuple[str, list[Any]]]:
    """Each column that a rank has logged, by name, with the values of all ranks in rank order.

    Args:
        pending: this rank's values by column.
        samples: this rank's number of samples, which is its number of None values in a column of other ranks.
    """
    ranks = _gathered((dict(pending), samples))
    for name in _names([mine for mine, _ in ranks]):
        yield name, [value for mine, number in ranks for value in mine.get(name, [None] * number)]


def means(pending: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, float]]:
    """Each metric that a rank has logged, by name, with the mean of all logged values.

    Args:
        pending: this rank's values by metric: numbers, or arrays and tensors of any shape, which count as their
            mean.

    Raises:
        TypeError: a rank has logged a value that is not a number. Every rank raises, after the gather.
    """
    ranks = _gathered({name: _mean(values) for name, values in pending.items()})
    for name in _names(ranks):
        for rank, mine in enumerate(ranks):
            if isinstance(mine.get(name), str):
                raise TypeError(f"log_metric({name!r}, ...) on rank {rank}: expected numbers; {mine[name]}")
        found, counts = zip(*(mine[name] for mine in ranks if name in mine), strict=True)
        yield name, sum(mean * count for mean, count in zip(found, counts, strict=True)) / sum(counts)


def _mean(values: Sequence[Any]) -> tuple[float, int] | str:
    """The mean of one rank's values and their number, or an error text, since other ranks wait for this one."""
    try:
        return sum(map(_number, values)) / len(values), len(values)
    except Exception as error:  # a user's object may raise anything
        return f"{type(error).__name__}: {error}"


def _number(value: Any) -> float:
    """The value in float64."""
    import numpy
    import torch

    value = 0 + value  # as TRL does first: rejects text and None
    if not isinstance(value, torch.Tensor):
        value = torch.from_numpy(numpy.array(value, dtype=numpy.float64))
    return float(value.detach().cpu().double().mean())


def _gathered(mine: Any) -> list[Any]:
    """One collective; none on a single process."""
    from accelerate.utils import gather_object

    ranks: list[Any] = gather_object([mine])
    return ranks


def _names(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(set().union(*ranks), key=str)


def _changes(trainer: str) -> tuple[Rewrite, ...]:
    function = f"{trainer}._generate_and_score_completions"
    return (
        Rewrite(
            target=function,
            pattern="""\
for column in sorted(self._pending_extra_logs):
    self._logs["extra"][column].extend(gather_object(self._pending_extra_logs[column]))""",
            alongside=("self._pending_extra_logs.clear()",),
            replacement="""\
for column, values in $COLUMNS(self._pending_extra_logs, len(prompts_text)):
    self._logs["extra"][column].extend(values)""",
            uses={"COLUMNS": f"{__name__}:{columns.__name__}"},
        ),
        Rewrite(
            target=function,
            pattern="""\
for name in sorted(self._pending_metrics):
    values = self._pending_metrics[name]
    local_mean = sum(values) / len(values)
    global_mean = self.accelerator.gather(torch.tensor(local_mean, device=device)).mean().item()
    self._metrics[mode][name].append(global_mean)""",
            alongside=("self._pending_metrics.clear()",),
            replacement="""\
for name, global_mean in $MEANS(self._pending_metrics):
    self._metrics[mode][name].append(global_mean)""",
            uses={"MEANS": f"{__name__}:{means.__name__}"},
        ),
    )


PATCH = Patch(
    name="trl-metrics-deadlock",
    summary="reward functions of GRPO and RLOO may log on some ranks only",
    harm="hang",
    bug="ranks hang, or report each other's metrics under the wrong names",
    when="GRPOTrainer or RLOOTrainer on several ranks, and a reward function that logs on some ranks only",
    excluded_by=(
        "trl=sft|dpo|kto|reward",
        "num_processes=1",
    ),
    symptom="""\
`GRPOTrainer` or `RLOOTrainer` on several ranks hangs, until the process group's timeout, after a reward function has
called `log_metric` or `log_extra` on some ranks and not on others: for one kind of prompt, or when parsing failed. If
ranks have logged equal numbers of names, but different names, the run continues, and the trainer averages different
metrics: it reports the mean of rank 0's metric and rank 1's metric under both names.""",
    cause="""\
After each generation, every rank gathers once for each name that it has logged itself. A rank that has logged fewer
names enters fewer collectives than the others. If ranks have logged different names, their collectives mix these
names.""",
    repair="""\
The patch gathers names and values together, once for columns and once for metrics, whatever the ranks have logged. A
metric is the mean of all values that any rank has logged; TRL's is the mean of the ranks' means, which differs if ranks
have logged different numbers of values. A vector counts as its mean, and a value that is not a number raises
`TypeError` on every rank. If a rank has not logged a column, the samples of this rank have None in it. TRL 1.14.0 does
the same, but accepts no vectors.""",
    references=(
        "https://github.com/huggingface/trl/issues/7310",
        "https://github.com/huggingface/trl/pull/7311",
    ),
    variants=(
        Variant(
            Guard("trl", ">=1.0.0rc1,<1.14.0"),
            (
                *_changes("trl.trainer.grpo_trainer:GRPOTrainer"),
                *_changes("trl.trainer.rloo_trainer:RLOOTrainer"),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.14",
)
