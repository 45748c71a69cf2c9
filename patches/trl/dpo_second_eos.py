"""DPO on conversations: an answer ends as its chat template ends it, without a second end-of-sequence token."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _released

_NAME = "trl-dpo-second-eos"
_TRAINER = "trl.trainer.dpo_trainer:DPOTrainer"
_EOS = "[tokenizer.eos_token_id]"


def conversational(rows: Any) -> bool:
    """Whether the first row of a dataset is a conversation, to which the trainer applies a chat template.

    It reads a stream's first row, as 0.27.2 does.
    """
    from trl.data_utils import is_conversational

    first = next(iter(rows), None)
    return first is not None and bool(is_conversational(first))


_rendered = ContextVar("rendered", default=False)
_undecided = ContextVar("undecided", default=False)
"""Whether no row has shown yet how the latest dataset's answers end."""


def of_chats(tokenize: Callable[..., dict[str, Any]], is_chat: bool) -> Callable[..., dict[str, Any]]:
    """The function that maps the rows; the trainer's own receives whether they are chats.

    Args:
        tokenize: the trainer's ``tokenize_row`` or ``process_row``, or a subclass's, which ends answers in its own
            way.
        is_chat: whether the trainer has applied a chat template.
    """
    from trl.trainer.dpo_trainer import DPOTrainer

    own = is_chat and any(tokenize is getattr(DPOTrainer, name, None) for name in ("tokenize_row", "process_row"))
    # A user's function in place of the class's own may remove the second end.
    if own and not _released.is_released(tokenize):
        _released.stays(_NAME, f"{tokenize.__qualname__} is not TRL's own", "the end of answers")
        own = False
    _undecided.set(own)
    _special.clear()
    if not is_chat:
        rlhf_patches.decided(_NAME, False)
    return partial(_of_a_chat, tokenize) if own else tokenize


def _of_a_chat(tokenize: Callable[..., dict[str, Any]], *row: Any, **options: Any) -> dict[str, Any]:
    ended = _ended_by_the_template(*row, **options)
    if not ended:
        _released.stays(_NAME, "the chat template ends no answer with a special token", "the end of answers")
    before = _rendered.set(ended)
    try:
        found = tokenize(*row, **options)
    finally:
        _rendered.reset(before)
    if _undecided.get() and _would_end_twice(found, *row, **options):
        _undecided.set(False)
        rlhf_patches.decided(_NAME, True)
    return found


def _ended_by_the_template(features: Any, processing_class: Any = None, *_: Any, **__: Any) -> bool:
    """Whether both answers of a row end with a special token: otherwise the trainer adds their only end."""
    try:
        ends = tuple(_special_tokens(getattr(processing_class, "tokenizer", processing_class)))
        return all(str(features[name]).rstrip().endswith(ends) for name in ("chosen", "rejected"))
    except (AttributeError, KeyError, TypeError):  # of a tokenizer or a row of another kind
        return False


_special: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
"""The special tokens of the tokenizer of the latest dataset: asking it takes a millisecond."""


def _special_tokens(tokenizer: Any) -> list[str]:
    found = _special.get(tokenizer)
    if found is None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        found = [*tokenizer.all_special_tokens, *(str(each) for each in added if each.special)]
        found = _special[tokenizer] = [each for each in found if each]
    return found


def _would_end_twice(
    found: Any, features: Any, processing_class: Any = None, *_: Any, max_completion_length: Any = None, **__: Any
) -> bool:
    """Whether the template has ended an answer of this row, and the trainer's end would not have been cut off.

    False is no decision: another row may show it, and a template may end answers with another token.
    """
    end = getattr(getattr(processing_class, "tokenizer", processing_class), "eos_token", None)
    if not isinstance(end, str) or not end:
        return False
    for name in ("chosen", "rejected"):
        ended = str(features[name]).rstrip().endswith(end)
        if ended and (max_completion_length is None or len(found[f"{name}_input_ids"]) < max_completion_length):
            return True
    return False


def rendered() -> bool:
    """Whether the current answers have been rendered with a chat template."""
    return _rendered.get()


def _without_second(function: str) -> tuple[Rewrite, ...]:
    return tuple(
        Rewrite(
            target=f"{_TRAINER}.{function}",
            pattern=f"{ids} = {ids} + {_EOS}",
            replacement=f"{ids} = {ids} + ([] if $RENDERED() else {_EOS})",
            alongside=("if add_special_tokens:\n    $$$",),
            uses={"RENDERED": f"{__name__}:{rendered.__name__}"},
        )
        for ids in ("chosen_input_ids", "rejected_input_ids")
    )


PATCH = Patch(
    name=_NAME,
    summary="DPO on conversations trains on answers that end once, as the chat template ends them",
    harm="wrong data",
    bug="every chosen and rejected answer ends with two end-of-sequence tokens",
    when="DPOTrainer on conversations",
    excluded_by=("trl=sft|grpo|kto|reward|rloo|gold",),
    symptom="""\
`DPOTrainer` on a conversational dataset: every chosen and rejected answer ends with the chat template's own end and
one more `eos_token`, `<|im_end|>\\n<|im_end|>` with Qwen's. No error; `trainer.train_dataset[0]["chosen_input_ids"]`
shows it. The log-probabilities of both answers include a token that the model never has to write.""",
    cause="""\
The trainer renders conversations with the chat template, which includes the end, and then appends the end-of-sequence
token to every answer, rendered or not.""",
    repair="""\
If the first row of the dataset is a conversation the patch appends nothing to answers that the template ends with a
special token, as 0.27.2 does. Answers in plain text end as before, and so do those of a template that writes no end
(0.27.2 leaves these without one), and those of a `tokenize_row` or `process_row` that is not TRL's own, in a subclass
or in place of the class's. Rank 0 logs one line about the latter two.

If your code removes the second end elsewhere, as in `_prepare_dataset` or a collator, it has to check that there are
two. Not repaired: releases before 0.14.0.""",
    changes_numbers="""\
Since TRL 0.14.0 at the latest, DPO on conversations trained on one extra token in each answer. With the patch the
logged log-probabilities and rewards of answers exclude this token. You can continue to train a model that was trained
with it.""",
    references=(
        "https://github.com/huggingface/trl/pull/4908",
        "https://github.com/huggingface/trl/issues/4481",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.14.0,<0.27.2"),
            (
                Rewrite(
                    target=f"{_TRAINER}._prepare_dataset",
                    pattern="dataset = dataset.map(maybe_extract_prompt, **map_kwargs)",
                    replacement=(
                        "dataset = dataset.map(maybe_extract_prompt, **map_kwargs); is_chat = $IS_CHAT(dataset)"
                    ),
                    uses={"IS_CHAT": f"{__name__}:{conversational.__name__}"},
                    unless=("is_conversational(next(iter(dataset)))",),
                ),
                Rewrite(
                    target=f"{_TRAINER}._prepare_dataset",
                    pattern="self.tokenize_row if not self.is_vision_model else self.process_row",
                    replacement=(
                        "$OF_CHATS(self.tokenize_row if not self.is_vision_model else self.process_row, is_chat)"
                    ),
                    uses={"OF_CHATS": f"{__name__}:{of_chats.__name__}"},
                ),
                *_without_second("tokenize_row"),
                *_without_second("process_row"),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 0.27.2",
    conditions=(Condition(f"{_TRAINER}._prepare_dataset"),),
)
