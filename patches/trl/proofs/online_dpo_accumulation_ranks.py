"""Gradients of Online DPO's family, and Online DPO's by its definition in float64: ``--out FOLDER CASE...``.

Each case before apply() of trl-online-dpo-accumulation and after it, the first one after revert() too. Completions are
given, not sampled: what is sampled differs with the size of a batch.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import datasets
import torch
import torch.nn.functional as F
import transformers

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-online-dpo-accumulation"
BETA = 0.3
PAD, END = 0, 1
PROMPTS = [list(range(10 + 4 * row, 10 + 4 * row + 1 + (row + 1) % 3)) for row in range(8)]
FIRST = [[*range(50 + row, 52 + row + row % 3), END] for row in range(8)]
SECOND = [[*range(70 + row, 73 + row + row % 2), END] for row in range(8)]
REWARDS = [float(row % 3 != 1) for row in range(8)]
"""That the first completion is the better one."""
RATE = 0.1
ENGINE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
}
STEPS_BY_RATE = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant"}
MODULES = {"OnlineDPO": "online_dpo", "NashMD": "nash_md", "XPO": "xpo"}


def text(tokens: list[int]) -> str:
    """As the tokenizer of small.py has them."""
    return " ".join(f"w{token - 3}" for token in tokens)


ROW_OF = {text(prompt): row for row, prompt in enumerate(PROMPTS)}


def reference() -> Any:
    made = small.model()
    torch.manual_seed(3)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def judge() -> Any:
    """A reward model, which Nash-MD and XPO want."""
    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=99, num_labels=1, pad_token_id=PAD, **sizes)
    made = transformers.LlamaForSequenceClassification(config)
    torch.nn.init.normal_(made.score.weight)
    return made.eval()


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and where they are."""
    width = max(map(len, rows))

    def filled(row: list[int], value: int) -> list[int]:
        more = [value] * (width - len(row))
        return more + row if left else row + more

    return torch.tensor([filled(row, PAD) for row in rows]), torch.tensor([filled([1] * len(row), 0) for row in rows])


class Divides:
    """Has repaired the size of the gradient itself."""

    def training_step(self, *given: Any) -> Any:
        loss = super().training_step(*given)  # type: ignore[misc]
        if self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            for each in self.model.parameters():  # type: ignore[attr-defined]
                if each.grad is not None:
                    each.grad /= self.args.gradient_accumulation_steps  # type: ignore[attr-defined]
        return loss


class Given:
    """Completions in place of those that a trainer samples."""

    def _generate(self, _: Any, prompts: list[str], *__: Any) -> tuple[Any, ...]:
        rows = [ROW_OF[prompt] for prompt in prompts]
        ids, mask = padded([PROMPTS[row] for row in rows] * 2, True)
        answers, is_answer = padded([FIRST[row] for row in rows] + [SECOND[row] for row in rows], False)
        # 1.16.0 wants a fifth, of images.
        with_vision = "completion_mask, vision" in inspect.getsource(super()._generate)  # type: ignore[misc]
        return (ids, mask, answers, is_answer, *([None] if with_vision else []))

    def _generate_completions(self, *given: Any) -> tuple[Any, Any]:
        """Of the model, then of the reference or the mixture."""
        (prompts,) = (each for each in given if isinstance(each, dict))
        rows = [ROW_OF[prompt] for prompt in prompts["raw"]]
        return tuple(
            torch.cat((prompts["input_ids"], padded([each[row] for row in rows], False)[0]), dim=1)
            for each in (FIRST, SECOND)
        )


def reward(prompts: list[str], **_: Any) -> list[float]:
    half = len(prompts) // 2
    return [REWARDS[ROW_OF[prompt]] if at < half else 0.5 for at, prompt in enumerate(prompts)]


