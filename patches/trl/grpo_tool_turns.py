"""GRPO's tool loop on a vLLM server: after a tool call each conversation continues, not every G-th."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
_AFTER_A_TOOL: ContextVar[bool] = ContextVar("after_a_tool", default=False)


def each_once(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``generate`` for prompts that each have their own history.

    A context variable carries this, not an argument: a subclass that overrides the method may not accept an argument.
    """

    def generated(*args: Any, **kwargs: Any) -> Any:
        token = _AFTER_A_TOOL.set(True)
        try:
            return generate(*args, **kwargs)
        finally:
            _AFTER_A_TOOL.reset(token)

    return generated


def generations(of_a_prompt: int) -> int:
    """The number of completions of each prompt; 1 after a tool call."""
    return 1 if _AFTER_A_TOOL.get() else of_a_prompt


def _changes(alongside: tuple[str, ...] = (), unless: tuple[str, ...] = ()) -> tuple[Rewrite, Rewrite]:
    return (
        Rewrite(
            target=f"{_TRAINER}._tool_call_loop",
            pattern="self._generate_single_turn",
            replacement="$EACH_ONCE(self._generate_single_turn)",
            inside="self._generate_single_turn($$$)",
            alongside=alongside,
            unless=("self._generate_single_turn($$$, num_generations=1, $$$)", *unless),
            uses={"EACH_ONCE": f"{__name__}:{each_once.__name__}"},
        ),
        Rewrite(
            target=f"{_TRAINER}._generate_single_turn",
            pattern='self.num_generations if mode == "train" else self.num_generations_eval',
            replacement='$GENERATIONS(self.num_generations if mode == "train" else self.num_generations_eval)',
            uses={"GENERATIONS": f"{__name__}:{generations.__name__}"},
        ),
    )


PATCH = Patch(
    name="trl-grpo-tool-turns",
    summary="GRPO with tools on a vLLM server continues each conversation with its own tool result",
    harm="wrong data",
    affects_rollouts=True,
    bug="after a tool call most conversations continue with a completion that was generated for another one",
    when="GRPOTrainer with tools or environments, and vllm_mode=server",
    excluded_by=("use_vllm=false|absent", "vllm_mode=colocate|absent", "trl=sft|dpo|kto|reward|rloo"),
    symptom="""\
`GRPOTrainer` with `tools` (or environments) and `vllm_mode="server"`: the text after a tool call does not fit the
conversation. Of the conversations that have called a tool, the trainer continues only every `num_generations`-th, but
each of these `num_generations` times. The others receive these continuations, with their log-probabilities: the answer
to another prompt, or to another tool result. Rewards, importance ratios and gradients are computed from such texts. No
error, on one GPU too.""",
    cause="""\
The loop reuses the method of the first generation, where prompts come in groups of `num_generations` equal prompts:
the client sends every `num_generations`-th prompt with `n=num_generations`. After a tool call each conversation has
its own history, and only those that called a tool are left.""",
    repair="""\
After a tool call the trainer requests one completion for each prompt, as in 1.14.1. The first turn is unchanged. vLLM
within the trainer's process, which was right, and runs without vLLM are unchanged too. On several ranks
`trl-grpo-tool-lockstep` gives each rank its own completions. Not repaired: DPPO in `trl.experimental` of these
releases, which has its own loop.""",
    changes_numbers="""\
Since TRL 1.0.0, GRPO with tools on a vLLM server trained on conversations whose turns after the first tool call mostly
came from other conversations. Runs with the patch are not comparable with earlier ones; a policy trained without the
patch may have learned to answer without its tools.""",
    references=("https://github.com/huggingface/trl/pull/6673",),
    variants=(
        # Before 1.0.0 the loop rejects a server.
        Variant(Guard("trl", ">=1.0.0,<1.2.0"), _changes(alongside=('self.use_vllm and self.vllm_mode == "server"',))),
        Variant(Guard("trl", ">=1.2.0,<1.14.1"), _changes(unless=("raise NotImplementedError($$$)",))),
    ),
    obsolete_when="when the oldest trl in use is 1.14.1",
    conditions=(
        Condition("trl.trainer.grpo_trainer:GRPOTrainer._tool_call_loop", f"{__package__}._conditions:on_a_server"),
    ),
)
