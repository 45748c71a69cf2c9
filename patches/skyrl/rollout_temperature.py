"""SkyRL's rollouts: return log-probabilities at the temperature that training divides by."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "skyrl-rollout-temperature"
_MODE, _RAW, _PROCESSED = "logprobs_mode", "raw_logprobs", "processed_logprobs"
_WITH_TEMPERATURE = (0, 10, 2)
"""The vLLM release before which "processed" log-probabilities exclude the temperature."""
_ALSO_PROCESSED = (
    *("top_p", "top_k", "min_p", "min_tokens", "allowed_token_ids", "bad_words", "logit_bias", "logits_processors"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "structured_outputs", "guided_decoding"),
)


def served(args: Any, cfg: Any) -> None:
    """Set the server's arguments so that it returns log-probabilities at the temperature."""
    if getattr(args, _MODE, None) == _RAW and _only_a_temperature(cfg):
        args.logprobs_mode = _PROCESSED  # writes: arguments that were just created, before the user's own are added
        _note(cfg.generator.inference_engine.engine_init_kwargs)


def for_engines(given: Any, cfg: Any) -> Any:
    """``engine_init_kwargs`` of Ray actor engines with the same setting; ``given`` itself where no change is needed."""
    if not _only_a_temperature(cfg) or cfg.generator.inference_engine.backend != "vllm" or _vllm() < _WITH_TEMPERATURE:
        return given
    _note(given)
    return {_MODE: _PROCESSED, **(given or {})}


def _note(own: Any) -> None:
    """Report that the bug occurs, unless the user's ``engine_init_kwargs`` set the mode."""
    if _MODE not in (own or ()):
        rlhf_patches.decided(_NAME, True)


def of_training(cfg: Any) -> Any:
    """The temperature by which training divides its logits."""
    temperature = getattr(cfg.trainer.algorithm, "temperature", None)
    return cfg.generator.sampling_params.temperature if temperature is None else temperature


def _only_a_temperature(cfg: Any) -> bool:
    """Whether vLLM's processed logits differ from those of training by the temperature only."""
    sampling = cfg.generator.sampling_params
    return (
        of_training(cfg) not in (None, 0, 1)
        and getattr(sampling, "top_p", 1) in (None, 1)
        and getattr(sampling, "top_k", -1) in (None, -1, 0)
        and getattr(sampling, "min_p", 0) in (None, 0)
        and getattr(sampling, "repetition_penalty", 1) in (None, 1)
        and not set(_ALSO_PROCESSED) & set(getattr(sampling, "additional_kwargs", None) or ())
    )


def _vllm() -> tuple[int, ...]:
    """vLLM's release; empty where there is no metadata."""
    try:
        text = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


_OWN = "engine_kwargs = get_config_as_dict(ie_cfg.engine_init_kwargs)"
_BUILDS_ARGUMENTS = "skyrl.backends.skyrl_train.inference_servers.utils:build_vllm_cli_args"
_SERVERS = Rewrite(
    target=_BUILDS_ARGUMENTS,
    pattern=_OWN,
    replacement=f"$SERVED(args, cfg); {_OWN}",
    alongside=("for key, value in overrides.items(): $$$", "for key, value in engine_kwargs.items(): $$$"),
    uses={"SERVED": f"{__name__}:{served.__name__}"},
)


_CREATES_ENGINES = (
    "skyrl.train.entrypoints.main_base:create_ray_wrapped_inference_engines_from_config",
    "skyrl.backends.skyrl_train_backend:create_ray_wrapped_inference_engines_from_config",
)


def _engines(target: str) -> Rewrite:
    given = "ie_cfg" if "main_base" in target else "cfg.generator.inference_engine"
    return Rewrite(
        target=target,
        pattern=f"{given}.engine_init_kwargs",
        replacement=f"$FOR_ENGINES({given}.engine_init_kwargs, cfg)",
        alongside=("create_ray_wrapped_inference_engines(**engine_kwargs)",),
        uses={"FOR_ENGINES": f"{__name__}:{for_engines.__name__}"},
    )


PATCH = Patch(
    name=_NAME,
    summary="log-probabilities of rollouts are at the sampling temperature",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="with a temperature other than 1, log-probabilities of rollouts are those of temperature 1",
    when="`generator.sampling_params.temperature` other than 1, and off_policy_correction, rollout_is, dppo or cispo",
    excluded_by=("generator.sampling_params.temperature=1|1.0|absent",),
    symptom="""\
With a temperature other than 1, `rollout_train_logprobs_abs_diff` is far above 0 from the first step on, for any
weights. Importance ratios between trainer and rollout are wrong for nearly every token: with
`off_policy_correction.tis_ratio_type` and its masks, with the losses `rollout_is` and `dppo`, and in 0.4.0 with
`cispo_anchor="rollout"`. There is no error.""",
    cause="""\
Training divides its logits by `trainer.algorithm.temperature`, which equals the temperature of
`generator.sampling_params`. SkyRL leaves vLLM's `logprobs_mode` at its default, `raw_logprobs`: log-probabilities from
before the temperature.""",
    repair="""\
The patch requests `processed_logprobs` from vLLM, as SkyRL itself does in 0.4.0 for `enable_return_sample_support_set`,
and as TRL and ms-swift do: log softmax(logits / T), which is what training computes. The first token of a response
differs: SkyRL sets `min_tokens` to 1, so vLLM excludes the tokens that end a response there, and training does not.
`engine_init_kwargs.logprobs_mode` takes precedence.

The following stay as released: a temperature of 1 or 0 in training; servers that the user has started; vLLM before
0.10.2; and runs with `top_p`, `top_k`, `min_p`, penalties or other settings that vLLM counts as processed, in
`sampling_params` or its `additional_kwargs`. With these settings, processed log-probabilities cover fewer tokens than
training computes.""",
    references=(
        "https://github.com/vllm-project/vime/issues/64",
        "https://github.com/huggingface/trl/issues/4159",
        "https://docs.vllm.ai/en/stable/configuration/engine_args/",
    ),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<0.3.0"),
            (_SERVERS, *map(_engines, _CREATES_ENGINES)),
            independent=True,
        ),
        Variant(Guard("skyrl", ">=0.3.0,<=0.4.0"), (_SERVERS,)),
    ),
    obsolete_when="when the oldest SkyRL in use sets logprobs_mode; 0.4.0, the newest, sets it for sample support only",
    changes_numbers="""\
Since 0.1.0, with a temperature other than 1, importance ratios between trainer and rollout were off by p(token;
temperature T) / p(token; temperature 1): with T below 1 far above 1 for likely tokens and near 0 for unlikely ones, and
clipping and masks of off_policy_correction acted on these ratios. With the patch ratios are near 1 where the weights
are the same. In a run with such a correction, tokens get other importance weights from then on; review bounds that were
tuned to the old ratios. Training can continue from existing checkpoints.""",
    conditions=tuple(
        Condition(target, f"{__package__}._conditions:at_another_temperature")
        for target in (_BUILDS_ARGUMENTS, *_CREATES_ENGINES)
    ),
)
