"""slime's rewards: normalized within the samples of one prompt, for any number of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "slime-uneven-groups"


def not_normalized(self: Any) -> bool | None:
    """False if rewards are not normalized by prompt; otherwise None: the samples decide."""
    args = getattr(self, "args", None)
    if getattr(args, "rewards_normalization", None) is False:
        return False
    return False if getattr(args, "advantage_estimator", None) in ("ppo", "reinforce_plus_plus") else None


def mean(rewards: Any, samples: Sequence[Any], args: Any) -> Any:
    """The value subtracted from the rewards ``[rows, columns]``, in their shape or broadcastable to it."""
    groups = _uneven_groups(rewards, samples, args)
    _decide(rewards, samples, groups)
    if groups is None:
        return rewards.mean(dim=-1, keepdim=True)
    return _by_group(rewards, groups, lambda own: own.mean())


def std(rewards: Any, samples: Sequence[Any], args: Any) -> Any:
    """The divisor of the centered rewards; 0 for a prompt with one sample, whose centered reward is 0."""
    groups = _uneven_groups(rewards, samples, args)
    if groups is None:
        return rewards.std(dim=-1, keepdim=True)
    return _by_group(rewards, groups, lambda own: own.std() if len(own) > 1 else own.new_zeros(()))


def _decide(rewards: Any, samples: Sequence[Any], uneven: list[list[int]] | None) -> None:
    """Report whether slime's rows contain samples of several prompts; nothing if that is unknown, or stays so."""
    groups = uneven or _groups(rewards, samples)
    if groups is None:
        return
    columns = rewards.shape[-1]
    rows = {tuple(range(first, first + columns)) for first in range(0, len(samples), columns)}
    mixed = rows != {tuple(group) for group in groups}
    if uneven or not mixed:
        rlhf_patches.decided(_NAME, mixed)


def _by_group(rewards: Any, groups: list[list[int]], statistic: Callable[[Any], Any]) -> Any:
    flat = rewards.flatten()
    result = flat.clone()
    for group in groups:
        result[group] = statistic(flat[group])
    return result.view_as(rewards)


def _uneven_groups(rewards: Any, samples: Sequence[Any], args: Any) -> list[list[int]] | None:
    """Positions of each prompt's samples; None if slime's rows are the only information."""
    groups = _groups(rewards, samples)
    if groups is None:
        return None
    each, prompts = args.n_samples_per_prompt, args.rollout_batch_size
    equal = {len(group) for group in groups} == {each}
    if len(samples) == each * prompts and (equal or len(groups) != prompts):  # slime has a row for each prompt
        return None
    return groups


def _groups(rewards: Any, samples: Sequence[Any]) -> list[list[int]] | None:
    """Positions of the samples of each `group_index`; None if there is not one reward and index for each sample."""
    if rewards.numel() != len(samples):  # several rewards per sample
        return None
    groups: dict[Any, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(getattr(sample, "group_index", None), []).append(position)
    return None if None in groups else list(groups.values())


_FUNCTION = "slime.ray.rollout:RolloutManager._post_process_rewards"


def _statistic(function: Callable[..., Any]) -> Rewrite:
    name = function.__name__
    return Rewrite(
        target=_FUNCTION,
        pattern=f"{name} = rewards.{name}(dim=-1, keepdim=True)",
        alongside=("rewards = rewards.view(-1, rewards.shape[-1])",),
        replacement=f"{name} = ${name.upper()}(rewards, samples, self.args)",
        uses={name.upper(): f"{__name__}:{name}"},
    )


PATCH = Patch(
    name=_NAME,
    summary="rewards are normalized within each prompt's samples if prompts have different numbers of samples",
    harm="wrong gradient",
    bug="rewards are normalized across prompts if prompts have different numbers of samples",
    when="GRPO, GSPO, CISPO or REINFORCE++-baseline, and a rollout function with filtered or aborted samples",
    excluded_by=("advantage_estimator=ppo|reinforce_plus_plus",),
    symptom="""\
GRPO, GSPO, CISPO or REINFORCE++-baseline with a rollout function that returns different numbers of samples per prompt
(aborted or filtered samples, several samples of one trajectory) learns less, or a different objective: a prompt whose
samples all have the same reward still has advantages.""",
    cause="""\
`_post_process_rewards` reshapes the rewards to one row per prompt if their number is that of equal groups. Otherwise
all rewards become one row: mean and standard deviation are those of the whole batch. If groups are unequal and the
total is as expected, rows contain samples of several prompts.""",
    repair="""\
Mean and standard deviation are those of the samples with the same `group_index`, in any order: the advantage of sample
i of a group is (r_i - mean(r)) / (std(r) + 1e-6), as in DeepSeekMath (arXiv 2402.03300, section 4.1.2), with slime's
own 1e-6. A prompt with one sample gets 0.

These stay as released: equal groups, bit for bit; a batch with a sample that has no `group_index`; a batch with the
expected number of samples, but with more or fewer groups than `rollout_batch_size`;
`--custom-reward-post-process-path`. Each sample counts once, even if several are parts of one trajectory.

`RolloutManager` is a Ray actor. Ray sends the class as defined in the driver, so the patch must be applied there before
the actor is created. rlhf_patches must be installed where the actor runs.""",
    references=(
        "https://github.com/THUDM/slime/issues/1414",
        "https://github.com/THUDM/slime/issues/2230",
        "https://github.com/THUDM/slime/pull/1918",
        "https://github.com/THUDM/slime/pull/2204",
        "https://arxiv.org/abs/2402.03300",
    ),
    variants=(
        # v0.1.0 supports only equal groups, and documents it. main still had 0.3.1 on 2026-08-21.
        Variant(Guard("slime", ">=0.2.0,<=0.3.1"), (_statistic(mean), _statistic(std))),
    ),
    obsolete_when="when the oldest slime in use normalizes by group_index; none so far does",
    conditions=(Condition(_FUNCTION, f"{__name__}:{not_normalized.__name__}"),),
    changes_numbers="""\
Since 0.2.0, slime normalized rewards over the whole batch if prompts had different numbers of samples: easy prompts
were reinforced as such, hard ones were discouraged, and advantages had the scale of the spread between prompts. With
the patch, they are relative to their own prompt. Check the learning rate of such a run again. Training can continue
from its checkpoints.""",
)
