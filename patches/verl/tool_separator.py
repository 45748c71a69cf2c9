"""verl's tool agent loop: insert the chat template's separator between two turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile, takewhile
from typing import Any
from weakref import WeakKeyDictionary

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "verl-tool-separator"
_BORDERS: WeakKeyDictionary[Any, tuple[Any, tuple[list[int], list[int]]]] = WeakKeyDictionary()
"""By tokenizer or processor: the template, its border, and the start of a turn, which are equal for every sample."""


def following(loop: Any, conversation: Sequence[int], turn: list[int]) -> list[int]:
    """The tokens of the next turn, with the template's separator before them.

    Args:
        loop: verl's loop, with ``tokenizer``, ``processor`` and ``system_prompt``.
        conversation: token ids, up to the tokens that were generated last.
        turn: token ids of the next turn, rendered by itself.

    Returns:
        ``turn`` itself where the template has no separator, where the conversation does not end as the template ends a
        turn, and where the turn already has the separator because the user's own code has added it.
    """
    try:
        border, begins = _border(loop)
        separator = border[1:]
        has_it = turn[: len(separator)] == separator != begins[: len(separator)]
        misses_it = bool(separator) and conversation[-1] == border[0] and not has_it
    except Exception:  # a template that cannot be rendered: the turn is as released
        return turn
    if border:  # otherwise it is unknown
        rlhf_patches.decided(_NAME, misses_it)
    return separator + turn if misses_it else turn


def _border(loop: Any) -> tuple[list[int], list[int]]:
    """The border: the token that closes an assistant's turn and the separator after it; and the start of a turn."""
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

    # Their common suffix comes after the content.
    one, other = (rendered(("user", "0"), ("assistant", said), ("user", "0")) for said in "01")
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))))
    after = one[len(one) - common :]
    last = rendered(("user", "0"))[len(loop.system_prompt) :]  # by itself, as verl slices it
    border, ends = after[: -len(last)], after[-len(last) :]
    if (
        not last or ends != last or common == len(one)
    ):  # the start of the next turn, or the end of the content, is unknown
        return [], last
    special = set(loop.tokenizer.all_special_ids)
    border = list(dropwhile(lambda token: token not in special, border))
    if border[1:]:
        try:
            before_a_tool = rendered(("user", "0"), ("assistant", "0"), ("tool", "0"))
            tool = rendered(("tool", "0"))[len(loop.system_prompt) :]
        except Exception:  # a template that needs more fields of a tool: the user's border is all that is known
            return border, last
        until = len(before_a_tool) - len(tool)
        if tool and before_a_tool[until:] == tool and before_a_tool[:until][-len(border) :] != border:
            return [], last
    return border, last


_LOOP = "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop"
_USES = {"FOLLOWING": f"{__name__}:{following.__name__}"}


def _cut(method: str, turn: str, conversation: str) -> Rewrite:
    """Where the loop itself removes the system prompt."""
    cut = f"{turn}[len(self.system_prompt) :]"
    return Rewrite(f"{_LOOP}.{method}", cut, f"$FOLLOWING(self, {conversation}, {cut})", uses=_USES)


def _rendered(method: str) -> Rewrite:
    """Where the base class renders the turn and removes the system prompt."""
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
    name=_NAME,
    summary="multi-turn rollouts contain the chat template's separator between an answer and the next turn",
    harm="wrong data",
    affects_rollouts=True,
    bug="the newline after an assistant's turn is missing wherever a tool or a user answers",
    when="multi-turn rollouts (tool_agent) with a template that ends a turn with more than one token, such as ChatML",
    symptom="""\
In multi-turn rollouts the next turn follows each answer without the chat template's separator: with Qwen's models the
text is `<|im_end|><|im_start|>user` instead of `<|im_end|>\\n<|im_start|>user`, one token less at each tool result. The
policy samples, and is trained, on conversations that no template renders. When the policy is served with
`apply_chat_template` (chat completions), and after supervised fine-tuning, conversations differ from these. There is no
error.""",
    cause="""\
Generation stops at the token that closes a turn, `<|im_end|>`. verl renders the next turn by itself, and its tokens
begin with `<|im_start|>`. Neither of the two contains the newline between them.""",
    repair="""\
The patch puts the separator before the tokens of a tool's or a user's turn, with mask 0 and log-probability 0, and
counts it for the length of the response, as in 0.9.0. It renders five short conversations to detect the separator, and
adds it only after the token with which the template closes a turn: after other answers the turn follows as before.
Nothing changes with templates that have no separator, have none before a tool's turn, or have it at the beginning of a
turn; with turns to which your own code has already added the separator; with the formats `gpt-oss` and `gemma4`; and in
conversations of one turn. Users' turns (`interaction_config_path`, 0.6.0 to 0.7.1) are repaired as
well. Not repaired: models with a processor in 0.6.1, where the system prompt is repeated at each tool result; and
0.9.1, which knows the separator of a few model types and drops the separator again with others.""",
    changes_numbers="""\
Since verl 0.5.0, multi-turn rollouts with tools missed one token at each turn border. With the patch conversations are
those of the template, and rewards and losses change accordingly. In the first steps, conversations differ slightly from
those that a policy was trained on without the patch, as in 0.9.0.""",
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
    conditions=tuple(Condition(f"{_LOOP}.{method}") for method in ("run", _TOOLS, _USER)),  # 0.5.0 has one method
)
