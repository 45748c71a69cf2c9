"""Steps that go on from a checkpoint, and steps without a stop, by the real ``Trainer``: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-resume-weights, after it, and after revert(): how far each weight, and each
number of the optimizer's, is from that of a run without a stop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from rlhf_patches.patches.transformers import saved_weights
from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import Collator, rows
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import SIZES, made, qwen3_moe
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched

NAME = "transformers-resume-weights"
STEPS, STOP = 4, 2
Make = Callable[[], Any]


# ------------------------------------------------------------------------------------------------------- models


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=12, num_experts_per_tok=2, tie_word_embeddings=True)
    )


def in_bfloat16() -> Any:
    return mixtral().to(torch.bfloat16)


def loaded() -> Any:
    """By from_pretrained, which notes what it has converted."""
    with tempfile.TemporaryDirectory() as folder:
        made(qwen3_moe).save_pretrained(folder)
        return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, experts_implementation="eager")


def dense(**more: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **more))


def vision() -> Any:
    """Qwen2.5-VL, whose text and vision models have had other names."""
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
    """Where a run is to be resumed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= STOP


class Keep(TrainerCallback):
    """The weights after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def ids(number: int) -> list[dict[str, Any]]:
    """Rows of text: the last tokens are images'."""
    return [{**row, "input_ids": row["input_ids"] % 28, "labels": row["labels"]} for row in rows(number, "tokens")]


@contextlib.contextmanager
def trainers(make: Make, *, shards: bool = False, **arguments: Any) -> Iterator[Callable[[], Any]]:
    """A function that builds a trainer, anew each time, that saves to one folder."""
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
    """Weights, and what the optimizer has of each."""
    found = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"optimizer {index} {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return found


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """What is not bit for bit the same, and by how much."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name].double() - wanted[name].double()).abs().max())
        for name in wanted
        if not torch.equal(found[name], wanted[name])
    }


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What the patch says."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlhf_patches").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("rlhf_patches").removeHandler(handler)


def resumed(make: Make, **more: Any) -> dict[str, Any]:
    """Two steps, saved, and two more from there; and four."""
    with trainers(make, **more) as build, heard() as said:
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


def best(make: Make, **more: Any) -> dict[str, Any]:
    """The weights after the first of two steps, of which that is the better one by this measure."""
    between: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    with trainers(make, **between, metric_for_best_model="eval_loss", **more) as build, heard() as said:
        trainer = build()
        trainer.args.save_steps = trainer.state.save_steps = 1
        trainer.add_callback(keep := Keep())
        with mock.patch.object(trainer, "evaluate", side_effect=lambda *_, **__: evaluated(trainer)):
            trainer.train()
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
        return {"off": off(trainer.model.state_dict(), keep.weights), "of": len(keep.weights), "said": said}


def evaluated(trainer: Any) -> dict[str, float]:
    return {"eval_loss": -float(trainer.state.global_step)}


def loads(make: Make, spoil: Callable[[dict[str, Any]], None] = lambda _: None, **more: Any) -> dict[str, Any]:
    """A checkpoint that is loaded, perhaps another one than was saved: what is called, and what becomes of it."""
    with trainers(make, **more) as build, heard() as said:
        first = build()
        first.add_callback(Stop())
        first.train()
        checkpoint = Path(first.args.output_dir, f"checkpoint-{STOP}")
        for file in checkpoint.glob("*.safetensors"):
            weights = load_file(file)
            spoil(weights)
            save_file(weights, file, {"format": "pt"})
        second = build()
        loading = mock.patch.object(second.model, "load_state_dict", wraps=second.model.load_state_dict)
        first_question = mock.patch.object(saved_weights, "isinstance", wraps=isinstance, create=True)  # after it
        warnings: list[Any] = []
        with loading as called, first_question as asked:
            with mock.patch.object(second, "_issue_warnings_after_load", side_effect=warnings.append):
                second._load_from_checkpoint(str(checkpoint))
            times = called.call_count
        touched = ""
        try:
            with untouched(second):
                second._load_from_checkpoint(str(checkpoint))
        except AssertionError as found:
            touched = str(found)
        return {
            "off": off(second.model.state_dict(), first.model.state_dict()),
            "loads": times,
            "asked": asked.call_count,
            "missing": sorted(key for result in warnings for key in result.missing_keys),
            "unexpected": sum(len(result.unexpected_keys) for result in warnings),
            "tied": second.model.get_input_embeddings().weight is second.model.get_output_embeddings().weight,
            "said": said,
            "touched": touched,
        }


def without_an_expert(weights: dict[str, Any]) -> None:
    del weights[next(key for key in weights if ".experts.3." in key)]


def narrower(weights: dict[str, Any]) -> None:
    for key in weights:
        if ".experts." in key:
            weights[key] = weights[key][:, :-1].contiguous()


def not_a_number(weights: dict[str, Any]) -> None:
    weights[next(key for key in weights if ".experts.3." in key)][0, 0] = float("nan")


class Custom(transformers.Qwen3ForCausalLM):
    """A model of one's own, of which nothing is known: its experts are saved as they are."""

    @staticmethod
    def of() -> PreTrainedModel:
        return Custom(transformers.Qwen3Config(**SIZES))


def another_key(weights: dict[str, Any]) -> None:
    weights["lm_head.other"] = weights.pop("lm_head.weight")


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "Mixtral": lambda: resumed(mixtral),
    "Mixtral, shards": lambda: resumed(mixtral, shards=True),
    "Mixtral, bfloat16": lambda: resumed(in_bfloat16),
    "Qwen3-MoE": lambda: resumed(qwen3_moe),
    "Qwen3-MoE, loaded": lambda: resumed(loaded),
    "Qwen2.5-VL, loaded": lambda: resumed(vision_loaded),
    "Qwen2.5-VL": lambda: resumed(vision),
    "Qwen2.5-VL, shards": lambda: resumed(vision_loaded, shards=True),
    "best": lambda: best(mixtral),
    "best, shards": lambda: best(mixtral, shards=True),
    "best, Qwen2.5-VL": lambda: best(vision_loaded),
    "loads": lambda: loads(mixtral),
    "loads, not a number": lambda: loads(mixtral, not_a_number),
    "dense": lambda: loads(dense),
    "dense, tied": lambda: loads(lambda: dense(tie_word_embeddings=True)),
    "dense, another key": lambda: loads(Custom.of, another_key),
    "without an expert": lambda: loads(mixtral, without_an_expert),
    "narrower experts": lambda: loads(mixtral, narrower),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    options = parser.parse_args()
    of_states = iter((options.cases, options.cases, options.cases[:1]))
    states.report(NAME, lambda: {name: CASES[name]() for name in next(of_states)}, options.out)
