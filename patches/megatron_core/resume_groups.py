"""megatron-core: after a resume, parameter groups that differ only in their learning rates have the last one's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What a scheduler reads from a group, and Megatron's own key does not include."""


def saved_group(
    group: dict[str, Any],
    current: Sequence[dict[str, Any]],
    saved: Sequence[dict[str, Any]],
    found: dict[str, Any],
    keys: Sequence[str],
) -> dict[str, Any]:
    """The saved state of a parameter group.

    If several groups have one key, the group with the default rates gets the one that was saved with these. The other
    groups are paired in order, which is the order of their overrides. If the same rates were saved, or a different
    number of groups, groups with the same rates are paired.

    Args:
        group: one of ``current``.
        current: the optimizer's groups.
        saved: those of the checkpoint.
        found: Megatron's choice, the last one of this key.
        keys: the names by which Megatron distinguishes groups; each group has them all.
    """

    def key(of: dict[str, Any]) -> list[Any]:
        return [of[name] if name in of else of[f"pre_{name}"] for name in keys]

    candidates = [other for other in saved if key(other) == key(found)]
    if len(candidates) < 2:
        return found
    alike = [one for one in current if key(one) == key(found)]
    mine, theirs = ([one for one in of if _is_default(one) == _is_default(group)] for of in (alike, candidates))
    if len(mine) == len(theirs):
        alike, candidates = mine, theirs
    if len(alike) == len(candidates) and _all_rates(alike) != _all_rates(candidates):
        return next((other for one, other in zip(alike, candidates, strict=True) if one is group), found)
    for one in alike:
        at = next((i for i, other in enumerate(candidates) if _rates(other) == _rates(one)), None)
        if at is not None and (same := candidates.pop(at)) and one is group:  # writes: a local list
            return same
    return found


def _is_default(group: dict[str, Any]) -> bool | None:
    """Whether a group has the default rates, without an override; None if that was not saved."""
    return group.get("default_config")


def _all_rates(groups: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(repr(_rates(group)) for group in groups)


def _rates(group: dict[str, Any]) -> list[Any]:
    return [group.get(name) for name in _RATES]


def _saved(group: str, current: str, saved: str, found: str) -> str:
    return f"**$SAVED({group}, {current}, {saved}, {found}, param_group_identifier_keys)"


USES = {"SAVED": f"{__name__}:{saved_group.__name__}"}
REWRITES = (
    Rewrite(
        target="megatron.core.optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups",
        pattern="loaded_groups_map[key]",
        inside="group = loaded_groups_map[key]",
        alongside=('group[key] if key in group else group[f"pre_{key}"]',),  # 0.19 has other keys, and None for some
        replacement="{"
        + _saved("current_groups[len(final_groups)]", "current_groups", "state_dict_groups", "loaded_groups_map[key]")
        + "}",
        uses=USES,
    ),
    Rewrite(
        target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        pattern="{**param_groups_map[needed_groups], \"params\": inner_param_group['params']}",
        alongside=(
            "needed_groups.append(param_group[key])",
            # 0.15, whose keys distinguish all groups, logs it in another way.
            "log_single_rank($A, $B, '***WARNING*** found an old checkpoint, will not load grad scaler ...')",
        ),
        replacement="{"
        + _saved(
            "inner_param_group",
            'inner_state_dict["param_groups"]',
            'state_dict["optimizer"]["param_groups"]',
            "param_groups_map[needed_groups]",
        )
        + ", \"params\": inner_param_group['params']}",
        uses=USES,
    ),
)

PATCH = Patch(
    name="megatron-core-resume-groups",
    summary="after a resume, parameter groups that differ only in their learning rates keep them",
    harm="wrong gradient",
    bug="after a resume all weights are trained at --decoupled-lr's rate, or the run does not resume",
    when="--decoupled-lr, or config_overrides with a rate, and a resume",
    symptom="""\
With `--decoupled-lr`, or `config_overrides` that set a `max_lr` or `min_lr`, a resumed run trains all weights at the
learning rate of the last of these groups. With 1e-4 and a decoupled 1e-2, all weights with weight decay have 1e-2 from
the first step on, a hundred times too much. No error is raised. Without the distributed optimizer, the resume raises
`ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group`.""",
    cause="""\
Saved parameter groups are looked up by `wd_mult`, `lr_mult`, `is_expert_parallel` and `is_decoupled_lr`. Since 0.16.0,
a decoupled rate is an override of `max_lr` and `min_lr`, and `is_decoupled_lr` is False for all groups. Two groups then
have one key, and the dictionary keeps the last one for both. Without the distributed optimizer, both are the same
object, with the parameters of the last group, and torch raises if the groups have different sizes.""",
    repair="""\
If several saved groups have one key, the group without its own rate gets the saved group without its own rate. The
other groups get theirs in order. All of them get the saved rates, as before, even if the configuration changed for the
resume. If a different number of groups was saved, a group gets the saved one with its own `max_lr`, `min_lr`,
`start_wd` and `end_wd`. The patch does not repair two groups of `config_overrides` whose order changed in the resume
(Megatron sorts them by their overrides): they get each other's rates. Resume with the saved overrides.

Checkpoints are written as before. The patch reads checkpoints that were saved without it, and they contain every
group's rate. A checkpoint that was saved after a resume without the patch already has the wrong rates: resume from an
older one.

If each group has its own key, results are as before.""",
    references=("https://github.com/NVIDIA/Megatron-LM/pull/4705",),
    variants=(Variant(Guard("megatron-core", ">=0.16.0,<0.19.0"), REWRITES),),
    obsolete_when="when the oldest megatron-core in use is 0.19",
    conditions=tuple(
        Condition(change.target, f"{__package__}._conditions:{predicate}")
        for change, predicate in zip(REWRITES, ("of_one_key", "of_one_key_in_shards"), strict=True)
    ),
    changes_numbers="""\
Since megatron-core 0.16.0, a resumed run with `--decoupled-lr` trained embedding, output layer and all other weights at
one rate, that of the last group. With the patch, each group has its saved rate. Training after such a resume used the
wrong rate, and its checkpoints contain it: go back to the checkpoint that it resumed from.""",
)
