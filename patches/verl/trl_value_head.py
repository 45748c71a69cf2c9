"""verl with TRL 0.29 and later, which moved, and then removed, the class of a model with a value head."""

from __future__ import annotations

from rlhf_patches import CoInstalled, Guard, Patch, Rewrite, Signature, Variant

_USES = {
    "VALUE_HEAD_CLASS": f"{__package__}._value_head_class:value_head_class",
    "HAS_VALUE_HEAD_CLASS": f"{__package__}._value_head_class:has_value_head_class",
}
_NAME = "AutoModelForCausalLMWithValueHead"
_OLD, _NEW = f"from trl import {_NAME}", f"from trl.experimental.ppo import {_NAME}"
_LOAD, _PREPARE = "verl.utils.model:load_valuehead_model", "verl.utils.model:patch_valuehead_model"
_EVERY_MODEL = "verl.models.transformers.monkey_patch:apply_monkey_patch"
_FROM_0_29 = CoInstalled("trl", ">=0.29.0,<=1.16.0")


def _from_where_it_is(target: str) -> Rewrite:
    return Rewrite(
        target=target,
        pattern=_OLD,
        replacement=f"{_NAME} = $VALUE_HEAD_CLASS()",
        unless=(_NEW,),
        uses=_USES,
    )


def _only_where_there_is_one(*alongside: str, unless: tuple[str, ...] = ()) -> Rewrite:
    return Rewrite(
        target=_EVERY_MODEL,
        pattern="is_trl_available()",
        replacement="(is_trl_available() and $HAS_VALUE_HEAD_CLASS())",
        alongside=alongside,
        unless=unless,
        uses=_USES,
    )


PATCH = Patch(
    name="verl-trl-value-head",
    summary="with TRL 0.29 and later, verl imports TRL's class with a value head if TRL has it, and works without it",
    harm="crash",
    bug="FSDP workers cannot build a model: they import a class that TRL moved, and then removed",
    when="FSDP of verl with TRL 0.29 or later installed (verl before 0.8), or TRL 1.13 or later (verl 0.8 to 0.9.1)",
    symptom=f"""\
With FSDP every worker, including the actor's, ends in `ImportError: cannot import name
'{_NAME}' from 'trl'`, in `apply_monkey_patch`: verl 0.4.1 to 0.7.1 with TRL 0.29 or
later, verl 0.8.0 to 0.9.1 with TRL 1.13 or later. The error occurs whenever TRL is installed. Before 0.9.1,
`load_valuehead_model`, for a critic that was saved with a value head, raises the same error with TRL 0.29 or
later.""",
    cause=f"""\
`apply_monkey_patch` replaces the `state_dict` of TRL's `{_NAME}` wherever TRL is installed,
even if the model is not of that class. TRL 0.29.0 moved the class to `trl.experimental.ppo`, and 1.13.0 removed it.
verl's own requirement, `trl<=0.9.6`, is part of an extra, which other packages do not respect.""",
    repair="""\
The class is imported from `trl.experimental.ppo`, where these releases of TRL have it. If `trl` itself contains the
class, because of a workaround of yours, the patch uses that class, as before. Where TRL has no such class,
`apply_monkey_patch` skips the part for it: no model can be of that class. A critic that was saved with a value head
cannot be loaded then, with the same error as before: pin `trl<1.13`. The patch adds nothing to TRL.""",
    signatures=(
        Signature("ImportError", f"cannot import name '{_NAME}' from 'trl'", frames=(_EVERY_MODEL, _LOAD, _PREPARE)),
    ),
    references=(
        "https://github.com/verl-project/verl/issues/5485",
        "https://github.com/verl-project/verl/pull/7625",
        "https://github.com/huggingface/trl/pull/4654",
        "https://github.com/huggingface/trl/pull/7020",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.4.1,<=0.7.1", co_installed=_FROM_0_29),
            (
                _from_where_it_is(_LOAD),
                _from_where_it_is(_PREPARE),
                _from_where_it_is(_EVERY_MODEL),
                _only_where_there_is_one(_OLD, unless=(_NEW,)),
            ),
            independent=True,
        ),
        Variant(
            Guard("verl", ">=0.8.0.dev0,<=0.9.0", co_installed=_FROM_0_29),
            (_from_where_it_is(_LOAD), _from_where_it_is(_PREPARE), _only_where_there_is_one(_NEW)),
            independent=True,
        ),
        Variant(
            Guard("verl", ">=0.9.1,<=0.9.1", co_installed=CoInstalled("trl", ">=1.13.0,<=1.16.0")),
            (_only_where_there_is_one(_NEW),),
        ),
    ),
    obsolete_when="when the oldest verl in use contains the fix",
)
