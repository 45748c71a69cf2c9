"""Steps that resume from a checkpoint, and uninterrupted steps, by the real ``Trainer``: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-resume-weights, after it, and after revert(): the distance of each weight, and
of each optimizer state, from that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import Collator, rows
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import SIZES, made
from rlhf_patches.proving import states

NAME = "transformers-resume-weights"
STEPS, STOP = 4, 2
Make = Callable[[], Any]


# ------------------------------------------------------------------------------------------------------- models


def vision() -> Any:
    """Qwen2.5-VL, whose text and vision models had other names before."""
    text = {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    text.pop("attn_implementation")
    text.pop("head_dim")
    seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    tokens = {"image_token_id": 29, "video_token_id": 30, "vision_start_token_id": 31, "vision_end_token_id": 28}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=seen, **tokens)
    return transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")


def vision_loaded() -> Any:
    """The same with the names that the Hub's checkpoints have."""
    with tempfile.TemporaryDirectory() as folder:
        made(vision).save_pretrained(folder)
        (file,) = Path(folder).glob("*.safetensors")
        names = {"model.language_model.": "model.", "model.visual.": "visual."}
        weights = {}
        for name, tensor in load_file(file).items():
            old = next((old for old in names if name.startswith(old)), None)
            weights[names[old] + name.removeprefix(old) if old else name] = tensor
        save_file(weights, file, {"format": "pt"})
        return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")


# ---------------------------------------------------------------------------------------------------------- runs


class Stop(TrainerCallback):
    """The step after which a run resumes."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= STOP


def ids(number: int) -> list[dict[str, Any]]:
    """Rows of text: the last tokens are images'."""
    return [{**row, "input_ids": row["input_ids"] % 28, "labels": row["labels"]} for row in rows(number, "tokens")]


@contextlib.contextmanager
def trainers(make: Make, *, shards: bool = False, **arguments: Any) -> Iterator[Callable[[], Any]]:
    """A function that builds a new trainer each time, which saves to one folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):

        def build() -> Trainer:
            model = made(make)
            if shards:
                model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="4KB")
            return Trainer(
                model=model,
                args=TrainingArguments(
                    output_dir=folder,
                    use_cpu=True,
                    per_device_train_batch_size=2,
                    remove_unused_columns=False,
                    report_to=[],
                    max_steps=STEPS,
                    save_steps=STOP,
                    learning_rate=1e-2,
                    logging_steps=1,
                    disable_tqdm=True,
                    **arguments,
                ),
                train_dataset=ids(8),
                eval_dataset=ids(2),
                data_collator=Collator(),
            )

        yield build


def numbers(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer's state of each."""
    found = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"optimizer {index} {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return found


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The tensors that are not bit for bit the same, and the differences."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name].double() - wanted[name].double()).abs().max())
        for name in wanted
        if not torch.equal(found[name], wanted[name])
    }


def resumed(make: Make, **more: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more steps from it; and four steps."""
    with trainers(make, **more) as build, states.heard() as said:
        whole = build()
        whole.train()
        losses = [each["loss"] for each in whole.state.log_history if "loss" in each]
        first = build()
        first.add_callback(Stop())
        first.train()
        second = build()
        checkpoint = Path(first.args.output_dir, f"checkpoint-{STOP}")
        second.train(resume_from_checkpoint=str(checkpoint))
        return {
            "off": off(numbers(second), numbers(whole)),
            "of": len(numbers(whole)),
            "losses": [each["loss"] for each in second.state.log_history if "loss" in each] == losses,
            "files": len(list(checkpoint.glob("*.safetensors"))),
            "said": said,
        }


CASES: dict[str, Callable[[], dict[str, Any]]] = {"Qwen2.5-VL, loaded": lambda: resumed(vision_loaded)}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    options = parser.parse_args()
    states.report_cases(NAME, lambda names: {name: cases[name]() for name in names}, options.cases, options.out)
