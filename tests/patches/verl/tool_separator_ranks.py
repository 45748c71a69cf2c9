"""Conversations of verl's real tool agent loop, with a server that says what it is told to: ``--out FOLDER``.

As the proof of verl-tool-separator has one with ChatML: other templates, and where nothing is to change.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import types
from collections.abc import Sequence
from itertools import compress
from typing import Any, ClassVar
from unittest import mock

from rlhf_patches.patches.verl import tool_separator
from rlhf_patches.patches.verl.proofs import tool_separator_ranks
from rlhf_patches.patches.verl.proofs.tool_separator_ranks import CHATML, END, LONG, RESULTS, START, SYSTEM, TURNS, said
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

CLOSED, STOPPED = "<|end|>", "<|stop|>"
_AFTER = END + "\\n"
"""What ends a turn of ChatML, and what is between it and the next one."""
TEMPLATES = {
    "ChatML": CHATML,
    "no system prompt": CHATML.replace(SYSTEM, ""),
    "two newlines": CHATML.replace(_AFTER, END + "\\n\\n"),
    "another token": CHATML.replace(_AFTER, END + CLOSED),
    "a newline before": CHATML.replace(f"m.content + '{END}", f"m.content + '\\n{END}"),
    "between turns": (
        "{% for m in messages if m.role %}{{ '' if loop.first else '\\n' }}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ '\\n<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
    ),
    "no separator": CHATML.replace(_AFTER, END),
    "none before a tool": CHATML.replace(
        f"m.content + '{_AFTER}' }}}}{{% endif %}}",
        f"m.content + '{END}' }}}}{{{{ '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else '\\n' }}}}"
        "{% endif %}",
    ),
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
    "cannot be asked": "{{ raise_exception('') if messages[2] and messages[2].role == 'user' }}" + CHATML,
    "content left out": "{% for m in messages if m.role %}{{ '<|im_start|>' + m.role + '<|im_end|>\\n' }}{% endfor %}",
}
SEPARATED = ("ChatML", "no system prompt", "two newlines", "another token", "a newline before", "between turns")
RIGHT = ("no separator", "none before a tool", "before each turn")
"""As released."""
LIMITS = range(-1, 4)
"""Of the response, from the end of the first tool's turn as it is rendered by itself."""
USER = ("Sure?", "Thanks.")


def tokenizer(template: str) -> Any:
    return tool_separator_ranks.tokenizer(TEMPLATES[template], CLOSED, STOPPED)


