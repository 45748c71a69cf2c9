"""GRPO's tool loop on a vLLM server: after a tool call each conversation is continued, not every G-th."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
_AFTER_A_TOOL: ContextVar[bool] = ContextVar("after_a_tool", default=False)


def each_once(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``generate`` for prompts each of which has a history of its own.

    Said by the context and not by an argument, which a subclass that overrides the method does not take.
    """

    def generated(*args: Any, **kwargs: Any) -> Any:
        token = _AFTER_A_TOOL.set(True)
        try:
            return generate(*args, **kwargs)
        finally:
            _AFTER_A_TOOL.reset(token)

    return generated


def generations(of_a_prompt: int) -> int:
    """How many completions of each prompt; after a tool call one."""
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
    bug="after a tool call most conversations are continued with what was generated for another one",
    when="GRPOTrainer with tools or environments, and vllm_mode=server",
    excluded_by=("use_vllm=false|absent", "vllm_mode=colocate|absent"),
    symptom="""\
`GRPOTrainer` with `tools` (or environments) and `vllm_mode="server"`: what follows a tool call does not fit it. Of the
conversations that have called a tool, only every `num_generations`-th is continued, as often as there are
generations, and the others are handed these continuations, with their log-probabilities: the answer to another prompt,
or to another tool result. Rewards, importance ratios and gradients are of such texts. No error, on one GPU too.""",
    cause="""\
The loop generates with the method that generates first, where prompts come in groups of `num_generations` that are
alike: the client sends every `num_generations`-th with `n=num_generations`. After a tool call each has a history of its
own, and only those that called a tool are left.""",
    repair="""\
After a tool call one completion is asked for each of the prompts, as in 1.14.1. The first turn is as it was, and so are
vLLM within the trainer's process, which was right, and runs without vLLM. On several ranks `trl-grpo-tool-lockstep`
hands each rank its own. Not repaired: DPPO in `trl.experimental` of these releases, which has a loop of its own.""",
    changes_numbers="""\
Since TRL 1.0.0, GRPO with tools on a vLLM server trained on conversations whose turns after the first tool call were
mostly those of others. Runs with the patch are not to be compared with those before; a policy that was trained so may
have learned to answer without its tools.""",
    references=("https://github.com/huggingface/trl/pull/6673",),
    variants=(
        # Before 1.0.0 the loop refuses a server.
        Variant(Guard("trl", ">=1.0.0,<1.2.0"), _changes(alongside=('self.use_vllm and self.vllm_mode == "server"',))),
        Variant(Guard("trl", ">=1.2.0,<1.14.1"), _changes(unless=("raise NotImplementedError($$$)",))),
    ),
    obsolete_when="when the oldest trl in use is 1.14.1",
    conditions=(
        Condition("trl.trainer.grpo_trainer:GRPOTrainer._tool_call_loop", f"{__package__}._conditions:on_a_server"),
    ),
)
