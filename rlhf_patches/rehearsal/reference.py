"""Initial loss, initial ratio: a loss while policy and reference are equal. Reference passes: two are equal."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import pieces, sharding
from .relation import Relation, Verdict
from .replay import Call

LOSS, RATIO, PASSES = "initial loss", "initial ratio", "reference passes"
_FLOOR = 1e-4
"""A log-probability of a sequence is a sum over its tokens, which rounds more than a gradient's relative norm."""
_DPO = {
    **dict.fromkeys(("sigmoid", "sigmoid_norm", "robust"), math.log(2)),
    **dict.fromkeys(("hinge", "apo_zero", "apo_down"), 1.0),
    "nca_pair": 2 * math.log(2),
}
"""DPO's losses by ``loss_type``, where each log-ratio is 0; ``ipo`` depends on beta."""
_KTO = ("kto", "apo_zero_unpaired")
_OF = {
    "trl.trainer.dpo_trainer": "DPO",
    "trl.trainer.kto_trainer": "KTO",
    "trl.experimental.kto.kto_trainer": "KTO",
    "trl.trainer.grpo_trainer": "GRPO",
    "trl.trainer.rloo_trainer": "RLOO",
}
_METHODS = (
    *("compute_loss", "_compute_loss", "get_batch_loss_metrics", "dpo_loss", "kto_loss", "concatenated_forward"),
    *("compute_ref_log_probs", "_precompute_ref_logps", "_get_per_token_logps_and_entropies"),
    *("_prepare_inputs", "_generate_and_score_completions"),
)
_OLD = ("old_logps", "old_per_token_logps")
"""RLOO's and GRPO's; without them GRPO's ratio is 1 by definition."""
_PRECOMPUTED = ("ref_chosen_logps", "ref_logps", "reference_logps", "reference_chosen_logps")


def applies(trainer: Any, inputs: Any) -> bool:
    """Whether a trainer of TRL's compares with a reference, or with the policy that generated."""
    name = name_of(trainer)
    given = inputs if isinstance(inputs, Mapping) else {}
    return name == LOSS or (name == RATIO and any(given.get(each) is not None for each in _OLD))


def name_of(trainer: Any) -> str:
    """Return which relation a trainer of TRL's may have; empty if it has none."""
    return {"DPO": LOSS, "KTO": LOSS, "GRPO": RATIO, "RLOO": RATIO}.get(_kind(trainer), "")


def _kind(trainer: Any) -> str:
    return next((_OF[each.__module__] for each in type(trainer).__mro__ if each.__module__ in _OF), "")


def unknown(trainer: Any, where: sharding.Whole, inputs: Any) -> str:
    """Return why the loss or the ratio before the first update is not known; empty if it is."""
    if own := next((name for name in _METHODS if not _is_released(trainer, name)), ""):
        return f"{type(trainer).__name__}.{own} is not TRL's own"
    if not isinstance(inputs, Mapping):
        return f"the micro-batch is a {type(inputs).__name__}, not a mapping"
    if name_of(trainer) == RATIO:
        return _no_ratio(trainer, inputs)
    if trainer.state.global_step:
        return "the run resumes: the policy was trained before"
    try:
        expected(trainer, inputs)
    except KeyError as error:
        return f"the initial value of loss_type {error.args[0]} is not known"
    for setting in ("use_weighting", "reference_free", "rpo_alpha"):
        if getattr(trainer, setting, None) or getattr(trainer.args, setting, None):
            return f"{setting} is set"
    return _differs(trainer, where)


def _is_released(trainer: Any, name: str) -> bool:
    """Whether a method is that of the trainers in `_OF`, or there is none."""
    owner = next((each for each in type(trainer).__mro__ if name in vars(each)), None)
    method = getattr(trainer, name, None)
    code = pieces.written_in(getattr(method, "__func__", method))
    known = owner is None or owner.__module__ in _OF or owner.__module__.startswith("transformers.")
    return method is None or (known and code.startswith(("trl.", "transformers.")))


