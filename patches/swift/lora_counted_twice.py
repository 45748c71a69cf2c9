"""ms-swift's rollouts with `vllm_enable_lora`: vLLM's base weights have no adapter in them."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def sent_apart(trainer: Any) -> bool:
    """Whether vLLM gets the adapter as one: not where it sleeps at level 2, and is sent all weights each time."""
    return bool(trainer.rollout_enable_lora) and getattr(trainer.args, "sleep_level", 0) != 2


_USES = {"SENT_APART": f"{__name__}:sent_apart"}
_MIXIN = "swift.trainers.rlhf_trainer.rollout_mixin:RolloutTrainerMixin"
_MIXIN_4 = "swift.rlhf_trainers.rollout_mixin:RolloutTrainerMixin"
_SYNC = "_move_full_model_to_vllm"


def _unmerged(target: str, pattern: str, matches: int = 1) -> Rewrite:
    return Rewrite(
        target=target,
        pattern=pattern,
        replacement=f"({pattern} and not $SENT_APART(self))",
        matches=matches,
        unless=("not self.rollout_enable_lora",),
        uses=_USES,
    )


def _then_the_adapter(mixin: str, sent_apart: str = "$SENT_APART(self)") -> Rewrite:
    return Rewrite(
        target=f"{mixin}.{_SYNC}",
        pattern="self.base_sync_done = True",
        replacement=f"self.base_sync_done = True; {sent_apart} and self._move_adapter_to_vllm()",
        unless=("self._move_adapter_to_vllm()",),
        uses=_USES if "$" in sent_apart else {},
    )


def _since_3_12_1(versions: str, mixin: str) -> Variant:
    return Variant(
        Guard("ms-swift", versions),
        (
            _unmerged(f"{mixin}._collect_state_dict_for_vllm", "self._is_fsdp2 and is_peft", matches=2),
            _unmerged(f"{mixin}.{_SYNC}", "is_peft and not self._is_fsdp2"),
            _then_the_adapter(mixin),
        ),
    )


PATCH = Patch(
    name="swift-lora-counted-twice",
    summary="rollouts with vllm_enable_lora are the policy's: base weights, and the adapter once",
    harm="wrong data",
    affects_rollouts=True,
    bug="after a resume the adapter is merged into vLLM's base weights, and added to them once more",
    when="GRPO or GKD with LoRA and vllm_enable_lora, and an adapter that is not new: resume_from_checkpoint, adapters",
    excluded_by=("vllm_enable_lora=false|absent", "use_vllm=false|absent"),
    symptom="""\
`vllm_enable_lora` with `--resume_from_checkpoint` or `--adapters`: from the second update on, rollouts are those of
the base model with the adapter counted twice, up to text without any form and rewards of 0. In 3.10.0 to 3.11.3 with
`--adapters` alone the first rollouts are the base model's instead; in 3.11.1 to 3.11.3 with `sleep_level=2` all of them
are. No error.""",
    cause="""\
The first update sends vLLM all weights, with the adapter merged into them, and those after it send the adapter, which
vLLM adds to what it has. Up to 3.11.3 it is merged only for `--resume_from_checkpoint`, or the first does without.""",
    repair="""\
Where vLLM gets the adapter as one, the first update sends base weights and then the adapter, as 4.0.2 does. Without
`vllm_enable_lora` nothing changes; from 3.12.0 on `sleep_level=2` stays as it was, where every update sends merged
weights and no adapter. An adapter that is new does nothing yet, so its rollouts stay what they were.

Not repaired: `sleep_level=2` in 3.10.0 to 3.11.0, where base weights that vLLM dropped are not sent again.""",
    changes_numbers="""\
Since ms-swift 3.10.0 a run with `vllm_enable_lora` that was resumed, or began with an adapter, sampled with that
adapter's change counted twice. With the patch it samples from the policy. What was trained after such a resume should
be trained again from there.""",
    references=(
        "https://github.com/modelscope/ms-swift/issues/8233",
        "https://github.com/modelscope/ms-swift/pull/8275",
    ),
    variants=(
        Variant(
            Guard("ms-swift", ">=3.10.0,<3.12.0"),
            (
                Rewrite(
                    target=f"{_MIXIN}.{_SYNC}",
                    pattern="is_peft and self.should_merge_adapter",
                    replacement="is_peft and self.should_merge_adapter and not self.rollout_enable_lora",
                    matches=2,
                ),
                _then_the_adapter(_MIXIN, "self.rollout_enable_lora"),
            ),
        ),
        Variant(
            Guard("ms-swift", ">=3.12.0,<3.12.1"),
            (
                _unmerged(f"{_MIXIN}._get_merged_state_dict_for_vllm", "self._is_fsdp2 and is_peft", matches=2),
                _unmerged(f"{_MIXIN}._get_merged_state_dict_for_vllm", "is_peft and not self._is_fsdp2", matches=2),
                _then_the_adapter(_MIXIN),
            ),
        ),
        _since_3_12_1(">=3.12.1,<4.0.0", _MIXIN),
        _since_3_12_1(">=4.0.0,<4.0.2", _MIXIN_4),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.0.2",
)
