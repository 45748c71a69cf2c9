"""Conversations of verl's real tool agent loop, with a server that says what it is told to: ``--out FOLDER``.

The tokenizer is one of bytes, with ChatML's tokens, so that what it is given is what it decodes. The server stands for
vLLM's or SGLang's: it records the tokens of its prompt, and returns those up to the one at which generation stops.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import inspect
import itertools
import json
import types
from collections.abc import Sequence
from typing import Any, ClassVar

from rlhf_patches.patches.verl import tool_separator
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

PATCH = "verl-tool-separator"
START, END, CLOSED, STOPPED = "<|im_start|>", "<|im_end|>", "<|end|>", "<|stop|>"
LONG = 4096
_TURN = (
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{{ '<|im_end|>' + after if loop.last or loop.nextitem.role != 'tool' else '' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + before + '<|im_end|>' + after }}{% endif %}"
)
_SYSTEM = "{{ '<|im_start|>system\\nHelp.' }}{% if tools %}{{ tools | tojson }}{% endif %}{{ '<|im_end|>' + after }}"


def _chatml(after: str, before: str = "", system: str = _SYSTEM) -> str:
    """ChatML as Qwen's templates have it: a system prompt, and tools' results side by side in a user's turn.

    Args:
        after: what is between the token that closes a turn and the next turn.
        before: what is between the content and that token.
        system: what comes first; verl to 0.6.1 asks for it with a message that has no role.
    """
    return (
        f"{{% set after = '{after}' %}}{{% set before = '{before}' %}}{system}"
        f"{{% for m in messages if m.role %}}{_TURN}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


TEMPLATES = {
    "ChatML": _chatml("\\n"),
    "no system prompt": _chatml("\\n", system=""),
    "two newlines": _chatml("\\n\\n"),
    "another token": _chatml("<|end|>"),
    "a newline before": _chatml("\\n", before="\\n"),
    "between turns": (
        "{% for m in messages if m.role %}{{ '' if loop.first else '\\n' }}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ '\\n<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
    ),
    "no separator": _chatml(""),
    "before each turn": (
        "{% for m in messages if m.role %}"
        "{{ '\\n<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ '\\n<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
    ),
    "answers end in words": (
        "{% for m in messages if m.role %}{{ '[INST] ' + m.content + ' [/INST]' if m.role != 'assistant' else "
        "' ' + m.content + '<|im_end|>' }}{% endfor %}"
    ),
    "closed by words": (
        "{% for m in messages if m.role %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt else '' }}"
    ),
    "cannot be asked": "{{ raise_exception('') if messages[2] and messages[2].role == 'user' }}" + _chatml("\\n"),
    "content left out": "{% for m in messages if m.role %}{{ '<|im_start|>' + m.role + '<|im_end|>\\n' }}{% endfor %}",
}
SEPARATED = ("ChatML", "no system prompt", "two newlines", "another token", "a newline before", "between turns")
LIMITS = range(-1, 4)
"""Of the response, from the end of the first tool's turn as it is rendered by itself."""
USER = ("Sure?", "Thanks.")
QUESTION = [{"role": "user", "content": "How much is 2 + 3, and 4 + 5?"}]


def call(*numbers: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps({"numbers": numbers})}}}\n</tool_call>'


TURNS = (call(2, 3), call(4, 5) + "\n" + call(5, 9), "5, 9 and 14.")
RESULTS = (["5"], ["9", "14"])


def tool_turn(results: Sequence[str]) -> str:
    """Of ChatML, by itself."""
    said = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"{START}user\n{said}{END}\n{START}assistant\n"


RENDERED: list[int] = []
"""Of each rendering the number of messages."""


def tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    class Words(PreTrainedTokenizerFast):
        def apply_chat_template(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            RENDERED.append(len(messages))
            return super().apply_chat_template(messages, *args, **kwargs)

    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(letters, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = Words(
        tokenizer_object=plain, eos_token=END, pad_token="<|pad|>", additional_special_tokens=[START, CLOSED, STOPPED]
    )
    made.chat_template = template
    return made


class Server:
    """Answers with one turn after the other, and records what it was asked with."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.turns, self.asked = list(turns), list[list[int]]()

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> Any:
        self.asked.append(list(prompt_ids))
        tokens = list(self.turns[len(self.asked) - 1])
        try:
            kind = importlib.import_module("verl.workers.rollout.replica").TokenOutput
        except ModuleNotFoundError:  # 0.5.0: the tokens
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


class Interaction:
    """A user who asks once more, and is content."""

    def __init__(self) -> None:
        self.asked = 0

    async def start_interaction(self, *_: Any, **__: Any) -> None:
        pass

    async def generate_response(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        return self.asked > 1, USER[self.asked - 1], 0.5, {}


def made(words: Any, server: Server, response_length: int, processor: Any = None) -> Any:
    """The loop as verl's worker makes it."""
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
    kind._class_initialized = False  # to 0.6.1: once in a process
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
        "hf_model_type": "qwen2",  # 0.9.1 has the separator of types that it knows
    }
    loop = kind(**{name: value for name, value in given.items() if name in takes})
    loop.tools = {"add": tool}
    loop.tool_schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)]
    return loop


class Dataset:
    """verl's, of text alone."""

    @staticmethod
    async def process_vision_info(*_: Any, **__: Any) -> tuple[None, None]:
        return None, None