def _no_ratio(trainer: Any, inputs: Mapping[str, Any]) -> str:
    advantages = inputs.get("advantages")
    if not isinstance(advantages, torch.Tensor) or not bool(advantages.any()):
        return "all advantages are 0"
    if getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False):
        return "the loss also has the ratio to the rollout engine's log-probabilities"
    return ""


def _differs(trainer: Any, where: sharding.Whole) -> str:
    """Return why policy and reference may differ; empty if their weights are equal."""
    if type(where) is not sharding.Whole:
        return "the weights are sharded, so that policy and reference are not compared"
    policy, reference = getattr(where.inner, "_orig_mod", where.inner), getattr(trainer, "ref_model", None)
    if isinstance(reference, torch.nn.Module):
        reference = trainer.accelerator.unwrap_model(reference)
        mine, other = dict(policy.named_parameters()), dict(reference.named_parameters())
        equal = type(policy) is type(reference) and {*mine} == {*other}
        if not equal or not all(_equal(each, other[name]) for name, each in mine.items()):
            return "the weights of policy and reference differ"
        return ""
    if not type(policy).__module__.startswith("peft."):
        precomputed = getattr(trainer, "precompute_ref_logps", getattr(trainer, "precompute_ref_log_probs", False))
        return "" if precomputed else "the trainer has no reference model"
    return _adapted(policy, getattr(trainer, "ref_adapter_name", None))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.dtype == other.dtype and torch.equal(one, other.to(one.device)))


def _adapted(policy: Any, reference: str | None) -> str:
    """Return why an adapter may change its base model, or differ from the reference's; empty if it is known not to."""
    active = list(policy.active_adapters)
    if reference is None and "ref" in policy.peft_config:
        reference = "ref"
    if reference is not None and len(active) == 1:
        named = dict(policy.named_parameters())
        own = {name: each for name, each in named.items() if f".{active[0]}." in f"{name}."}
        pairs = [(each, named.get(name.replace(f".{active[0]}.", f".{reference}."))) for name, each in own.items()]
        equal = pairs and all(other is not None and torch.equal(each, other) for each, other in pairs)
        return "" if equal else f"the adapters {active[0]} and {reference} differ"
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    for name, module in policy.named_modules():
        if isinstance(module, BaseTunerLayer):
            if not isinstance(module, LoraLayer) or module.merged or any(getattr(module, "use_dora", {}).values()):
                return f"{type(module).__name__} is not known to begin as the base model"
            if any(bool(each.any()) for each in _deltas(module, active)):
                return f"the adapter is not at its start: B of {name} is not 0"
        elif isinstance(module, ModulesToSaveWrapper):
            original = dict(module.original_module.named_parameters())
            for each in (each for key, each in module.modules_to_save.items() if key in active):
                if not all(torch.equal(one, original[key]) for key, one in each.named_parameters()):
                    return f"{name} was trained before"
        elif type(module).__module__ == "peft.utils.other":
            return f"{type(module).__name__} is not known to begin as the base model"
    return ""


def _deltas(layer: Any, active: list[str]) -> Iterator[torch.Tensor]:
    for part in (layer.lora_B, layer.lora_embedding_B):
        for adapter, each in part.items():
            if adapter in active:
                yield from (each,) if isinstance(each, torch.Tensor) else each.parameters()


def as_set(trainer: Any) -> bool:
    """Whether the run itself has no dropout, by its setting, in its loss."""
    return bool(getattr(trainer.args, "disable_dropout", False))


@contextlib.contextmanager
def without_dropout(*models: Any) -> Iterator[None]:
    """Disable the dropout of these models within the context."""
    with contextlib.ExitStack() as stack:
        for each in models:
            if isinstance(each, torch.nn.Module):
                stack.enter_context(pieces.without_dropout(each))
        yield