def made(case: str) -> Any:
    """The trainer of a case, as ``XPO 4`` or ``OnlineDPO 3 short``: micro-batches of a step on a rank, and more."""
    name, steps, *words = case.split()
    try:
        module = importlib.import_module(f"trl.experimental.{MODULES[name]}")
    except ModuleNotFoundError:
        module = importlib.import_module("trl")
    kind, folder, model = getattr(module, f"{name}Trainer"), states.folder(), small.model()
    rows = len(PROMPTS)
    arguments = getattr(module, f"{name}Config")(
        folder,
        per_device_train_batch_size=1 if "short" in words else rows // int(steps) // int(os.environ["WORLD_SIZE"]),
        gradient_accumulation_steps=int(steps),
        num_train_epochs=1,  # one step, or where it is "short" several, of which the last has fewer micro-batches
        beta=BETA,
        max_new_tokens=8,
        max_length=32,
        missing_eos_penalty=None,
        logging_steps=1,
        **small.STEPS,
        **({"deepspeed": ENGINE, **STEPS_BY_RATE} if "deepspeed" in words else {}),
    )
    optimizer = Kept(model.parameters(), lr=RATE)
    return type(f"Given{name}", (*[Divides] * ("divides" in words), Given, kind), {})(
        model=model,
        ref_model=reference(),
        reward_funcs=reward if name == "OnlineDPO" else judge(),
        **({"reward_processing_classes": small.tokenizer()} if name == "XPO" else {}),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": text(prompt)} for prompt in PROMPTS]),
        processing_class=small.tokenizer(),
        **({} if "deepspeed" in words else {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}),
    )


def summed(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The log-probability of an answer."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(answer)), answer].sum()


def by_definition(rows: list[int]) -> tuple[torch.Tensor, float]:
    """Equation 2 of Guo et al. (2024), a mean over prompts, and its gradient."""
    policy, other = small.model().double(), reference().double()
    losses = []
    for row in rows:
        pair = (FIRST[row], SECOND[row]) if REWARDS[row] >= 0.5 else (SECOND[row], FIRST[row])
        ratios = [summed(policy, PROMPTS[row], each) - summed(other, PROMPTS[row], each).detach() for each in pair]
        losses.append(-F.logsigmoid(BETA * (ratios[0] - ratios[1])))
    loss = torch.stack(losses).mean()
    loss.backward()
    found = torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])
    return found, float(loss)


def trained(case: str) -> dict[str, Any]:
    trainer = made(case)
    if "accelerate" in case:  # as transformers 5.2.0 to 5.5.3 do
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    if "backward" in case:
        backward = trainer.accelerator.backward
        trainer.accelerator.backward = lambda loss: backward(loss / trainer.args.gradient_accumulation_steps)
    rows: list[int] = []
    trainer.add_callback(Seen(rows))
    start = [each.detach().clone() for each in trainer.model.parameters()]
    generate = trainer._generate

    def recording(model: Any, prompts: list[str], *more: Any) -> Any:
        rows.extend(ROW_OF[prompt] for prompt in prompts)
        return generate(model, prompts, *more)

    trainer._generate = recording
    trainer.train()
    if "deepspeed" in case:  # which has its own buffers of gradients: by what the step has changed
        pairs = zip(start, trainer.accelerator.unwrap_model(trainer.model).parameters(), strict=True)
        gradient = [(before.double() - after.detach().double()) / RATE for before, after in pairs]
    else:
        gradient = [each.double() for each in trainer.optimizer.optimizer.found]
    got = torch.cat([each.flatten() for each in gradient])
    found = {
        "gradient": [float(value).hex() for value in got[:: max(1, len(got) // 60)]],
        "norm": float(got.norm()),
        "logged": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "steps of accelerate": trainer.accelerator.gradient_accumulation_steps,
    }
    if not case.startswith("OnlineDPO"):
        return found
    # On several ranks all of the data; in a short window what it has.
    last = rows if "short" in case else range(len(PROMPTS))
    right, loss = by_definition(list(last))
    return {
        **found,
        "factor": float(got @ right / (right @ right)),
        "error": float((got - right).norm() / right.norm()),
        "loss": loss,
        "rows": len(list(last)),
    }


class Seen(transformers.TrainerCallback):
    """Forgets, with each step that begins, the prompts of the one before."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.rows.clear()


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    if "deepspeed" in options.cases[0]:
        on_cpu.start()
    else:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    states.report(NAME, lambda: {case: trained(case) for case in options.cases}, options.out)
