"""Steps that go on from a checkpoint, and steps without a stop, by the real ``Trainer``: ``--out FOLDER [CASE ...]``.

As the proof of transformers-resume-weights: more models, the best of several checkpoints, and files that do not fit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback

from rlhf_patches.patches.transformers import _saved_weights
from rlhf_patches.patches.transformers.proofs import resume_weights_ranks
from rlhf_patches.patches.transformers.proofs.moe_aux_loss_ranks import SIZES, made, qwen3_moe
from rlhf_patches.patches.transformers.proofs.resume_weights_ranks import (
    STOP,
    Make,
    Stop,
    off,
    resumed,
    trainers,
    vision,
    vision_loaded,
)
from rlhf_patches.proving import states
from rlhf_patches.testing import untouched


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


class Keep(TrainerCallback):
    """The weights after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def best(make: Make, **more: Any) -> dict[str, Any]:
    """The weights after the first of two steps, of which that is the better one by this measure."""
    between: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    with trainers(make, **between, metric_for_best_model="eval_loss", **more) as build, states.heard() as said:
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
    with trainers(make, **more) as build, states.heard() as said:
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
        first_question = mock.patch.object(_saved_weights, "isinstance", wraps=isinstance, create=True)  # after it
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
    **resume_weights_ranks.CASES,
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
    resume_weights_ranks.main(CASES)
