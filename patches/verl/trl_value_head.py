"""verl beside TRL 0.29 and later, which has moved the class of a model with a value head, and then removed it."""

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
    summary="beside TRL 0.29 and later, verl finds TRL's class with a value head, and does without where it is gone",
    harm="crash",
    bug="FSDP workers cannot build a model: they import a class that TRL has moved, and then removed",
    when="FSDP of verl with TRL from 0.29 on installed (verl before 0.8), or from 1.13 on (verl 0.8 to 0.9.1)",
    symptom=f"""\
With FSDP every worker, the actor's too, ends in `ImportError: cannot import name '{_NAME}'
from 'trl'`, in `apply_monkey_patch`: verl 0.4.1 to 0.7.1 beside TRL 0.29 or later, verl 0.8.0 to 0.9.1 beside TRL 1.13
or later. It is enough that TRL is installed. Before 0.9.1 `load_valuehead_model`, for a critic that was saved with a
value head, ends in the same beside TRL 0.29 or later.""",
    cause=f"""\
`apply_monkey_patch` gives TRL's `{_NAME}` another `state_dict` wherever TRL is installed,
whether the model is of that class or not. TRL 0.29.0 has the class in `trl.experimental.ppo` only, and 1.13.0 has it no
longer. verl's own requirement, `trl<=0.9.6`, is an extra's, which other packages do not keep.""",
    repair="""\
The class is imported from `trl.experimental.ppo`, where these releases of TRL have it, unless there is one in `trl`: a
workaround of yours, which is used as before. Where TRL has it nowhere, `apply_monkey_patch` leaves out the part that is
for it: no model can be of that class. A critic that was saved with a value head cannot be loaded then, with the error
as before: pin `trl<1.13`. Nothing is put into TRL.""",
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
    obsolete_when="when the oldest verl in use has it repaired",
)
