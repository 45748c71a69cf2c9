"""DPO on conversations: an answer ends as its chat template ends it, without a second end of sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

_TRAINER = "trl.trainer.dpo_trainer:DPOTrainer"
_EOS = "[tokenizer.eos_token_id]"


def conversational(rows: Any) -> bool:
    """Whether the first row of a dataset is a conversation, to which a chat template will be applied."""
    from trl.data_utils import is_conversational

    first = next(iter(rows), None)
    return first is not None and bool(is_conversational(first))


def of_chats(tokenize: Callable[..., dict[str, Any]], is_chat: bool) -> Callable[..., dict[str, Any]]:
    """The function that is mapped over the rows; rows of chats are told to it.

    Args:
        tokenize: the trainer's ``tokenize_row`` or ``process_row``, or a subclass's.
        is_chat: whether a chat template has been applied.
    """
    return partial(_of_a_chat, tokenize) if is_chat else tokenize


def _of_a_chat(tokenize: Callable[..., dict[str, Any]], features: dict[str, Any], **options: Any) -> dict[str, Any]:
    return tokenize(features, **{**options, "add_special_tokens": None})


def _without_second(function: str) -> tuple[Rewrite, ...]:
    """``None`` for add_special_tokens says that a chat template has been there; it is false, as upstream's False is."""
    return tuple(
        Rewrite(
            target=f"{_TRAINER}.{function}",
            pattern=f"{ids} = {ids} + {_EOS}",
            replacement=f"{ids} = {ids} + ([] if add_special_tokens is None else {_EOS})",
            alongside=("if add_special_tokens:\n    $$$",),
        )
        for ids in ("chosen_input_ids", "rejected_input_ids")
    )


PATCH = Patch(
    name="trl-dpo-second-eos",
    summary="DPO on conversations trains on answers that end once, as the chat template ends them",
    symptom="""\
`DPOTrainer` on a conversational dataset: every chosen and rejected answer ends with the chat template's own end and one
more `eos_token`, `<|im_end|>\\n<|im_end|>` with Qwen's. No error; `trainer.train_dataset[0]["chosen_input_ids"]` shows
it. Both answers get the log-probability of a token that the model never has to write.""",
    cause="""\
The trainer renders conversations with the chat template, which has the end in it, and then appends the end of sequence
to every answer, rendered or not.""",
    repair="""\
Where the first row of the dataset is a conversation nothing is appended, as in 0.27.2; answers in plain text end as
before. A template that writes no end leaves an answer without one, as in 0.27.2. Releases before 0.14.0 are left
alone.""",
    changes_numbers="""\
Since TRL 0.14.0 at the latest, DPO on conversations had one token more in each answer. With the patch log-probabilities
and rewards of answers in the log are without it. A model that was trained with it may be trained on.""",
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
    retire="when the oldest trl in use is 0.27.2",
)
