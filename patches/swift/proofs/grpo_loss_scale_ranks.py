"""A step of ms-swift's GRPO trainer without Megatron, over several micro-batches, with a loss over all their tokens.

``--out FOLDER [CASE ...]``, with a release of ms-swift on sys.path, on any number of ranks that each have other
micro-batches. Real are the trainer's ``training_step`` with all that it calls (TRL's and transformers' included) and
transformers' Qwen2. Ours are the rollouts, and the trainer's set-up, which would load a model and start a server. The
yardstick are the published objectives in float64 over the tokens of all micro-batches of all ranks, from the same
weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.swift.proofs.small import VOCABULARY, Transformers
from rlhf_patches.proving import states

NAME = "swift-grpo-loss-scale"
STEPS, ROWS, PROMPT, COMPLETION = 3, 2, 4, 6
LOW, HIGH, CAP, MU = 0.1, 0.15, 1.1, 0.3


#: Of ratio, advantage and log-probability: what is averaged over tokens, and maximized.
OBJECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 8
    "dapo": lambda ratio, advantage, logps: torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage),
    # MiniMax 2025, CISPO, arXiv 2506.13585, eq. 4 and 5, without a lower bound; ms-swift's bound is of the ratio itself
    "cispo": lambda ratio, advantage, logps: ratio.clamp(max=CAP).detach() * advantage * logps,
}


@functools.cache
def family() -> Transformers:
    """The trainer's class, and the models that go with it."""
    try:
        return Transformers("swift.rlhf_trainers.grpo_trainer:GRPOTrainer")
    except ModuleNotFoundError:  # before 4.0
        return Transformers("swift.trainers.rlhf_trainer.grpo_trainer:GRPOTrainer")


def make_model() -> Any:
    torch.manual_seed(1)
    model = family().make_model()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def make_batches(ranks: int) -> list[list[dict[str, Any]]]:
    """Micro-batches of each rank, of different lengths; the last row of each has a short completion."""
    torch.manual_seed(2)
    every = []
    for number in range(ranks * STEPS):
        mask = torch.arange(COMPLETION) < torch.tensor([[COMPLETION], [1 + number % COMPLETION]])
        every.append(
            {
                "tokens": torch.randint(0, VOCABULARY, (ROWS, PROMPT + COMPLETION)),
                "mask": mask,
                # Near those of the policy, so that some ratios are clipped and some are not.
                "behind": torch.rand(ROWS, COMPLETION) / 2 - 0.25,
                "advantages": torch.tensor([[1.0], [-0.7]]),
                "sft": torch.randint(0, VOCABULARY, (1, 7)),
            }
        )
    return [every[rank * STEPS : (rank + 1) * STEPS] for rank in range(ranks)]


def logps_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Of the completion, ``[rows, tokens]``."""
    logits = model(input_ids=batch["tokens"]).logits[:, PROMPT - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, batch["tokens"][:, PROMPT:, None])[..., 0]
    return found


def as_published(loss_type: str, model: Any, batches: list[list[dict[str, Any]]], chord: bool) -> torch.Tensor:
    """The loss of the whole step; CHORD's part is the mean over micro-batches of means over tokens."""
    total, tokens, supervised = torch.zeros((), dtype=torch.double), 0, []
    for batch in (one for of_rank in batches for one in of_rank):
        logps = logps_of(model, batch)
        ratio = (logps - batch["old"]).exp()
        total = total - (OBJECTIVES[loss_type](ratio, batch["advantages"].double(), logps) * batch["mask"]).sum()
        tokens += int(batch["mask"].sum())
        if chord:
            rows = batch["sft"]
            predicted = model(input_ids=rows).logits[:, :-1].log_softmax(-1)
            supervised.append(-predicted.gather(-1, rows[:, 1:, None]).mean())
    loss = total / tokens
    return (1 - MU) * loss + MU * torch.stack(supervised).mean() if chord else loss


def multiplied(name: str) -> type:
    """The trainer of somebody who has met the bug: this method gives what the Trainer divides by."""

    def own(self: Any, *args: Any, **named: Any) -> Any:
        found = getattr(super(made, self), name)(*args, **named)
        times = self.current_gradient_accumulation_steps if self.model.training else 1
        return (found[0] * times, *found[1:]) if isinstance(found, tuple) else found * times

    made: type = type("Own", (family().trainer_class,), {name: own})
    return made


def undivided() -> type:
    """The trainer of somebody whose step divides nothing."""

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()

    return type("Own", (family().trainer_class,), {"training_step": training_step})


