"""Colocated vLLM with sleep mode: completions come from the policy's current weights."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_GENERATION = "trl.generation.vllm_generation:VLLMGeneration"
_HELPERS = f"{__package__}._engine_weights"


def _loaded_by(method: str) -> Rewrite:
    return Rewrite(
        target=method,
        pattern="self.llm.reset_prefix_cache()",
        replacement="$LOADED(self, self.llm.reset_prefix_cache())",
        uses={"LOADED": f"{_HELPERS}:loaded"},
    )


def _tools_of(trainer: str) -> Rewrite:
    """Ranks leave the tool loop one by one."""
    return Rewrite(
        target=f"{trainer}._generate",
        pattern="self._tool_call_loop",
        replacement="$ALONE(self, self._tool_call_loop)",
        uses={"ALONE": f"{_HELPERS}:on_its_own"},
    )


def _rollouts_of(trainer: str) -> Rewrite:
    """A user's function generates as often as it likes, a different number of times on each rank."""
    return Rewrite(
        target=f"{trainer}._generate",
        pattern="self.rollout_func(prompts, self)",
        replacement="$ALONE(self, self.rollout_func)(prompts, self)",
        uses={"ALONE": f"{_HELPERS}:on_its_own"},
    )


def _of_a_trainer(name: str, *, reloads: bool) -> tuple[Rewrite, ...]:
    """Up to 0.27.2 the trainer owns its engine."""
    trainer = f"trl.trainer.{name.lower()}_trainer:{name}Trainer"
    reload = 'self.llm.collective_rpc("reload_weights")'
    return (
        Rewrite(
            target=f"{trainer}._generate_single_turn",
            pattern="self.state.global_step != self._last_loaded_step",
            replacement="$DROPPED(self) or self.state.global_step != self._last_loaded_step",
            alongside=("self.llm.sleep(level=2)", *([reload] if reloads else [])),
            unless=() if reloads else (reload,),
            uses={"DROPPED": f"{_HELPERS}:dropped"},
        ),
    )


def _of_rollouts(engine: str) -> Rewrite:
    """A function that a `rollout_func` may call."""
    function = "_generate_rollout_completions_colocate" if "generation" in engine else "generate_rollout_completions"
    return Rewrite(
        target=f"trl.experimental.openenv.utils:{function}",
        pattern=f'{engine}.collective_rpc("reload_weights")',
        replacement="$WITH_WEIGHTS(trainer)",
        alongside=(f"{engine}.sleep(level=2)",),
        uses={"WITH_WEIGHTS": f"{_HELPERS}:with_weights_elsewhere"},
    )


_GENERATE = Rewrite(
    target=f"{_GENERATION}.generate",
    pattern='self.llm.collective_rpc("reload_weights")',
    replacement="$WITH_WEIGHTS(self)",
    alongside=("self.llm.sleep(level=2)",),
    uses={"WITH_WEIGHTS": f"{_HELPERS}:with_weights"},
)
_AWAKE = Rewrite(
    target=f"{_GENERATION}.sync_weights",
    pattern="model = self.model",
    replacement="$AWAKE(self, torch.cuda.empty_cache); model = self.model",
    unless=('self.llm.wake_up(tags=["weights"])',),
    uses={"AWAKE": f"{_HELPERS}:awake"},
)
_TOOLS = _tools_of("trl.trainer.grpo_trainer:GRPOTrainer")
_TOOLS_OF_DPPO = _tools_of("trl.experimental.dppo.dppo_trainer:DPPOTrainer")
_ROLLOUT_FUNC = _rollouts_of("trl.trainer.grpo_trainer:GRPOTrainer")
_ROLLOUT_FUNC_OF_DPPO = _rollouts_of("trl.experimental.dppo.dppo_trainer:DPPOTrainer")
_LOADED = _loaded_by(f"{_GENERATION}.sync_weights")
_ROLLOUTS = _of_rollouts("trainer.vllm_generation.llm")


def _of_the_generation(versions: str, *more: Rewrite) -> Variant:
    return Variant(Guard("trl", versions), (_GENERATE, _LOADED, _TOOLS, *more), independent=True)


