"""TRL's own GRPO trainer with a tool, and in the place of vLLM an engine whose tokens tell what it was given.

`VLLMGeneration`, the tool loop and what makes a batch of it are TRL's. The engine's answer, and what it says of its
log-probabilities, are made from the prompt alone: so each turn of a conversation says whether it was made for it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAD, END, UNKNOWN, CALL, USER, ASSISTANT, TOOL = range(7)
_CALLED = json.dumps({"type": "function", "function": {"name": "look", "arguments": {}}})
NAMES = ("<pad>", "<eos>", "<unk>", f"<tool_call>{_CALLED}</tool_call>", "user", "assistant", "tool")
FIRST_WORD, WORDS = len(NAMES), 200
CALLS = {"never": (0, 0), "first": (1, 0), "both": (1, 1), "twice": (2, 2), "second": (0, 1)}
"""How often the two completions of a prompt with this word call the tool."""
_WORDS = [*CALLS, *(f"w{number}" for number in range(WORDS - len(CALLS)))]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{{ c.function.arguments | tojson }} {% endfor %}{{ m.content }} "
    "{{ '<eos> ' if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string", "x-regex": r"^(.*?)(?:<tool_call>.*)?$"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": "<tool_call>(.*?)</tool_call>",
            "items": {"x-parser": "json", "type": "object"},
        },
    },
}
"""For transformers before 5.13."""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
        "content": {"close": "<eos>", "content": "text"},
    },
}


def look() -> str:
    """Look it up."""
    return "w150 w151"


def tokenizer() -> Any:
    """Of whole words, one of which is a tool call."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate((*NAMES, *_WORDS))}, unk_token=NAMES[UNKNOWN])
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=NAMES[PAD], eos_token=NAMES[END], unk_token=NAMES[UNKNOWN]
    )
    made.chat_template = TEMPLATE
    if hasattr(made, "response_template"):
        made.response_template = RESPONSE
    else:
        made.response_schema = SCHEMA
    return made


def answer(context: Sequence[int], number: int) -> tuple[list[int], list[float]]:
    """The ``number``-th completion of a context, and its log-probabilities: of nothing but these two."""
    digest = hashlib.sha256(json.dumps([list(context), number]).encode()).digest()
    tokens = [FIRST_WORD + len(CALLS) + one % 100 for one in digest[: 2 + digest[3] % 2]]
    word = next((token for token in context if FIRST_WORD <= token < FIRST_WORD + len(CALLS)), None)
    wanted = 0 if word is None else max(tuple(CALLS.values())[word - FIRST_WORD])
    if not context.count(CALL):
        wanted = 0 if word is None else tuple(CALLS.values())[word - FIRST_WORD][number % 2]
    tokens += [CALL, END] if context.count(CALL) < wanted else [END]
    return tokens, [-(1 + one) / 1000 for one in digest[8 : 8 + len(tokens)]]


class Client:
    """A vLLM server's client: of ``prompts`` in turn, of each ``n`` completions, as the server answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was asked."""
        self.asked: list[tuple[int, int]] = []

    def generate(self, prompts: list[list[int]], n: int, **kwargs: Any) -> dict[str, Any]:
        assert prompts, "a server refuses a request without prompts"
        self.asked.append((len(prompts), n))
        answers = [answer(prompt, number) for prompt in prompts for number in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": [tokens for tokens, _ in answers],
            "logprobs": [[[one] for one in scores] for _, scores in answers],
            "logprob_token_ids": [[[one] for one in tokens] for tokens, _ in answers],
        }

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None  # of weights


