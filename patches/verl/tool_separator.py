"""verl's tool agent loop: between two turns there is what the chat template has there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile, takewhile
from typing import Any
from weakref import WeakKeyDictionary

from rlhf_patches import Guard, Patch, Rewrite, Variant

_BORDERS: WeakKeyDictionary[Any, tuple[Any, tuple[list[int], list[int]]]] = WeakKeyDictionary()
"""By what renders: of what template, its border, and how a turn of it begins. It is the same for every sample."""


def following(loop: Any, conversation: Sequence[int], turn: list[int]) -> list[int]:
    """The tokens of the next turn, with those that the template has before it.

    Args:
        loop: verl's, with ``tokenizer``, ``processor`` and ``system_prompt``.
        conversation: token ids up to those that were generated last.
        turn: token ids of the next turn, rendered by itself.

    Returns:
        ``turn`` itself where the template has nothing between turns, where the conversation does not end as the
        template ends a turn, and where the turn has it already: code of the user's own has put it there.
    """
    try:
        border, begins = _border(loop)
        separator = border[1:]
        if separator and conversation[-1] == border[0]:
            has_it = turn[: len(separator)] == separator != begins[: len(separator)]
            return turn if has_it else separator + turn
    except Exception:  # a template that cannot be asked: the turn is as released
        pass
    return turn


def _border(loop: Any) -> tuple[list[int], list[int]]:
    """The token that closes an assistant's turn, and what the template has after it, before the next turn; and that."""
    processor = getattr(loop, "processor", None)
    renders = loop.tokenizer if processor is None else processor
    settings = dict(getattr(loop, "apply_chat_template_kwargs", {}))
    of = (renders.chat_template, settings, loop.system_prompt)
    known = _BORDERS.get(renders)
    if known is None or known[0] != of:
        known = _BORDERS[renders] = (of, _rendered_border(loop, renders, settings))
    return known[1]


def _rendered_border(loop: Any, renders: Any, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    def rendered(*messages: tuple[str, str]) -> list[int]:
        given = [{"role": role, "content": content} for role, content in messages]
        text = renders.apply_chat_template(given, tokenize=False, add_generation_prompt=False, **settings)
        return list(loop.tokenizer(text, add_special_tokens=False)["input_ids"])

    # What both have in common at the end is after the content.
    one, other = (rendered(("user", "0"), ("assistant", said), ("user", "0")) for said in "01")
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))))
    after = one[len(one) - common :]
    last = rendered(("user", "0"))[len(loop.system_prompt) :]  # by itself, as verl cuts it
    border, ends = after[: -len(last)], after[-len(last) :]
    if not last or ends != last or common == len(one):  # not known where the next turn begins, or the content ends
        return [], last
    special = set(loop.tokenizer.all_special_ids)
    border = list(dropwhile(lambda token: token not in special, border))
    if border[1:]:
        try:
            before_a_tool = rendered(("user", "0"), ("assistant", "0"), ("tool", "0"))
            tool = rendered(("tool", "0"))[len(loop.system_prompt) :]
        except Exception:  # a template that wants more of a tool: what is before a user is all that can be known
            return border, last
        until = len(before_a_tool) - len(tool)
        if tool and before_a_tool[until:] == tool and before_a_tool[:until][-len(border) :] != border:
            return [], last
    return border, last


_LOOP = "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop"
_USES = {"FOLLOWING": f"{__name__}:{following.__name__}"}


def _cut(method: str, turn: str, conversation: str) -> Rewrite:
    """Where the loop itself takes the system prompt off."""
    cut = f"{turn}[len(self.system_prompt) :]"
    return Rewrite(f"{_LOOP}.{method}", cut, f"$FOLLOWING(self, {conversation}, {cut})", uses=_USES)


def _rendered(method: str) -> Rewrite:
    """Where the base class renders the turn, and takes it off."""
    return Rewrite(
        f"{_LOOP}.{method}",
        "await $TURN",
        "$FOLLOWING(self, agent_data.prompt_ids, await $TURN)",
        inside="response_ids = await self.apply_chat_template(add_messages, $$$, remove_system_prompt=True)",
        unless=("self.turn_separator",),
        uses=_USES,
    )


_TOOLS, _USER = "_handle_processing_tools_state", "_handle_interacting_state"

PATCH = Patch(
    name="verl-tool-separator",
    summary="multi-turn rollouts have what the chat template has between an answer and the next turn",
    harm="wrong data",
    affects_rollouts=True,
    bug="the newline after an assistant's turn is missing wherever a tool or a user answers",
    when="multi-turn rollouts (tool_agent) with a template that ends a turn with more than one token, as ChatML",
    symptom="""\
In multi-turn rollouts each answer is followed by the next turn without what the template has between: of Qwen's models
it is `<|im_end|><|im_start|>user` in place of `<|im_end|>\\n<|im_start|>user`, one token less at each tool result. The
policy is trained, and samples, on conversations that no template makes: when it is served with
`apply_chat_template` (chat completions), and after supervised fine-tuning, it sees others. No error.""",
    cause="""\
Generation stops at the token that closes a turn, `<|im_end|>`. The next turn is rendered by itself, and its tokens
begin with `<|im_start|>`. The newline between the two is neither's.""",
    repair="""\
The separator is put before the tokens of a tool's or a user's turn, with mask 0 and log-probability 0, and counts for
the length of the response, as in 0.9.0. It is found by rendering five short conversations, and only added after
the token that the template closes a turn with: an answer that ended otherwise is followed by what it was before. With
templates that have no separator, or none before a tool's turn, or have it at the beginning of a turn, with turns that
code of yours has put it before already, with the formats `gpt-oss` and `gemma4`, and in conversations of one turn,
nothing changes. Users' turns (`interaction_config_path`, 0.6.0 to 0.7.1) are repaired as
well. Not repaired: models with a processor in 0.6.1, where the system prompt is repeated at each tool result; and
0.9.1, which knows the separator of a few types of models and drops it again with others.""",
    changes_numbers="""\
Since verl 0.5.0 multi-turn rollouts with tools missed one token at each border. With the patch conversations are those
of the template, and rewards and losses change with them; of a policy that was trained without, the first steps are
slightly off its distribution, as they are in 0.9.0.""",
    references=(
        "https://github.com/verl-project/verl/issues/6501",
        "https://github.com/verl-project/verl/pull/6921",
    ),
    variants=(
        Variant(Guard("verl", ">=0.5.0,<0.6.0"), (_cut("run", "tool_response_ids", "prompt_ids"),)),
        Variant(
            Guard("verl", ">=0.6.0,<0.7.0"),
            tuple(_cut(method, "response_ids", "agent_data.prompt_ids") for method in (_TOOLS, _USER)),
        ),
        Variant(Guard("verl", ">=0.7.0,<=0.7.1"), (_rendered(_TOOLS), _rendered(_USER))),
        Variant(Guard("verl", ">=0.8.0.dev0,<0.9.0"), (_rendered(_TOOLS),)),
    ),
    obsolete_when="when the oldest verl in use is 0.9.0",
)
