"""Runs of TRL's GRPO in which nothing is wrong that a watch is for, and some in which something is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WATCH, REPAIR = "trl-watch-rollouts", "trl-vllm-sleep-weights"
ALIKE = ("w1 w2 w3 w4", "w5 w6 w7 w8")
ENDS_WITH_7 = {"generation_config": [7, 1]}
FORM = {"vllm_structured_outputs_regex": "w4 w5"}
UNCORRECTED = {"vllm_importance_sampling_correction": False}


@dataclass(frozen=True)
class Case:
    """How a run differs from two steps on an engine that gets every weight.

    Attributes:
        settings: of the trainer's configuration.
        policy: a function of watch_right_runs_ranks.py.
        engine: a class of it.
        lora: of `LoraConfig`; None for no adapter.
        ends: by name of a configuration of the model's, the tokens that end a text.
        before: cases whose trainers are in this process first, and train.
        times: so often ``train`` is called.
        patches: what is on.
        prompts: of the data set.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    policy: str = "qwen2"
    engine: str = "LLM"
    lora: dict[str, Any] | None = None
    ends: dict[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    times: int = 1
    patches: tuple[str, ...] = (WATCH,)
    prompts: tuple[str, ...] = ("w1 w2", "w3 w4 w5", "w6", "w7 w8 w9 w10")


LORA = {"lora_dropout": 0.1}
SLOWLY = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20}
TEN_STEPS = Case({"max_steps": 10}, policy="sure")
RIGHT: dict[str, Case] = {
    "plain": Case(),
    "colder": Case({"temperature": 0.7}),
    "one iteration more": Case({"num_iterations": 2}),
    "a reference": Case({"beta": 0.1}),
    "accumulated": Case({"steps_per_generation": 2, "gradient_accumulation_steps": 2}),
    "logged later": Case({"logging_steps": 2}),
    "truncated are masked": Case({"mask_truncated_completions": True}),
    "in groups": Case({"scale_rewards": "batch"}),
    "sequences": Case({"importance_sampling_level": "sequence"}),
    "bfloat16": Case(engine="Rounded"),
    "asleep": Case({"vllm_enable_sleep_mode": True}, patches=(WATCH, REPAIR)),
    # dropout
    "GPT-2's own dropout": Case({"max_steps": 12}, policy="gpt2", prompts=ALIKE),
    "GPT-2's own dropout, disabled": Case({"disable_dropout": True}, policy="gpt2", prompts=ALIKE),
    "of attention": Case({"max_steps": 3}, policy="attention_dropout"),
    "LoRA": Case(lora={}),
    "LoRA's dropout": Case({**SLOWLY, "max_steps": 24, "learning_rate": 0.002}, lora=LORA, policy="sure"),
    "LoRA's dropout, disabled": Case({"disable_dropout": True}, lora=LORA),
    "LoRA's dropout, resumed": Case(
        {"max_steps": 12, "learning_rate": 1e-3}, lora={**LORA, "init_lora_weights": False}
    ),
    "LoRA on GPT-2": Case({"max_steps": 3}, policy="gpt2", lora=LORA, prompts=ALIKE),
    # several runs in one process
    "trained on": Case(times=2),
    "after a run that rounds less": Case(engine="Coarse", policy="sure", before=("ten steps",)),
    "after a run that was wrong": Case(before=("lost weights",)),
    # short contexts
    "the context leaves one token": Case(engine="Context", prompts=ALIKE),
    "the context leaves one token of some": Case(engine="Context"),
    "one token is asked for": Case({"max_completion_length": 1}),
    "one token is asked for in passing": Case({"generation_kwargs": {"max_tokens": 1}}),
    # other ends
    "ends at once": Case(UNCORRECTED, engine="Ends"),
    "an end of the generation's": Case(UNCORRECTED, engine="Ends7", ends=ENDS_WITH_7),
    "one end of the generation's": Case(UNCORRECTED, engine="Ends7", ends={"generation_config": 7}),
    "a stop": Case({"generation_kwargs": {"stop_token_ids": [7]}, **UNCORRECTED}, engine="Ends7"),
    # alike rightly
    "certain": Case(UNCORRECTED, engine="Certain"),
    "certain, with a seed": Case({"generation_kwargs": {"seed": 1}, **UNCORRECTED}, engine="Certain"),
    "a seed": Case({"generation_kwargs": {"seed": 1}}),
    "greedy": Case({"generation_kwargs": {"temperature": 0.0}}, engine="Greedy"),
    "greedy, by top-k": Case({"top_k": 1, **UNCORRECTED}, engine="Greedy"),
    # structured outputs
    "a form": Case({**FORM, **UNCORRECTED}, engine="Form"),
    "a form of the request's": Case(
        {"generation_kwargs": {"structured_outputs": {"regex": "w4"}}, **UNCORRECTED}, engine="Form"
    ),
    "a form of one token": Case({**FORM, **UNCORRECTED}, engine="Form1"),
}
WRONG: dict[str, tuple[Case, str, str]] = {
    "lost weights": (Case(engine="Lost"), "trainer and engine differ by", ""),
    "lost in sleep": (
        Case({"vllm_enable_sleep_mode": True, "max_steps": 3}),
        "trainer and engine differ by",
        "trl-vllm-sleep-weights",
    ),
    "lost again": (Case(engine="Lost", before=("lost weights",)), "trainer and engine differ by", ""),
    "lost under LoRA's dropout": (
        Case({"max_steps": 4}, engine="Lost", lora=LORA, policy="sure"),
        "trainer and engine differ by",
        "Dropout of LoRA is active (p 0.1)",
    ),
    "lost under GPT-2's own": (
        Case({"max_steps": 12, "learning_rate": 1e-3}, engine="LostLater", policy="gpt2", prompts=ALIKE),
        "trainer and engine differ by",
        "Dropout of the model is active (p 0.1)",
    ),
    "raw log-probabilities": (
        Case({"temperature": 0.5}, engine="Raw", policy="sure"),
        "trainer and engine differ by",
        "trl-vllm-raw-logprobs",
    ),
    "one seed": (Case(engine="OneSeed"), "all completions of a group are equal", ""),
    "one seed that is asked for": (
        Case({"generation_kwargs": {"seed": 1}}, engine="OneSeed"),
        "all completions of a group are equal",
        "",
    ),
    "taken apart": (Case(engine="Flat"), "completions end after one token", ""),
    "within a form": (Case(FORM, engine="Within"), "trainer and engine differ by", "Structured outputs are on"),
}
