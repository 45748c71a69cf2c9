"""What reward functions log on some ranks only: what each rank has logged is gathered with its names, at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def columns(pending: Mapping[str, list[Any]], samples: int) -> Iterator[tuple[str, list[Any]]]:
    """Each column that a rank has logged, by name, with the values of all ranks in their order.

    Args:
        pending: this rank's values by column.
        samples: this rank's number of samples. So often it has None in a column of other ranks.
    """
    ranks = _gathered((dict(pending), samples))
    for name in _names([mine for mine, _ in ranks]):
        yield name, [value for mine, number in ranks for value in mine.get(name, [None] * number)]


def means(pending: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, float]]:
    """Each metric that a rank has logged, by name, with the mean of all that was logged.

    Args:
        pending: this rank's values by metric: numbers, or arrays and tensors of any shape, which count as their mean.

    Raises:
        TypeError: a rank has logged what is no number. On every rank, and once all have said what they have.
    """
    ranks = _gathered({name: _mean(values) for name, values in pending.items()})
    for name in _names(ranks):
        for rank, mine in enumerate(ranks):
            if isinstance(mine.get(name), str):
                raise TypeError(f"log_metric({name!r}, ...) on rank {rank}: expected numbers; {mine[name]}")
        found, counts = zip(*(mine[name] for mine in ranks if name in mine), strict=True)
        yield name, sum(mean * count for mean, count in zip(found, counts, strict=True)) / sum(counts)


def _mean(values: Sequence[Any]) -> tuple[float, int] | str:
    """Of one rank's values, and how many these are; or what is wrong: the other ranks are waiting for this one."""
    try:
        return sum(map(_number, values)) / len(values), len(values)
    except Exception as error:  # whatever a user's object raises
        return f"{type(error).__name__}: {error}"


def _number(value: Any) -> float:
    """In float64."""
    import numpy
    import torch

    value = 0 + value  # as TRL begins: no text, and no None
    if not isinstance(value, torch.Tensor):
        value = torch.from_numpy(numpy.array(value, dtype=numpy.float64))
    return float(value.detach().cpu().double().mean())


def _gathered(mine: Any) -> list[Any]:
    """One collective; on a single process none."""
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
    bug="ranks wait for ever, or report each other's metrics under the wrong names",
    when="GRPOTrainer or RLOOTrainer on several ranks, and a reward function that logs on some only",
    symptom="""\
`GRPOTrainer` or `RLOOTrainer` on several ranks stands still, until the process group's timeout, after a reward function
has called `log_metric` or `log_extra` on some ranks and not on others: for one kind of prompt, or when parsing failed.
Where ranks have logged as many names, but others, nothing stops: the mean of rank 0's metric and rank 1's is reported
under each one's name.""",
    cause="""\
After each generation, every rank gathers once for each name that it has logged itself. A rank that has logged fewer
names enters fewer collectives than the others, and with other names the collectives are those of other names.""",
    repair="""\
Names and values are gathered together, once for columns and once for metrics, whatever was logged. A metric is the mean
of all that was logged on any rank; TRL's is the mean of the ranks' means, which differs where ranks have logged
different numbers of values. A vector counts as its mean, and what is no number is a `TypeError` on every rank. In a
column, ranks that have not logged it have None for each of their samples. So does TRL 1.14.0, which takes no
vectors.""",
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
