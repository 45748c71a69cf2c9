"""What DPO's trainer makes of a data set, in tokens, on one rank: ``--out FOLDER [CASE ...]``.

Each case before apply() of trl-dpo-second-eos, after it, and after revert().
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from datasets import Dataset, IterableDataset
from trl import DPOConfig, DPOTrainer

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "trl-dpo-second-eos"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
PLAIN = [{"prompt": "w1 w2", "chosen": " w3", "rejected": " w4 w5"}]


def chat(row: dict[str, str]) -> dict[str, Any]:
    """The same as a conversation."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": roles[name], "content": text.strip()}] for name, text in row.items()}


class OfItsOwn(DPOTrainer):
    """With a function that hands the option on to the tokenizer, and asks whether it is False."""

    @staticmethod
    def tokenize_row(features: Any, processing_class: Any, *_: Any, add_special_tokens: bool = True, **__: Any) -> Any:
        if add_special_tokens is not False:
            raise ValueError(f"add_special_tokens is {add_special_tokens!r}, expected False")
        return {
            f"{name}_input_ids": processing_class(features[name], add_special_tokens=add_special_tokens)["input_ids"]
            for name in ("prompt", "chosen", "rejected")
        }


class OnTop(DPOTrainer):
    """With a function that takes the trainer's second end away."""

    @staticmethod
    def tokenize_row(features: Any, *args: Any, **kwargs: Any) -> Any:
        row = DPOTrainer.tokenize_row(features, *args, **kwargs)
        return {**row, **{name: row[name][:-1] for name in ("chosen_input_ids", "rejected_input_ids")}}


def prepared(
    rows: Any, out: Path, kind: type[DPOTrainer] = DPOTrainer, template: str = TEMPLATE, **settings: Any
) -> dict[str, Any]:
    """The words of each answer that is trained on, and what happened to the tokenizer, the rows and the arguments."""
    tokenizer = small.tokenizer()
    tokenizer.chat_template = template
    settings = {"report_to": [], "max_steps": 1, "save_strategy": "no", **settings}
    arguments = DPOConfig(str(out / "trainer"), bf16=False, use_cpu=True, **settings)
    model, reference, touched = small.model(), small.model(), ""
    try:
        with untouched(tokenizer, rows, arguments):
            trainer = kind(
                model=model,
                ref_model=reference,
                args=arguments,
                train_dataset=rows,
                processing_class=tokenizer,
            )
    except AssertionError as error:
        touched = str(error)
    return {
        "touched": touched,
        **{
            name: [tokenizer.convert_ids_to_tokens(row[f"{name}_input_ids"]) for row in trainer.train_dataset]
            for name in ("prompt", "chosen", "rejected")
        },
    }


def in_place_of_trls(chats: Any, out: Path) -> dict[str, Any]:
    """As a subclass on top, but by assignment to TRL's own class."""
    released = DPOTrainer.tokenize_row

    def on_top(features: Any, *args: Any, **kwargs: Any) -> Any:
        row = released(features, *args, **kwargs)
        return {**row, **{name: row[name][:-1] for name in ("chosen_input_ids", "rejected_input_ids")}}

    with mock.patch.object(DPOTrainer, "tokenize_row", staticmethod(on_top)):
        return prepared(Dataset.from_list(chats), out)


def cases(out: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    chats = [chat(row) for row in PLAIN]
    return {
        "chat": lambda: prepared(Dataset.from_list(chats), out),
        "chat, streamed": lambda: prepared(IterableDataset.from_generator(lambda: iter(chats)), out),
        "chat, cut": lambda: prepared(Dataset.from_list(chats), out, max_completion_length=2),
        "chat, two processes": lambda: prepared(Dataset.from_list(chats * 2), out, dataset_num_proc=2),
        "chat, by a subclass": lambda: prepared(Dataset.from_list(chats), out, OfItsOwn),
        "chat, by a subclass on top": lambda: prepared(Dataset.from_list(chats), out, OnTop),
        "chat, in place of TRL's own": lambda: in_place_of_trls(chats, out),
        "chat, no end": lambda: prepared(Dataset.from_list(chats), out, template=TEMPLATE.replace(" <eos>", "")),
        "plain": lambda: prepared(Dataset.from_list(PLAIN), out),
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    all_of_them = cases(options.out)
    chosen = options.cases or [*all_of_them]
    states.report(NAME, lambda: {case: all_of_them[case]() for case in chosen}, options.out)
