"""Older trainers of TRL beside whichever transformers is on the path: ``--out FOLDER CASE...``, in float64.

Each patch of a pair of releases is applied after the other, and taken off again: what can be imported, made and trained
at each stage is said. A case is a trainer; one that cannot be had without the patches is trained with both.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

import rlhf_patches
from rlhf_patches.proving import states

PATCHES = ("trl-optional-packages", "trl-warnings-issued")
ABSENT = ("vllm", "mergekit", "llm_blender")
"""Not installed here; each release asks for them."""
MAJOR = int(transformers.__version__.partition(".")[0])
WORDS = 20
STEPS = {"max_steps": 2, "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1}
STEPS |= {"max_grad_norm": 0.0, "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
STEPS |= {"disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 4, "seed": 3}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS - 3))]
    plain = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def model(classes: int | None = None) -> Any:
    """One layer in float64, whose weights depend on nothing that transformers does."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        attn_implementation="eager",
        **({"num_labels": classes} if classes else {}),
    )
    made = (Qwen2ForSequenceClassification if classes else Qwen2ForCausalLM)(config).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(made.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made


def sentences(number: int, length: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, WORDS - 3, (number, length), generator=generator).tolist()
    return [" ".join(f"w{word}" for word in row) for row in drawn]


def of_words(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def arguments(kind: str, **settings: Any) -> Any:
    """Those of the settings that the release has."""
    import trl

    made = getattr(trl, f"{kind}Config")
    known = {field.name for field in dataclasses.fields(made)}
    given = {name: value for name, value in {**STEPS, **settings}.items() if name in known}
    return made(output_dir=states.folder(), **given)


def grpo() -> Any:
    from datasets import Dataset
    from trl import GRPOTrainer

    settings = {"num_generations": 4, "max_completion_length": 4, "beta": 0.0}
    rows = Dataset.from_dict({"prompt": sentences(4, 3, 1)})
    return GRPOTrainer(
        model(), of_words, arguments("GRPO", **settings), train_dataset=rows, processing_class=tokenizer()
    )


def dpo() -> Any:
    from datasets import Dataset
    from trl import DPOTrainer

    columns = {"prompt": 3, "chosen": 4, "rejected": 3}
    rows = Dataset.from_dict({name: sentences(4, length, length) for name, length in columns.items()})
    return DPOTrainer(model(), model(), arguments("DPO", beta=0.3), train_dataset=rows, processing_class=tokenizer())


def sft() -> Any:
    from datasets import Dataset
    from trl import SFTTrainer

    rows = Dataset.from_dict({"text": sentences(4, 6, 2)})
    settings = {"max_length": 16, "max_seq_length": 16}
    return SFTTrainer(model(), args=arguments("SFT", **settings), train_dataset=rows, processing_class=tokenizer())


def reward() -> Any:
    from datasets import Dataset
    from trl import RewardTrainer

    rows = Dataset.from_dict({"chosen": sentences(4, 6, 3), "rejected": sentences(4, 5, 4)})
    return RewardTrainer(
        model(classes=1), arguments("Reward", max_length=16), train_dataset=rows, processing_class=tokenizer()
    )


CASES: dict[str, Callable[[], Any]] = {"GRPO": grpo, "DPO": dpo, "SFT": sft, "Reward": reward}


class Norms(TrainerCallback):
    """Of each step's gradient; transformers 4 logs none where nothing is clipped."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(norm(kwargs["model"]))


def norm(of: Any) -> float:
    return float(
        torch.stack([each.grad.pow(2).sum() for each in of.parameters() if each.grad is not None]).sum().sqrt()
    )


def by_the_formula(trainer: Any) -> float:
    """The norm of SFT's first gradient: of the mean over all tokens that the batch has to predict."""
    (batch,) = list(trainer.get_train_dataloader())
    twin = model()
    logits = twin(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    counted = labels != -100
    (-(logprobs * counted).sum() / counted.sum()).backward()
    return norm(twin)


def places(value: torch.Tensor) -> torch.Tensor:
    """1 and on, so that weights in another order are others."""
    return torch.arange(1.0, value.numel() + 1, dtype=torch.float64)


def trained(case: str) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = CASES[case]()
    found = {"by the formula": by_the_formula(trainer)} if case == "SFT" else {}
    norms = Norms()
    trainer.add_callback(norms)
    trainer.train()
    weights = {name: value.double() for name, value in trainer.model.state_dict().items()}
    return {
        **found,
        "norms": norms.found,
        "weights": {
            name: [float(value.sum()), float(value.pow(2).sum()), float(value.flatten() @ places(value))]
            for name, value in weights.items()
        },
        "has the dictionary": hasattr(trainer.model, "warnings_issued"),
    }


def tried(make: Callable[[], Any]) -> str:
    """What came of it."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def stage() -> dict[str, Any]:
    from transformers.utils.import_utils import _is_package_available
    from trl import import_utils

    asked = {name: getattr(import_utils, f"is_{name}_available", lambda: False)() for name in ABSENT}
    return {
        "asked": {name: list(answer) if isinstance(answer, tuple) else answer for name, answer in asked.items()},
        "transformers": list(_is_package_available("no_such_package")) if MAJOR > 4 else None,
        "GRPO": tried(grpo),
        "Reward": tried(reward),
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", choices=CASES)
    options = parser.parse_args()
    import trl

    found: dict[str, Any] = {"trl": trl.__version__, "transformers": transformers.__version__, "before": stage()}
    for name in PATCHES:
        rlhf_patches.apply(only=name)
        found[name] = stage()
    rows = rlhf_patches.report()
    found["reasons"] = {name: f"{rows[name].status}: {rows[name].reason}" for name in PATCHES}
    found["trained"] = {case: trained(case) for case in options.cases}
    rlhf_patches.revert()
    found["reverted"] = stage()
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
