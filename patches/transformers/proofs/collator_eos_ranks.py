"""A step of ``Trainer`` on texts whose padding is their end token, and the same in float64: ``--out FOLDER CASE...``.

Each case before apply() of transformers-collator-eos and after it, the first one after revert() too.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from datasets import Dataset

from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.proving import states

NAME = "transformers-collator-eos"
END = 1
TEXTS = ([5, 6, 7, 8, END], [9, 10, END])
STEPS: dict[str, Any] = {
    "max_grad_norm": 0.0,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "max_steps": 1,
    "logging_steps": 1,
}


KINDS: dict[str, type] = {}
"""The collator of a case, if it is another one."""


def tokenizer_of(case: str) -> Any:
    """Twenty words; the end is the padding, too, unless the case has a padding token."""
    from tokenizers import Tokenizer, models

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(17))]
    plain = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    padding = "<pad>" if case == "own padding token" else "<eos>"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token=padding,
        eos_token="<eos>",
        mask_token="<unk>",
        padding_side="left" if "on the left" in case else "right",
    )


def made() -> Any:
    """One layer with the same weights every time."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.Qwen2ForCausalLM(config)


def examples(case: str) -> list[dict[str, Any]]:
    if case == "begins, padded on the left":
        return [{"input_ids": [END, *row], "attention_mask": [1] * (len(row) + 1)} for row in TEXTS]
    rows = [list(TEXTS[0]) + list(TEXTS[1])] * 2 if case == "packed" else [list(row) for row in TEXTS]
    if case == "padded before":
        return [{"input_ids": row + [END] * (5 - len(row))} for row in rows]
    return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]


def trained(case: str) -> dict[str, Any]:
    """The labels of a step's batch, and how far its gradient is from a multiple of that of all tokens in float64."""
    model = made()
    kind = KINDS.get(case, transformers.DataCollatorForLanguageModeling)
    collator = kind(tokenizer_of(case), mlm=case == "masked language modeling", mlm_probability=0.3)
    optimizer = Kept(model.parameters(), lr=0.1)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(states.folder(), per_device_train_batch_size=2, **STEPS),
        train_dataset=Dataset.from_list(examples(case)),
        data_collator=collator,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )
    seen: list[Any] = []
    prepare = trainer._prepare_inputs

    def recording(inputs: Any) -> Any:
        seen.append({name: value.clone() for name, value in inputs.items()})
        return prepare(inputs)

    trainer._prepare_inputs = recording
    torch.manual_seed(0)
    trainer.train()
    got = torch.cat([each.flatten() for each in trainer.optimizer.optimizer.found]).double()
    exact, sums, tokens = made().double(), torch.zeros(()), 0
    for row in [each["input_ids"] for each in examples(case)]:
        logits = exact(torch.tensor([row])).logits[0, :-1]
        sums = sums - logits.log_softmax(-1)[range(len(row) - 1), row[1:]].sum()
        tokens += len(row) - 1
    (sums / tokens).backward()
    right = torch.cat([each.grad.flatten() for each in exact.parameters()])
    batch = seen[0]
    times = float(got @ right / (right @ right))
    return {
        # Before 5.10.1 the gradient has another size, which transformers-first-token-count repairs.
        "gradient": float((got - times * right).norm() / (times * right).norm()),
        "times": times,
        "found": [float(value).hex() for value in got[:: max(1, len(got) // 60)]],
        "labels": sorted(batch["labels"].tolist()),
        "ends": int((batch["labels"] == END).sum()),
    }


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    states.report_cases(NAME, lambda cases: {case: trained(case) for case in cases}, options.cases, options.out)
