"""TRL's GRPO in runs in which nothing is wrong, while it is watched: ``--out FOLDER``.

The engine is sleeping_engine.py's, whose samples and log-probabilities are real. Each run's trainer has to be gone when
it is over: what a watch knows of a run keeps nothing alive.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.trl import _watched_rollouts
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states
from tests.harness import sleeping_engine, watched
from tests.patches.trl import vllm_sleep_weights_ranks as sleeping
from tests.patches.trl.watch_right_runs_cases import RIGHT, TEN_STEPS, WATCH, WRONG, Case
from tests.patches.trl.watch_rollouts_ranks import Certain, Ends, Flat, OneSeed

CASES = {**RIGHT, **{name: case for name, (case, *_) in WRONG.items()}}
BEFORE = {**CASES, "ten steps": TEN_STEPS}
LLM = sleeping_engine.LLM


class Ends7(Ends):
    """Ends each completion at once, with a token that the tokenizer does not know for one."""

    token = 7

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        return super()._sampled(given, sleeping_engine.SamplingParams(max_tokens=1))


class Rounded(LLM):
    """Computes with weights in bfloat16."""

    def _load_weights(self, weights: Any) -> None:
        super()._load_weights((name, self.rounded(value.detach())) for name, value in weights)

    def rounded(self, value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().double()


class Coarse(Rounded):
    """With weights in eight bits, by layer."""

    def rounded(self, value: torch.Tensor) -> torch.Tensor:
        step = value.abs().max().double().clamp(min=1e-6) / 40
        return (value.double() / step).round() * step


class Context(LLM):
    """Of five tokens."""

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        left = min(wanted.max_tokens, 5 - len(given))
        return super()._sampled(given, sleeping_engine.SamplingParams(max_tokens=left))


class Lost(LLM):
    """Loses what it is sent."""

    def _load_weights(self, weights: Any) -> None:
        for _ in weights:
            pass


class LostLater(LLM):
    """Loses all it has after ten steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loads: dict[str, int] = {}

    def _load_weights(self, weights: Any) -> None:
        for name, value in weights:
            self.loads[name] = self.loads.get(name, 0) + 1
            super()._load_weights([(name, value * (self.loads[name] <= 10))])


class Raw(LLM):
    """Says what log-probabilities are at temperature 1, whatever the temperature."""

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        made = super()._sampled(given, wanted)
        return with_raw(self, given, made.token_ids)


class Form(LLM):
    """Whose completions have to be the same words; it says of them what the model thinks."""

    words: tuple[int, ...] = (7, 8)
    within = False

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        return with_raw(self, given, list(self.words)[: wanted.max_tokens], self.within)


class Form1(Form):
    words = (7,)


class Within(Form):
    """Says of them that they are certain, which they are among what is allowed."""

    within = True


def with_raw(engine: Any, given: list[int], tokens: list[int], certain: bool = False) -> Any:
    """A completion of these tokens, with what the model thinks of each."""
    with torch.no_grad():
        scores = engine.weights(torch.tensor([given + tokens])).logits[0, len(given) - 1 : -1].log_softmax(-1)
    known = [0.0 if certain else float(row[token]) for row, token in zip(scores, tokens, strict=True)]
    pairs = zip(tokens, known, strict=True)
    logprobs = [{token: SimpleNamespace(logprob=value, rank=1)} for token, value in pairs]
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs, text="")


class Greedy(LLM):
    """Takes the likeliest token."""

    def _sampled(self, given: list[int], wanted: Any) -> Any:
        tokens: list[int] = []
        for _ in range(wanted.max_tokens):
            with torch.no_grad():
                tokens.append(int(self.weights(torch.tensor([given + tokens])).logits[0, -1].argmax()))
        return with_raw(self, given, tokens)


def qwen2() -> Any:
    return small.model()


def sure(model: Any = None) -> Any:
    """Of some tokens, as policies are."""
    model = small.model() if model is None else model
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    return model


def attention_dropout() -> Any:
    model = sure()
    model.config.attention_dropout = 0.2
    return model


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_positions=64, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False)
    config.bos_token_id = config.eos_token_id = 1
    return sure(GPT2LMHeadModel(config))


POLICIES = {made.__name__: made for made in (qwen2, sure, attention_dropout, gpt2)}
_OF_THE_ENGINE = (LLM, Certain, Context, Coarse, Ends, Ends7, Flat, Form, Form1, Greedy, Lost, LostLater, OneSeed)
ENGINES = {kind.__name__: kind for kind in (*_OF_THE_ENGINE, Raw, Rounded, Within)}


def made(case: Case, out: Path) -> Any:
    import peft
    import transformers

    folder = tempfile.mkdtemp(dir=out)
    POLICIES[case.policy]().save_pretrained(folder)
    torch.manual_seed(1)
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, ends in case.ends.items():
        getattr(policy, name).eos_token_id = ends
    more = {}
    if case.lora is not None:
        more["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", **case.lora)
    settings = {
        **{"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False, "learning_rate": 0.05},
        **{"temperature": 1.0, "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 2},
        **case.settings,
    }
    sleeping_engine.LLM = ENGINES[case.engine]  # type: ignore[misc]
    sleeping.use_the_engine()
    import trl.generation.vllm_generation as module

    module.StructuredOutputsParams = SimpleNamespace
    return small.rollouts(
        "GRPO", Path(folder), [sleeping.some_words], case.prompts, policy=policy, more=more, **settings
    )


def trained(case: Case, out: Path) -> dict[str, Any]:
    for name in case.before:
        trained(BEFORE[name], out)
    trainer = made(case, out)
    for _ in range(case.times):
        trainer.train()
    name = "sampling/sampling_logp_difference/mean"
    differences = [each[name] for each in trainer.state.log_history if name in each]
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    return {"differences": differences, "kept": gone() is not None}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in options.cases:
        case = CASES[name]
        try:
            run = functools.partial(trained, case, options.out)
            found[name] = watched.observe(WATCH, _watched_rollouts.FIGURES, run, case.patches)
        except Exception as error:  # of one run, which its test says
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