class Engine:
    """vLLM within the process: ``LLM``, of which each rank of a group has to be given the same prompts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.begin()
        config = SimpleNamespace(max_model_len=int(kwargs.get("max_model_len") or 512))
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda _: None))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_config=config, model_executor=executor)

    def begin(self) -> None:
        """Forget what was asked."""
        self.asked: list[list[list[int]]] = []
        self.drawn: dict[tuple[int, ...], int] = {}

    def generate(self, prompts: list[dict[str, Any]], **kwargs: Any) -> list[Any]:
        assert prompts, "nobody knows what an engine does without prompts"
        given = [prompt["prompt_token_ids"] for prompt in prompts]
        self.asked.append(given)
        found = []
        for context in given:
            number = self.drawn[tuple(context)] = self.drawn.get(tuple(context), -1) + 1
            tokens, scores = answer(context, number)
            scored = [{token: SimpleNamespace(logprob=one, rank=1)} for token, one in zip(tokens, scores, strict=True)]
            output = SimpleNamespace(token_ids=tokens, logprobs=scored)
            found.append(SimpleNamespace(prompt_token_ids=context, outputs=[output]))
        return found

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def install() -> None:
    """Let TRL take these for vLLM."""
    import sys
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    import torch
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    vllm_generation.is_vllm_available = lambda *args, **kwargs: True
    vllm_generation.VLLMClient = Client
    vllm_generation.LLM = Engine
    vllm_generation.SamplingParams = SimpleNamespace
    if "StructuredOutputsParams" not in vars(vllm_generation):  # releases before 1.7 import vLLM where they generate
        for name in ("vllm", "vllm.sampling_params"):
            module = sys.modules[name] = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module).update(__version__="0.17.0", StructuredOutputsParams=SimpleNamespace)
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: 0  # asked for by releases before 1.7, for the client's communicator
    # The schema's parser is of the standard library; releases before 1.13 ask for this one all the same.
    grpo_trainer.is_jmespath_available = lambda: True


def trainer(out: Path, *, tools: bool = True, policy: Any = None, **settings: Any) -> Any:
    """A GRPO trainer of two completions for each prompt; of a small model, unless it is given one."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    import torch
    import trl
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=FIRST_WORD + WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=settings.pop("max_position_embeddings", 128),
    )
    defaults = {
        "output_dir": str(out / "trainer"),
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "beta": 0.0,
        "max_completion_length": 32,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "server",
        "temperature": 1.0,
    }
    return trl.GRPOTrainer(
        model=policy or Qwen2ForCausalLM(config),
        args=trl.GRPOConfig(**{**defaults, **settings}),
        reward_funcs=[lambda completions, **_: [float(len(str(one))) for one in completions]],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "never w1"}]}] * 8),
        processing_class=tokenizer(),
        tools=[look] if tools else None,
    )


class Collectives:
    """Counts those of torch's calls that this rank makes."""

    NAMES = ("all_gather_object", "broadcast_object_list", "all_gather_into_tensor", "all_gather", "all_reduce")

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> None:
        import torch

        self.theirs = {name: getattr(torch.distributed, name) for name in self.NAMES}
        for name, theirs in self.theirs.items():
            setattr(torch.distributed, name, self._counting(name, theirs))

    def _counting(self, name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            return theirs(*args, **kwargs)

        return counted

    def __exit__(self, *args: object) -> None:
        import torch

        for name, theirs in self.theirs.items():
            setattr(torch.distributed, name, theirs)


def generated(made: Any, prompts: Sequence[str], train: bool = True) -> dict[str, Any]:
    """The batch that the trainer makes of these prompts, each of which it is given once for each completion."""
    made.model.train(train)
    return made._generate_and_score_completions(
        [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts for _ in range(2)]
    )


def turns(batch: dict[str, Any]) -> list[list[str]]:
    """Of each conversation's turns whose they are: ``own``, or else what is wrong.

    A turn is a run of the assistant's tokens: what the engine answers where it is given all that stands before.
    """
    found = []
    for row, tokens in enumerate(batch["completion_ids"].tolist()):
        mask = batch["completion_mask"][row].tolist()
        assistant = batch["tool_mask"][row].tolist() if "tool_mask" in batch else mask
        scores = batch["sampling_per_token_logps"][row].tolist()
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        length, at, kinds = sum(mask), 0, []
        while at < length:
            end = next((here for here in range(at, length) if tokens[here] == END), length - 1) + 1
            if not assistant[at]:
                at += 1
                continue
            expected = [answer(prompt + tokens[:at], number) for number in range(2)]
            said = (tokens[at:end], [round(one, 5) for one in scores[at:end]])
            kinds.append("own" if said in [(one, [round(it, 5) for it in two]) for one, two in expected] else "wrong")
            at = end
        found.append(kinds)
    return found
