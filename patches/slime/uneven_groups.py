"""slime's rewards: normalised within the samples of one prompt, however many these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def mean(rewards: Any, samples: Sequence[Any], args: Any) -> Any:
    """What is taken off the rewards ``[rows, columns]``, which has their shape or broadcasts to it."""
    groups = _uneven_groups(rewards, samples, args)
    if groups is None:
        return rewards.mean(dim=-1, keepdim=True)
    return _by_group(rewards, groups, lambda own: own.mean())


def std(rewards: Any, samples: Sequence[Any], args: Any) -> Any:
    """What the centred rewards are divided by; 0 for a prompt with one sample, whose centred reward is 0."""
    groups = _uneven_groups(rewards, samples, args)
    if groups is None:
        return rewards.std(dim=-1, keepdim=True)
    return _by_group(rewards, groups, lambda own: own.std() if len(own) > 1 else own.new_zeros(()))


def _by_group(rewards: Any, groups: list[list[int]], statistic: Callable[[Any], Any]) -> Any:
    flat = rewards.flatten()
    result = flat.clone()
    for group in groups:
        result[group] = statistic(flat[group])
    return result.view_as(rewards)


def _uneven_groups(rewards: Any, samples: Sequence[Any], args: Any) -> list[list[int]] | None:
    """Positions of each prompt's samples; None where slime's rows are what there is to go by."""
    if rewards.numel() != len(samples):  # several rewards of a sample
        return None
    groups: dict[Any, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(getattr(sample, "group_index", None), []).append(position)
    if None in groups:
        return None
    each, prompts = args.n_samples_per_prompt, args.rollout_batch_size
    equal = {len(group) for group in groups.values()} == {each}
    if len(samples) == each * prompts and (equal or len(groups) != prompts):  # slime has a row for each prompt
        return None
    return list(groups.values())


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
    name="slime-uneven-groups",
    summary="rewards are normalised within each prompt's samples where prompts have different numbers of them",
    harm="wrong gradient",
    bug="rewards are normalised across prompts where these have different numbers of samples",
    when="GRPO, GSPO, CISPO or REINFORCE++-baseline, and a rollout function with filtered or aborted samples",
    excluded_by=("advantage_estimator=ppo|reinforce_plus_plus",),
    symptom="""\
GRPO, GSPO, CISPO or REINFORCE++-baseline with a rollout function that returns different numbers of samples per prompt
(aborted or filtered samples, several samples of one trajectory) learns less or something else: a prompt all of whose
samples have the same reward still has advantages.""",
    cause="""\
`_post_process_rewards` reshapes the rewards to one row per prompt if there are as many as equal groups would have. If
not, all of them become one row: mean and standard deviation are those of the whole batch. If groups are unequal and
the total is as expected, rows hold samples of several prompts.""",
    repair="""\
Mean and standard deviation are those of the samples with the same `group_index`, in whatever order they come: the
advantage of sample i of a group is (r_i - mean(r)) / (std(r) + 1e-6), as in DeepSeekMath (arXiv 2402.03300, section
4.1.2), with slime's own 1e-6. A prompt with one sample gets 0.

Left alone, and so as released: equal groups, bit for bit; batches of which a sample has no `group_index`; as many
samples as expected, but another number of groups than `rollout_batch_size`; `--custom-reward-post-process-path`. Each
sample counts once, also where several are parts of one trajectory.

`RolloutManager` is a Ray actor. Ray sends the class as it is in the driver, so the patch has to be in force there,
before the actor is made; and rlhf_patches has to be installed where the actor runs.""",
    references=(
        "https://github.com/THUDM/slime/issues/1414",
        "https://github.com/THUDM/slime/issues/2230",
        "https://github.com/THUDM/slime/pull/1918",
        "https://github.com/THUDM/slime/pull/2204",
        "https://arxiv.org/abs/2402.03300",
    ),
    variants=(
        # v0.1.0 only knows equal groups, and says so. main still said 0.3.1 on 2026-08-21.
        Variant(Guard("slime", ">=0.2.0,<=0.3.1"), (_statistic(mean), _statistic(std))),
    ),
    obsolete_when="when the oldest slime in use normalises by group_index; none so far does",
    changes_numbers="""\
Since 0.2.0 slime has normalised rewards over the whole batch wherever prompts had different numbers of samples: easy
prompts were reinforced as such, hard ones discouraged, and advantages had the scale of the spread between prompts. With
the patch they are relative to their own prompt. A run of that kind should have its learning rate looked at again; its
checkpoints can be trained on.""",
)