def conversation(
    template: str,
    turns: Sequence[str] | None = None,
    *,
    stops: str = END,
    response_length: int = LONG,
    parser: str | None = None,
    interaction: bool = False,
    processor: bool = False,
    words: Any = None,
) -> dict[str, Any]:
    """A rollout, and what the server was asked with.

    Args:
        template: its name.
        turns: what is generated, without the token at which it stops; None is `TURNS`.
        stops: that token.
        parser: the format whose way to write a tool's turn is taken.
        interaction: whether a user answers.
        processor: whether there is one, as of a model for images.
        words: the tokenizer, in place of a new one.
    """
    words = words or tokenizer(TEMPLATES[template])
    stops = "\n" + stops if template == "a newline before" else stops
    server = Server([words.encode(turn + stops) for turn in turns or TURNS])

    async def run() -> Any:
        loop = made(words, server, response_length, processors(words) if processor else None)
        if parser is not None:
            loop.tool_parser_name = parser
        if interaction:
            loop.interaction_config_file, loop.interaction_map = "a file", {"a user": Interaction()}
        extra = {"interaction_kwargs": {"name": "a user"}}
        if "messages" in inspect.signature(type(loop).run).parameters:
            return await loop.run(list(QUESTION), {})
        return await loop.run({}, raw_prompt=list(QUESTION), extra_info=extra)

    output = asyncio.run(run())
    assert len(output.response_ids) == len(output.response_mask) <= response_length
    return {
        "prompt": words.decode(output.prompt_ids),
        "response": words.decode(output.response_ids),
        "tokens": output.response_ids,
        "generated": words.decode(list(itertools.compress(output.response_ids, output.response_mask))),
        "mask": output.response_mask,
        "scores": getattr(output, "response_logprobs", None),
        "asked": [words.decode(prompt) for prompt in server.asked],
        "turns": output.num_turns,
    }


def processors(words: Any) -> Any:
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):
        attributes: ClassVar[list[str]] = ["tokenizer"]
        tokenizer_class = "PreTrainedTokenizerFast"

        def __call__(self, text: Any = None, return_tensors: str = "pt", **_: Any) -> Any:
            return self.tokenizer(text, return_tensors=return_tensors)

    made = Processor(tokenizer=words, chat_template=words.chat_template)
    made.image_processor = types.SimpleNamespace(patch_size=14)
    return made


def whole(template: str, *answers: Any, turns: Sequence[str] = TURNS) -> str:
    """The template's, of all of it, and what begins the next turn where the last one is answered.

    Args:
        answers: what answers a turn: a tool's results, or what a user says.
        turns: what the assistant says.
    """
    words = tokenizer(TEMPLATES[template])
    messages = list(QUESTION)
    for turn, answer in itertools.zip_longest(turns, answers):
        messages.append({"role": "assistant", "content": turn})
        if isinstance(answer, str):
            messages.append({"role": "user", "content": answer})
        messages += [{"role": "tool", "content": each} for each in answer or [] if not isinstance(answer, str)]
    tool = adder().tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    answered = len(answers) == len(turns)
    return words.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=answered)


def rendered() -> list[int]:
    """How often templates are rendered in a conversation, in another one, and in one of another template."""
    words, found = tokenizer(TEMPLATES["ChatML"]), []
    for template in ("ChatML", "ChatML", "no system prompt"):
        words.chat_template = TEMPLATES[template]
        RENDERED.clear()
        conversation(template, words=words)
        found.append(len(RENDERED))
    return found


def touched() -> str | None:
    """What becomes of a tokenizer that is asked, and of tokens."""
    words = tokenizer(TEMPLATES["ChatML"])
    seen, turn = words.encode("5." + END), words.encode(f"{START}user")
    loop = types.SimpleNamespace(tokenizer=words, system_prompt=words.encode(f"{START}system\nHelp.{END}\n"))
    try:
        with untouched(loop, seen, turn):
            assert tool_separator.following(loop, seen, turn) == [*words.encode("\n"), *turn]
    except AssertionError as what:
        return str(what)
    return None


def observe() -> dict[str, Any]:
    loops: Any = importlib.import_module("verl.experimental.agent_loop.tool_agent_loop")
    found: dict[str, Any] = {name: conversation(name) for name in TEMPLATES}
    found["whole"] = {name: whole(name, *RESULTS) for name in (*SEPARATED, "no separator", "before each turn")}
    found["one turn"] = conversation("ChatML", ["5."])
    found["stopped elsewhere"] = conversation("ChatML", stops=STOPPED)
    found["without its end"] = conversation("ChatML", stops="")
    found["limits"] = limits()
    found["rendered"], found["touched"] = rendered(), touched()
    release = importlib.metadata.version("verl")
    if release not in ("0.5.0", "0.6.1"):
        found["a processor"] = conversation("ChatML", processor=True)
    for parser in ("gpt-oss", "gemma4"):
        if f'"{parser}"' in inspect.getsource(loops):
            found[parser] = conversation("ChatML", parser=parser)
    if hasattr(loops.ToolAgentLoop, "_handle_interacting_state"):
        turns = ["5.", "Yes."]
        found["a user"] = conversation("ChatML", turns, interaction=True)
        found["whole"]["a user"] = whole("ChatML", *USER, turns=turns)
    return found


def limits() -> list[list[int]]:
    """The masks where there is hardly room for the first tool's turn, or none."""
    first = len(tokenizer("").encode(TURNS[0] + END + tool_turn(RESULTS[0])))
    return [conversation("ChatML", response_length=first + more)["mask"] for more in LIMITS]


def yardstick() -> dict[str, Any]:
    """What a release that has it repaired makes of it."""
    return {name: conversation(name) for name in ("ChatML", "no system prompt")} | {"limits": limits()}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--yardstick", action="store_true")
    given = parser.parse_args()
    states.report(PATCH, yardstick if given.yardstick else observe, given.out)


if __name__ == "__main__":
    main()
