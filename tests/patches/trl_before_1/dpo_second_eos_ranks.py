"""What DPO's trainer makes of a data set, in tokens, on one rank: ``--out FOLDER``.

Each case before apply() of trl-dpo-second-eos, after it, and after revert().
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from trl import DPOConfig, DPOTrainer

from tests.harness import states, trl_on_cpu

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


def prepared(rows: Any, out: Path, **settings: Any) -> dict[str, list[list[str]]]:
    """The words of each answer that is trained on."""
    tokenizer = trl_on_cpu.tokenizer()
    tokenizer.chat_template = TEMPLATE
    trainer = DPOTrainer(
        model=trl_on_cpu.model(),
        ref_model=trl_on_cpu.model(),
        args=DPOConfig(
            str(out / "trainer"), bf16=False, use_cpu=True, report_to=[], max_steps=1, save_strategy="no", **settings
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    return {
        name: [tokenizer.convert_ids_to_tokens(row[f"{name}_input_ids"]) for row in trainer.train_dataset]
        for name in ("prompt", "chosen", "rejected")
    }


def observe(out: Path) -> dict[str, Any]:
    chats = [chat(row) for row in PLAIN]
    return {
        "chat": prepared(Dataset.from_list(chats), out),
        "chat, streamed": prepared(IterableDataset.from_generator(lambda: iter(chats)), out),
        "chat, cut": prepared(Dataset.from_list(chats), out, max_completion_length=2),
        "plain": prepared(Dataset.from_list(PLAIN), out),
    }


def main() -> None:
    out = states.parser().parse_args().out
    states.report(NAME, lambda: observe(out), out)
