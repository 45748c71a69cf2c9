"""ms-swift's rollouts with `vllm_enable_lora`: vLLM's base weights do not contain the adapter."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def sent_apart(trainer: Any) -> bool:
    """Whether vLLM gets the adapter separately: not at sleep level 2, where each update sends all weights."""
    return bool(trainer.rollout_enable_lora) and getattr(trainer.args, "sleep_level", 0) != 2


def counts_twice(self: Any) -> bool | None:
    """Whether an adapter that is not new is sent apart, after base weights with it; None if it may be new.

    Also None at sleep level 2, at which releases differ.
    """
    apart, args = getattr(self, "rollout_enable_lora", None), getattr(self, "args", None)
    if not apart:
        return None if apart is None else False
    if getattr(args, "sleep_level", 0) == 2 or not hasattr(getattr(self, "model", None), "peft_config"):
        return None
    return True if getattr(args, "resume_from_checkpoint", None) or getattr(args, "adapters", None) else None


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
    summary="rollouts with vllm_enable_lora come from the policy: base weights, and the adapter once",
    harm="wrong data",
    affects_rollouts=True,
    bug="after a resume the adapter is merged into vLLM's base weights, and added to them again",
    when="GRPO or GKD with LoRA and vllm_enable_lora, and an adapter that is not new: resume_from_checkpoint, adapters",
    excluded_by=("vllm_enable_lora=false|absent", "use_vllm=false|absent"),
    symptom="""\
`vllm_enable_lora` with `--resume_from_checkpoint` or `--adapters`: from the second update on, rollouts come from the
base model with the adapter counted twice, up to incoherent text and rewards of 0. In 3.10.0 to 3.11.3 with `--adapters`
alone, the first rollouts come from the base model instead. In 3.11.1 to 3.11.3 with `sleep_level=2`, all of them do. No
error is raised.""",
    cause="""\
The first update sends vLLM all weights, with the adapter merged into them. Later updates send the adapter, which vLLM
adds to its weights. Up to 3.11.3, the adapter is merged only for `--resume_from_checkpoint`; otherwise the first update
lacks it.""",
    repair="""\
If vLLM gets the adapter separately, the first update sends base weights and then the adapter, as in 4.0.2. Without
`vllm_enable_lora`, nothing changes. Since 3.12.0, `sleep_level=2` is not affected, because every update sends merged
weights and no adapter. A new adapter has no effect yet, so its rollouts are unchanged.

The patch does not repair `sleep_level=2` in 3.10.0 to 3.11.0, where base weights that vLLM dropped are not sent
again.""",
    changes_numbers="""\
Since ms-swift 3.10.0, a run with `vllm_enable_lora` that was resumed, or started with an adapter, sampled with that
adapter's change counted twice. With the patch, it samples from the policy. Repeat the training after such a resume.""",
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
    conditions=tuple(
        Condition(f"{mixin}.{_SYNC}", f"{__name__}:{counts_twice.__name__}") for mixin in (_MIXIN, _MIXIN_4)
    ),
)
