"""TRL's Online DPO with vLLM: signs that completions are not those that were requested."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "trl-online-dpo-watch-rollouts"


def _wraps(trainer: str) -> tuple[Wrap, ...]:
    return tuple(
        Wrap(
            target=f"{trainer}._generate_vllm_{mode}",
            implementation=f"{__package__}._watched_online_dpo:around_generate",
            signature="(self, prompts, images=None)",
            signature_suffices="the watch reads the result only if it is lists of token ids",
        )
        for mode in ("server", "colocate")
    )


WATCH = Watch(
    name=NAME,
    summary="logs once if completions of Online DPO with vLLM have implausible lengths",
    symptom="""\
One line per figure, at level warning:

    trl-online-dpo-watch-rollouts: completions end after one token that does not end a text: a share of 1 ...""",
    cause="Lists of tokens were split, or the request to the engine exceeded the limit.",
    looks_at="The lists of token ids that `_generate_vllm_server` and `_generate_vllm_colocate` return.",
    limits=figures.LENGTHS,
    points_to=("trl-online-dpo-server",),
    references=("https://github.com/huggingface/trl/pull/6228",),
    variants=(
        Variant(Guard("trl", ">=0.23.0,<0.26.0"), _wraps("trl.trainer.online_dpo_trainer:OnlineDPOTrainer")),
        Variant(Guard("trl", ">=0.26.0"), _wraps("trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer")),
    ),
    obsolete_when="when TRL itself logs it",
    affects_rollouts=True,
    observations=f"{__package__}._watched_online_dpo:observed",
)