class Interaction:
    """A user who asks once more, and is content."""

    def __init__(self) -> None:
        self.asked = 0

    async def start_interaction(self, *_: Any, **__: Any) -> None:
        pass

    async def generate_response(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        return self.asked > 1, USER[self.asked - 1], 0.5, {}


def conversation(
    template: str,
    turns: Sequence[str] = TURNS,
    *,
    stops: str = END,
    response_length: int = LONG,
    parser: str | None = None,
    interaction: bool = False,
    processor: bool = False,
    words: Any = None,
    own: bool = False,
) -> dict[str, Any]:
    """A rollout, and what the server was asked with.

    Args:
        template: its name.
        turns: what is generated, without the token at which it stops.
        stops: that token.
        response_length: as verl has it.
        parser: the format whose way to write a tool's turn is taken.
        interaction: whether a user answers.
        processor: whether there is one, as of a model for images.
        words: the tokenizer, in place of a new one.
        own: whether the loop is of somebody who has met the bug: it begins turns with a newline.
    """
    words = words or tokenizer(template)
    stops = "\n" + stops if template == "a newline before" else stops

    def change(loop: Any) -> None:
        if parser is not None:
            loop.tool_parser_name = parser
        if interaction:
            loop.interaction_config_file, loop.interaction_map = "a file", {"a user": Interaction()}
        if own:
            loop.apply_chat_template = begun_with_a_newline(loop.apply_chat_template, words)

    output, asked = tool_separator_ranks.rollout(
        words, [turn + stops for turn in turns], response_length, processors(words) if processor else None, change
    )
    return {
        **said(words, output),
        "generated": words.decode(list(compress(output.response_ids, output.response_mask))),
        "mask": output.response_mask,
        "scores": getattr(output, "response_logprobs", None),
        "asked": [words.decode(prompt) for prompt in asked],
        "turns": output.num_turns,
    }


def begun_with_a_newline(released: Any, words: Any) -> Any:
    async def rendered(*args: Any, **settings: Any) -> list[int]:
        turn = await released(*args, **settings)
        return [*words.encode("\n"), *turn] if settings.get("remove_system_prompt") else turn

    return rendered


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


def rendered() -> list[int]:
    """How often templates are rendered in a conversation, in another one, and in one of another template."""
    words, found = tokenizer("ChatML"), []
    for template in ("ChatML", "ChatML", "no system prompt"):
        words.chat_template = TEMPLATES[template]
        with mock.patch.object(words, "apply_chat_template", wraps=words.apply_chat_template) as counted:
            conversation(template, words=words)
        found.append(counted.call_count)
    return found


def touched() -> str | None:
    """What becomes of a tokenizer that is asked, and of tokens."""
    words = tokenizer("ChatML")
    seen, turn = words.encode("5." + END), words.encode(f"{START}user")
    loop = types.SimpleNamespace(tokenizer=words, system_prompt=words.encode(f"{START}system\nHelp.{END}\n"))
    try:
        with untouched(loop, seen, turn):
            assert tool_separator.following(loop, seen, turn) == [*words.encode("\n"), *turn]
    except AssertionError as what:
        return str(what)
    return None


def limits() -> list[list[int]]:
    """The masks where there is hardly room for the first tool's turn, or none."""
    results = "\n".join(f"<tool_response>\n{result['content']}\n</tool_response>" for result in RESULTS[0])
    first = len(tokenizer("ChatML").encode(f"{TURNS[0]}{END}{START}user\n{results}{END}\n{START}assistant\n"))
    return [conversation("ChatML", response_length=first + more)["mask"] for more in LIMITS]


def of_templates() -> dict[str, Any]:
    """A conversation with each template, and what is reported of it."""
    found: dict[str, Any] = {"reported": {}}
    for name in TEMPLATES:
        held, asked = states.counts(tool_separator_ranks.PATCH)
        found[name] = conversation(name)
        now = states.counts(tool_separator_ranks.PATCH)
        found["reported"][name] = [now[1] - asked, now[0] - held]
    return found


def observe() -> dict[str, Any]:
    loops: Any = importlib.import_module("verl.experimental.agent_loop.tool_agent_loop")
    found = of_templates()
    found["whole"] = {name: tool_separator_ranks.whole(tokenizer(name)) for name in (*SEPARATED, *RIGHT)}
    found["one turn"] = conversation("ChatML", ["5."])
    found["stopped elsewhere"] = conversation("ChatML", stops=STOPPED)
    found["without its end"] = conversation("ChatML", stops="")
    found["limits"] = limits()
    found["rendered"], found["touched"] = rendered(), touched()
    release = importlib.metadata.version("verl")
    if release not in ("0.5.0", "0.6.1"):
        found["a processor"] = conversation("ChatML", processor=True)
    if hasattr(loops.ToolAgentLoop, "apply_chat_template"):
        found["a newline of one's own"] = conversation("ChatML", own=True)
    for parser in ("gpt-oss", "gemma4"):
        if f'"{parser}"' in inspect.getsource(loops):
            found[parser] = conversation("ChatML", parser=parser)
    if hasattr(loops.ToolAgentLoop, "_handle_interacting_state"):
        turns = ["5.", "Yes."]
        found["a user"] = conversation("ChatML", turns, interaction=True)
        answers = [[{"role": "user", "content": each}] for each in USER]
        found["whole"]["a user"] = tool_separator_ranks.whole(tokenizer("ChatML"), turns, answers)
    return found


def yardstick() -> dict[str, Any]:
    """What a release that has it repaired makes of it."""
    return {name: conversation(name) for name in ("ChatML", "no system prompt")} | {"limits": limits()}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--yardstick", action="store_true")
    given = parser.parse_args()
    states.report(tool_separator_ranks.PATCH, yardstick if given.yardstick else observe, given.out)
