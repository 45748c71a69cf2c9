"""DistillationTrainer and asynchronous GRPO's head on models that scale or cap: ``--out FOLDER [CASE ...]``.

How far the loss and the gradient of the backbone are from those of the models' own forwards in float64.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from trl.trainer import utils

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.logit_scaling_ranks import MODELS, NAME
from rlhf_patches.proving import states
from tests.patches.trl.logit_scaling_ranks import UnscaledForCausalLM, granite

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def errors(loss: Any, gradients: dict[str, Any], exact: Any, right: torch.Tensor) -> dict[str, float]:
    """Relative ones; of the gradients those that both have, without the head's."""
    right.backward()
    wanted = {name.split("base_model.model.")[-1]: each.grad for name, each in exact.named_parameters()}
    names = [name for name in gradients if "layers" in name and wanted[name] is not None]
    difference = sum(float((gradients[name].double() - wanted[name]).square().sum()) for name in names)
    total = sum(float(wanted[name].square().sum()) for name in names)
    return {
        "loss": abs(float(loss) - float(right)) / float(right),
        "gradient": (difference / total) ** 0.5,
        "found": float(loss),
    }


def distilled(make: Callable[[], Any], **more: Any) -> Any:
    """A step of reverse KL over completions that the student generates, half of the head's weights in the teacher."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    teacher = make()
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(0.5)
    options: dict[str, Any] = {"max_steps": 1, "logging_steps": 1, "learning_rate": 0.0, "beta": 1.0, "seed": 3}
    options |= {"per_device_train_batch_size": 4, "max_completion_length": 4, "output_dir": "trainer"}
    trainer = trl.DistillationTrainer(
        model=make(),
        teacher_model=copy.deepcopy(teacher),
        args=trl.DistillationConfig(**{**small.STEPS, **options}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in small.PROMPTS]),
        processing_class=small.tokenizer(),
        **more,
    )
    seen: list[dict[str, Any]] = []
    released = trainer._compute_loss

    def recording(student: Any, inputs: Any, items: Any) -> Any:
        seen.append({name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")})
        return released(student, inputs, items)

    trainer._compute_loss = recording
    gradients: dict[str, Any] = {}

    class Kept(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            named = kwargs["model"].named_parameters()
            gradients.update(
                {name.split("base_model.model.")[-1]: each.grad for name, each in named if each.grad is not None}
            )

    trainer.add_callback(Kept())
    exact = copy.deepcopy(trainer.model).double().eval()
    trainer.train()
    (inputs,) = seen
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    kept = inputs["completion_mask"].bool()
    ours, theirs = (
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        .logits[:, -kept.size(1) - 1 : -1][kept]
        .log_softmax(-1)
        for model in (exact, teacher.double())
    )
    right = (ours.exp() * (ours - theirs.detach())).sum(-1).mean()
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return errors(logged, {name: each.clone() for name, each in gradients.items()}, exact, right)


def asynchronous(make: Callable[[], Any]) -> Any:
    """The head that AsyncGRPOTrainer puts on its model."""
    model = make()
    exact = copy.deepcopy(model).double()
    utils.patch_chunked_lm_head(model, chunk_size=16, temperature=0.7)
    ids = torch.arange(4, 16).view(2, 6)
    found = model(input_ids=ids, labels=ids)
    loss = -found["log_probs"].mean()
    loss.backward()
    logits = exact(input_ids=ids, use_cache=False).logits[:, :-1] / 0.7
    right = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return errors(loss, gradients, exact, right)


CASES: dict[str, Callable[[], Any]] = {
    **{f"distilled {name}": functools.partial(distilled, make) for name, make in MODELS.items()},
    "distilled Granite, LoRA": lambda: distilled(MODELS["Granite"], peft_config=LORA),
    "distilled, own forward": lambda: distilled(lambda: granite(UnscaledForCausalLM)),
    **{f"asynchronous {name}": functools.partial(asynchronous, make) for name, make in MODELS.items()},
    "asynchronous, own forward": lambda: asynchronous(lambda: granite(UnscaledForCausalLM)),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    os.chdir(states.folder())
    states.report_cases(NAME, lambda cases: {case: CASES[case]() for case in cases}, options.cases, options.out)