def expected(trainer: Any, inputs: Mapping[str, Any]) -> float:
    """Return the loss of a micro-batch if policy and reference are equal, or the ratio is 1.

    Raises:
        KeyError: the loss is not known; its argument is the loss's name.
    """
    if name_of(trainer) == RATIO:  # RLOO's; GRPO's is asked for by `without_ratio`
        return -float(inputs["advantages"].double().mean())
    if _kind(trainer) == "KTO":
        if trainer.loss_type not in _KTO:
            raise KeyError(trainer.loss_type)
        chosen = torch.as_tensor(inputs["label"]).double().mean()
        return float(chosen * trainer.desirable_weight + (1 - chosen) * trainer.undesirable_weight) / 2
    kinds = getattr(trainer, "loss_types", None) or trainer.loss_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    weights = getattr(trainer, "loss_weights", None) or [1.0] * len(kinds)
    values = {**_DPO, "ipo": 1 / (4 * trainer.beta**2)} if trainer.beta else {}
    return float(sum(values[kind] * weight for kind, weight in zip(kinds, weights, strict=True)))


def without_ratio(call: Call) -> Call | None:
    """Return a call of GRPO's without old log-probabilities, which the trainer then takes from itself; None of RLOO."""
    if _OLD[1] not in call.inputs:
        return None
    inputs = {name: value for name, value in call.inputs.items() if name != _OLD[1]}
    return Call(inputs, call.more, call.random, call.buffers)


def size(trainer: Any, inputs: Mapping[str, Any]) -> float:
    """Return the loss's size, of which a deviation is a part."""
    return float(inputs["advantages"].abs().mean()) if name_of(trainer) == RATIO else expected(trainer, inputs)


def precomputed(inputs: Mapping[str, Any]) -> bool:
    """Whether the reference's log-probabilities were computed before the run."""
    return not {*inputs}.isdisjoint(_PRECOMPUTED)


def judge(name: str, loss: float, right: float, rounding: float, size: float, *, precomputed: bool) -> Relation:
    """Compare a micro-batch's loss with the one that it must have.

    Args:
        rounding: how far the loss moves if the embeddings move by a unit in the last place.
    """
    holds = abs(loss - right) <= max(_FLOOR * size, 10 * rounding)
    verdict = Verdict.HOLDS if holds else Verdict.DEVIATES
    if name == RATIO:
        said = "the ratio of the policy to itself is 1"
        text = said if holds else f"the loss is {loss:.6g}; if {said}, as before an update, it is {right:.6g}"
        return Relation(RATIO, verdict, f"{abs(loss - right) / size:.1g}", text)
    text = "policy and reference are equal"
    if not holds:
        before = ": the log-probabilities from before the run are not the policy's" if precomputed else ""
        text = f"{text}, so that it must be {right:.6f}{before}"
    return Relation(LOSS, verdict, f"{loss:.6f}", text)


def has_passes(trainer: Any) -> bool:
    """Whether the trainer has a reference, which it may compute within its loss."""
    return hasattr(trainer, "ref_model") and name_of(trainer) != RATIO


@contextlib.contextmanager
def passes(*models: Any) -> Iterator[list[torch.Tensor]]:
    """Note within the context what these models return for the last tokens without a gradient."""
    found: list[torch.Tensor] = []

    def noted(_module: Any, _given: Any, made: Any) -> None:
        logits = getattr(made, "logits", None)
        if not torch.is_grad_enabled() and isinstance(logits, torch.Tensor) and logits.dim() == 3:
            found.append(logits[:, -1].float().nan_to_num())

    hooks = [each.register_forward_hook(noted) for each in models if isinstance(each, torch.nn.Module)]
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()


def judge_passes(one: torch.Tensor, other: torch.Tensor) -> Relation:
    """Compare the passes with one random state and with another."""
    apart = float((other - one).norm()) / (float(one.norm()) or 1.0)
    if not apart:
        return Relation(PASSES, Verdict.HOLDS, "0e+00", "two passes with other random states are equal")
    return Relation(PASSES, Verdict.NOTE, f"{apart:.1g}", "the reference changes with the random state, as by dropout")