PATCH = Patch(
    name="trl-vllm-sleep-weights",
    summary="completions of a colocated vLLM with sleep mode come from the policy's current weights",
    harm="wrong data",
    affects_rollouts=True,
    bug="vLLM generates with the checkpoint's weights, or with none, not with the policy's",
    when='vLLM with vllm_mode="colocate" and vllm_enable_sleep_mode',
    excluded_by=("vllm_enable_sleep_mode=false|absent", "use_vllm=false|absent"),
    symptom="""\
The bug affects `GRPOTrainer`, `RLOOTrainer` and other trainers with `vllm_mode="colocate"` and
`vllm_enable_sleep_mode=True`. From TRL 0.28.0 on, every completion comes from the initial model, however long training
runs. `sampling/sampling_logp_difference` grows, and the reward does not improve. In 0.26.0 to 0.27.2 this affects each
generation that does not follow an optimizer step: with `steps_per_generation` below `gradient_accumulation_steps`,
after a tool call, in all batches of an evaluation except the first, and in the step after the evaluation. In 0.25.0 and
0.25.1 these completions come from uninitialized memory. No error.""",
    cause="""\
Sleep at level 2 drops vLLM's weights. Since 0.26.0 the trainer calls `reload_weights` after waking, which reads the
weights from the checkpoint. Since 0.28.0 it does so after it has loaded the policy's weights, and overwrites them. If
the step equals that of the last load, the trainer does not load the policy's weights at all.""",
    repair="""\
Whenever vLLM has slept, the patch loads the policy's weights before vLLM generates, as in 1.10.0. If the trainer has
just loaded the weights, they are left as they are; since 0.28.0 the patch also skips the read of the checkpoint. The
same applies to `generate_rollout_completions` of `trl.experimental.openenv`. In 0.28.0 the patch allocates the memory
before the load, as in 0.29.0. Without sleep mode nothing changes.

Not repaired: on several ranks with weights sharded by ZeRO-3 or FSDP, completions after a tool call, and those of a
`rollout_func` unless the trainer has just loaded the weights, come from the checkpoint as before. Ranks leave these
loops one by one, and a gather of the weights would wait for all ranks (1.10.0 gathers). A trainer up to 0.27.2 with
its own `_generate` or `_generate_single_turn` is not repaired there either. From 0.28.0 on, such a trainer waits for
the other ranks if it generates more often on one rank than on another. Also not repaired: the trainers of GOLD until
1.0.0rc1 and of Online DPO, which have their own engines, and a `rollout_func` that puts the engine to sleep by
itself.""",
    changes_numbers="""\
Since TRL 0.25.0 with sleep mode at level 2, and for every completion since 0.28.0, GRPO and RLOO trained on samples
from the initial model, with an importance ratio that grows and is clipped or truncated. With the patch training is
on-policy. Hyperparameters that were tuned without the patch rarely suit a run with it.""",
    references=(
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/huggingface/trl/pull/5313",
        "https://github.com/huggingface/trl/pull/5147",
        "https://github.com/vllm-project/vllm/issues/29341",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.25.0,<0.26.0"),
            (*_of_a_trainer("GRPO", reloads=False), *_of_a_trainer("RLOO", reloads=False)),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=0.26.0,<0.28.0"),
            (
                *_of_a_trainer("GRPO", reloads=True),
                *_of_a_trainer("RLOO", reloads=True),
                _loaded_by("trl.trainer.grpo_trainer:GRPOTrainer._move_model_to_vllm"),
                _TOOLS,
                _of_rollouts("trainer.llm"),
            ),
            independent=True,
        ),
        _of_the_generation(">=0.28.0,<0.29.0", _AWAKE, _ROLLOUTS),
        _of_the_generation(">=0.29.0,<0.29.1", _ROLLOUTS),
        _of_the_generation(">=0.29.1,<=0.29.1", _ROLLOUTS, _ROLLOUT_FUNC),
        _of_the_generation(">=1.0.0rc1,<1.9.0", _ROLLOUTS, _TOOLS_OF_DPPO, _ROLLOUT_FUNC, _ROLLOUT_FUNC_OF_DPPO),
        _of_the_generation(">=1.9.0,<1.10.0", _ROLLOUT_FUNC),
    ),
    obsolete_when="when the oldest trl in use is 1.10.0",
    conditions=(
        *(
            Condition(f"trl.trainer.{function}", f"{__package__}._conditions:sleeps")
            for function in (
                "grpo_trainer:GRPOTrainer._generate_single_turn",
                "grpo_trainer:GRPOTrainer._generate",
                "rloo_trainer:RLOOTrainer._generate_single_turn",
            )
        ),
        Condition(f"{_GENERATION}.sync_weights", f"{__package__}._conditions:engine_sleeps"),
    ),
)
