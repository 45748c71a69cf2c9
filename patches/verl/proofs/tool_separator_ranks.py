"""A conversation of verl's real tool agent loop, with a server that returns given answers: ``--out FOLDER``.

The tokenizer is a byte tokenizer with ChatML's tokens, so that decoding returns its input. The server replaces vLLM's
or SGLang's: it records the tokens of its prompt, and returns the tokens up to the one at which generation stops.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from rlhf_patches.proving import states

PATCH = "verl-tool-separator"
START, END = "<|im_start|>", "<|im_end|>"
LONG = 4096
SYSTEM = "{{ '<|im_start|>system\\nHelp.' }}{% if tools %}{{ tools | tojson }}{% endif %}{{ '<|im_end|>\\n' }}"
CHATML = (
    f"{SYSTEM}{{% for m in messages if m.role %}}{{% if m.role == 'tool' %}}"
    "{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{{ '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Like Qwen's templates: a system prompt, and consecutive tool results in one user's turn.

verl up to 0.6.1 renders the system prompt with a message that has no role.
"""
QUESTION = [{"role": "user", "content": "How much is 2 + 3, and 4 + 5?"}]


def call(*numbers: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps({"numbers": numbers})}}}\n</tool_call>'


TURNS = (call(2, 3), call(4, 5) + "\n" + call(5, 9), "5, 9 and 14.")
RESULTS = tuple([{"role": "tool", "content": result} for result in turn] for turn in (["5"], ["9", "14"]))


def tokenizer(template: str, *special: str) -> Any:
    """A byte tokenizer with ChatML's special tokens and further ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(letters, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=END, pad_token="<|pad|>", additional_special_tokens=[START, *special]
    )
    made.chat_template = template
    return made


class Server:
    """Returns one turn after the other, and records the prompts that it receives."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.turns, self.asked = list(turns), list[list[int]]()

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> Any:
        self.asked.append(list(prompt_ids))
        tokens = list(self.turns[len(self.asked) - 1])
        try:
            kind = importlib.import_module("verl.workers.rollout.replica").TokenOutput
        except ModuleNotFoundError:  # 0.5.0 returns the tokens
            return tokens
        return kind(token_ids=tokens, log_probs=[-(1 + at) / 64 for at in range(len(tokens))])


def adder() -> Any:
    tools: Any = importlib.import_module("verl.tools.base_tool")
    schemas: Any = importlib.import_module("verl.tools.schemas")
    parameters = {"type": "object", "properties": {"numbers": {"type": "array"}}, "required": ["numbers"]}
    function = {"name": "add", "description": "the sum", "parameters": parameters}

    class Adder(tools.BaseTool):
        async def create(self, *_: Any, **__: Any) -> Any:
            return ("an instance", None) if hasattr(schemas, "ToolResponse") else "an instance"

        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            said = str(sum(parameters["numbers"]))
            return schemas.ToolResponse(text=said) if hasattr(schemas, "ToolResponse") else said, 0.0, {}

    return Adder({}, schemas.OpenAIFunctionToolSchema(type="function", function=function))


def made(words: Any, server: Server, response_length: int, processor: Any) -> Any:
    """The loop as verl's worker creates it."""
    omegaconf: Any = importlib.import_module("omegaconf")
    loops: Any = importlib.import_module("verl.experimental.agent_loop.tool_agent_loop")
    base: Any = importlib.import_module("verl.experimental.agent_loop.agent_loop")
    turns = {
        **{"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 2},
        **{"max_tool_response_length": 256, "tool_response_truncate_side": "middle", "format": "hermes"},
        **{"tool_config_path": None, "interaction_config_path": None, "enable": True, "function_tool_path": None},
    }
    rollout = {
        **{"multi_turn": turns, "prompt_length": LONG, "response_length": response_length},
        **{"full_determinism": False},
    }
    data = {"continuous_token": {"enable": False}, "apply_chat_template_kwargs": {"unused": True}}
    config = omegaconf.OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout, "model": {"path": "a model"}}, "data": data}
    )
    kind = loops.ToolAgentLoop
    kind._class_initialized = False  # up to 0.6.1: once per process
    wrap = getattr(base, "DictConfigWrap", None) or base._DummyConfig
    tool = adder()
    takes = inspect.signature(base.AgentLoopBase.__init__).parameters
    given = {
        "trainer_config": wrap(config),
        "server_manager": server,
        "tokenizer": words,
        "processor": processor,
        "dataset_cls": Dataset,
        "dataset_config": config.data,
        "data_config": wrap(config.data),
        "hf_model_type": "qwen2",  # 0.9.1 knows the separator of some model types
    }
    loop = kind(**{name: value for name, value in given.items() if name in takes})
    loop.tools = {"add": tool}
    loop.tool_schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)]
    return loop


class Dataset:
    """verl's data set, with text only."""

    @staticmethod
    async def process_vision_info(*_: Any, **__: Any) -> tuple[None, None]:
        return None, None


def rollout(
    words: Any,
    turns: Sequence[str],
    response_length: int = LONG,
    processor: Any = None,
    change: Callable[[Any], None] = lambda loop: None,
) -> tuple[Any, list[list[int]]]:
    """The result of verl's loop, and the prompts that the server received.

    Args:
        words: the tokenizer.
        turns: the generated turns, including the stop token.
        response_length: verl's setting.
        processor: like that of a model for images.
        change: changes the loop before it runs.
    """
    server = Server([words.encode(turn) for turn in turns])

    async def run() -> Any:
        loop = made(words, server, response_length, processor)
        change(loop)
        extra = {"interaction_kwargs": {"name": "a user"}}
        if "messages" in inspect.signature(type(loop).run).parameters:
            return await loop.run(list(QUESTION), {})
        return await loop.run({}, raw_prompt=list(QUESTION), extra_info=extra)

    output = asyncio.run(run())
    assert len(output.response_ids) == len(output.response_mask) <= response_length
    return output, server.asked


def said(words: Any, output: Any) -> dict[str, Any]:
    return {
        "prompt": words.decode(output.prompt_ids),
        "response": words.decode(output.response_ids),
        "tokens": output.response_ids,
    }


def whole(words: Any, turns: Sequence[str] = TURNS, answers: Sequence[list[dict[str, str]]] = RESULTS) -> str:
    """The template's text of the whole conversation, with the start of the next turn if the last one is answered.

    Args:
        words: the tokenizer.
        turns: the assistant's turns.
        answers: the messages that answer a turn.
    """
    messages = list(QUESTION)
    for turn, answer in zip_longest(turns, answers, fillvalue=()):
        messages += [{"role": "assistant", "content": str(turn)}, *answer]
    tool = adder().tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    answered = len(answers) == len(turns)
    text: str = words.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=answered)
    return text


def observe() -> dict[str, Any]:
    words = tokenizer(CHATML)
    output, _ = rollout(words, [turn + END for turn in TURNS])
    return {"ChatML": said(words, output), "whole": {"ChatML": whole(words)}}


def main() -> None:
    states.report(PATCH, observe, states.parser().parse_args().out)