def make_trainer(model: Any, loss_type: str, sft: Any, made: type | None = None) -> Any:
    from accelerate import Accelerator

    trainer: Any = object.__new__(made or family().trainer_class)

    trainer.accelerator = Accelerator(cpu=True)
    trainer.model = trainer.model_wrapped = model
    trainer.args = SimpleNamespace(
        gradient_accumulation_steps=STEPS + 1,  # the last step of an epoch has fewer
        steps_per_generation=STEPS,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        async_generate=False,
        delta=None,
        torch_empty_cache_steps=None,
        optim="adamw_torch",
        n_gpu=1,
        world_size=trainer.accelerator.num_processes,
        device=torch.device("cpu"),
        report_to=[],
        chord_mu_warmup_steps=0,
        chord_mu_decay_steps=0,
        chord_mu_peak=MU,
        chord_mu_valley=MU,
        chord_enable_phi_function=False,
    )
    trainer.template = SimpleNamespace(
        padding_free=False, sequence_parallel_size=1, data_collator=lambda inputs: inputs, max_length=None
    )
    # As the trainer's own `__init__` sets it, and the Trainer's loop.
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = False, None
    trainer.current_gradient_accumulation_steps = STEPS
    trainer.optimizer, trainer.use_apex, trainer._step, trainer._current_train_step_time = None, False, 0, 0.0
    trainer.state = SimpleNamespace(global_step=0)
    trainer.loss_type, trainer.importance_sampling_level, trainer.temperature = loss_type, "token", 1.0
    trainer.beta, trainer.epsilon_low = 0.0, LOW
    trainer.epsilon_high = CAP if loss_type == "cispo" else HIGH
    for name in (
        *("use_liger_loss", "dynamic_num_samples", "compute_entropy", "overlong_filter", "kl_in_reward", "eval_flag"),
        *("disable_rollout_importance_sampling", "log_rollout_offpolicy_metrics", "_has_teacher", "is_multimodal"),
    ):
        setattr(trainer, name, False)
    trainer.rollout_importance_sampling_mode = trainer.off_policy_sequence_mask_delta = None
    trainer.sdar_loss_coef, trainer.top_entropy_quantile, trainer.model_kwarg_keys = 0.0, 1.0, set()
    trainer._metrics, trainer.chord_sft_iterator = defaultdict(lambda: defaultdict(list)), sft
    trainer._prepare_inputs = lambda inputs: inputs  # it would generate
    trainer.compute_loss_context_manager = contextlib.nullcontext
    return trainer


def inputs_of(batch: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A micro-batch as the release has it: one dictionary, or since 4.4 the model's inputs and the rest."""
    model_inputs = {"input_ids": batch["tokens"], "attention_mask": torch.ones_like(batch["tokens"])}
    rest = {
        "completion_mask": batch["mask"],
        "truncated_mask": torch.zeros(ROWS, dtype=torch.bool),
        "seq_lengths": torch.full((ROWS,), PROMPT + COMPLETION),
        "old_per_token_logps": batch["old"].float(),
        "num_items_in_batch": torch.tensor(float(tokens)),
        "logits_to_keep": COMPLETION,
    }
    try:
        made = importlib.import_module("swift.rl_core.data").GRPOBatch
    except ModuleNotFoundError:
        return {**model_inputs, **rest, "advantages": batch["advantages"][:, 0]}
    advantages = batch["advantages"].expand(ROWS, COMPLETION)
    return {"model_inputs": model_inputs, "grpo_batch": made(**rest, advantages=advantages)}


def step(loss_type: str, chord: bool, own: type | None = None) -> dict[str, float]:
    """Loss and gradient of all ranks, against the objective; and the loss in evaluation."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model, batches = make_model(), make_batches(ranks)
    with torch.no_grad():
        for batch in (one for of_rank in batches for one in of_rank):
            batch["old"] = (logps_of(model, batch) + batch["behind"]).double()
    tokens = sum(int(batch["mask"].sum()) for of_rank in batches for batch in of_rank)
    first_is_prompt = torch.arange(7) == 0
    rows = (
        {"input_ids": batch["sft"], "labels": batch["sft"].masked_fill(first_is_prompt, -100)}
        for batch in batches[rank]
    )
    trainer = make_trainer(model, loss_type, rows if chord else None, own)
    loss = torch.stack([trainer.training_step(model, inputs_of(batch, tokens), None) for batch in batches[rank]]).sum()
    weight = model.model.layers[0].mlp.up_proj.weight
    gradient, weight.grad = weight.grad, None
    for found in (loss, gradient):  # as data parallelism does it
        torch.distributed.all_reduce(found)
        found /= ranks
    model.eval()
    with torch.no_grad():
        in_evaluation = trainer.compute_loss(model, inputs_of(batches[rank][0], tokens))
    model.double()
    wanted = as_published(loss_type, model, batches, chord)
    wanted.backward()
    of_first = as_published(loss_type, model, [batches[rank][:1]], False)
    share = int(batches[rank][0]["mask"].sum()) * ranks / tokens
    return {
        "loss": loss.item() / wanted.item(),
        "gradient": (gradient.double() * weight.grad).sum().item() / weight.grad.square().sum().item(),
        "off": (gradient.double() - weight.grad).norm().item() / weight.grad.norm().item(),
        "in evaluation": in_evaluation.item() / (of_first.item() * share),
    }


CASES: dict[str, tuple[str, bool]] = {"dapo": ("dapo", False), "cispo": ("cispo", False), "with CHORD": ("dapo", True)}


def observe(cases: list[str]) -> dict[str, Any]:
    return {name: step(*CASES[name]) for name in cases}


def observe_own() -> dict[str, Any]:
    """With trainers that are right as released; and what is said, in a step of each."""
    with states.heard() as said:
        found: dict[str, Any] = {
            **{name: step("dapo", False, multiplied(name)) for name in ("compute_loss", "_compute_loss_and_metrics")},
            "training_step": step("dapo", False, undivided()),
        }
    return {**found, "said": [line for line in said if NAME in line]}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--own", action="store_true")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    family()
    torch.distributed.init_process_group("gloo")
    states.report(NAME, observe_own if options.own else lambda: observe(options.cases), options.out)
