"""A step of SFT whose loss is computed from the logits, on one rank or several: ``--out FOLDER [CASE ...]``.

Each case before apply() of trl-sft-label-smoothing, after it, and after revert(): what the step raised, or its loss,
metrics and gradient, and how far the gradient is from the definition in float64.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.logit_scaling_ranks import _Gradients
from rlhf_patches.proving import states

NAME = "trl-sft-label-smoothing"
SMOOTHING = 0.1
TEXTS = ("w1 w2 w3 w4 w5", "w6 w7 w8")


def mean_of(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The mean loss of the labels, which are not shifted."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)


def own(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A user's loss function."""
    return mean_of(outputs.logits, labels, 0.0)


def step(
    make: Callable[[], Any] = small.model,
    smoothing: float = SMOOTHING,
    function: Any = None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A step with two texts."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    import trl
    from datasets import Dataset

    model = make()
    exact = copy.deepcopy(model).double()
    options = {**small.STEPS, "output_dir": "trainer", "max_steps": 1, "logging_steps": 1, "learning_rate": 0.0}
    options |= {"per_device_train_batch_size": 2, "label_smoothing_factor": smoothing, "loss_type": "chunked_nll"}
    gradients = _Gradients()
    texts = Dataset.from_list([{"text": text} for text in TEXTS * int(os.environ.get("WORLD_SIZE", "1"))])
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**options | settings),
        train_dataset=texts,
        eval_dataset=texts,
        processing_class=small.tokenizer(),
        callbacks=[gradients],
        compute_loss_func=function,
        **(more or {}),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    try:
        trainer.train()
    except AttributeError as error:
        return {"failed": str(error)}
    logits = exact(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    mean_of(logits, batch["labels"], smoothing).backward()
    wanted = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    found: dict[str, Any] = {
        "log": {name: value for name, value in trainer.state.log_history[0].items() if "token" in name}
    }
    found["log"] |= {name: trainer.state.log_history[0][name] for name in ("loss", "entropy")}
    found["hex"] = [float(each.sum()).hex() for each in gradients.found.values()]
    if set(wanted) == set(gradients.found):  # not with an adapter
        off = sum(float((gradients.found[name] - each).square().sum()) for name, each in wanted.items())
        found["gradient"] = (off / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5
    evaluated = trainer.evaluate()
    found["evaluated"] = [evaluated[f"eval_{name}"] for name in ("loss", "entropy", "mean_token_accuracy")]
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {"smoothed": step}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    options = parser.parse_args()
    os.chdir(states.folder())
    states.report_cases(NAME, lambda names: {name: cases[name]() for name in names}, options.cases, options.out)
