"""What ms-swift's Megatron trainers make of their logits, on gloo ranks that each have a part of the vocabulary.

``--out FOLDER PATCH``, with a release of ms-swift on sys.path: as released, patched, and reverted, in one process.
Real are ms-swift's functions, its GRPO and GKD losses with all that they call, and megatron-core's model. Ours are the
batch, and logits where no model is needed. The yardstick is float64 over the whole vocabulary, in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import rlhf_patches
from tests.harness.token_reference import Source, counted_all_reduces, made, peak_memory, reference
from tests.patches.swift import null_ref_context_ranks

VOCABULARY, IGNORED = 48, -100

CASES: dict[str, dict[str, Any]] = {
    "batch": {},
    "packed": {"shape": (1, 12)},
    "entropy": {"entropy": "in the loss"},
    "packed entropy": {"shape": (1, 12), "entropy": "in the loss"},
    "entropy for metrics": {"entropy": "for metrics"},
    "temperature": {"temperature": 0.7, "entropy": "for metrics"},
    "recompute": {"recompute": True, "entropy": "in the loss"},
    "view": {"shape": (1, 12), "change": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)},
    "output that is saved": {"change": lambda x: x.tanh()},
    "float32 of bfloat16": {"dtype": torch.bfloat16, "change": lambda x: x.float(), "temperature": 0.7},
    "bfloat16": {"dtype": torch.bfloat16, "entropy": "in the loss"},
    "held": {"hold": True, "entropy": "in the loss"},
    "nothing to predict": {"ignored": 1.0, "entropy": "for metrics"},
    "no gradient": {"no_grad": True},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("patch")
    parser.add_argument("parts", nargs="*", default=["functions"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start(context=2 if "context" in options.parts else 1)
    report: dict[str, Any] = {}
    for state in ("released", "patched", "reverted"):
        if state == "patched":
            rlhf_patches.apply(only=options.patch)
        for part in options.parts:
            report.setdefault(part, {})[state] = PARTS[part]()
        if state == "patched":
            report["row"] = rlhf_patches.report()[options.patch].to_dict()
            rlhf_patches.revert()
    (options.out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


def start(context: int) -> None:
    """Load ms-swift's Megatron trainers, and make groups of so many context-parallel ranks, tensor-parallel within."""
    null_ref_context_ranks.load_megatron()
    # What ms-swift 3 reads everywhere with `get_args()`.
    null_ref_context_ranks.Args.current = SimpleNamespace(distributed_timeout_minutes=2, context_parallel_size=1)
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(ranks // context, context_parallel_size=context)
    model_parallel_cuda_manual_seed(0)


# -- the function ----------------------------------------------------------------------------------------------------


def functions() -> dict[str, Any]:
    return {name: run(**case) for name, case in CASES.items()}


def run(
    shape: tuple[int, int] = (3, 5),
    entropy: str | None = None,
    temperature: float = 1.0,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    hold: bool = False,
    no_grad: bool = False,
    ignored: float = 0.3,
) -> dict[str, Any]:
    """The errors of what the function returns, and of the gradient, relative to its norm; and what it has cost."""
    module = importlib.import_module("swift.megatron.trainers.vocab_parallel_utils")
    torch.manual_seed(0)
    values = (torch.randn(*shape, VOCABULARY) * 3).to(dtype)
    labels = torch.randint(0, VOCABULARY, shape).masked_fill_(torch.rand(shape) < ignored, IGNORED)
    weights, of_entropy = torch.randn(shape), torch.randn(shape)
    here = part_of_this_rank()
    found: list[torch.Tensor] = []

    def logits_of(leaf: torch.Tensor) -> torch.Tensor:
        logits = change(leaf)
        return logits.div_(temperature) if temperature != 1 else logits

    def ours(leaf: torch.Tensor) -> Any:
        return module.compute_logps_and_entropy_from_logits(logits_of(leaf), labels, compute_entropy=bool(entropy))

    observed = importlib.import_module("rlhf_patches.patches._vocab_parallel.counters")
    observed.reset()
    report: dict[str, Any] = {}
    leaf = made(values[..., here].contiguous(), lambda gradient: found.append(gradient.clone()))
    with contextlib.ExitStack() as stack:
        if no_grad:
            stack.enter_context(torch.no_grad())
        forward = stack.enter_context(counted_all_reduces())
        if recompute:
            logps, entropies = checkpoint(ours, leaf, use_reentrant=False)
        else:
            logits = logits_of(leaf)
            before = logits.detach().clone()
            logps, entropies = module.compute_logps_and_entropy_from_logits(
                logits, labels, compute_entropy=bool(entropy)
            )
            report["logits unchanged by forward"] = torch.equal(logits.detach(), before)
    held = [logits] if hold else []
    logits = leaf = None
    exact = reference_of(values, labels, weights, of_entropy if entropy == "in the loss" else None, change, temperature)
    report["collectives"] = [len(forward)]
    report["dtypes"] = [str(logps.dtype), str(entropies.dtype) if entropy else None]
    report["log-probabilities"] = (logps.detach().double() - exact[0]).abs().max().item()
    report["entropies"] = (entropies.detach().double() - exact[1]).abs().max().item() if entropy else None
    if not no_grad:
        loss = (logps * weights).sum()
        if entropy == "in the loss":
            loss = loss + (entropies * of_entropy).sum()
        logps = entropies = None
        with counted_all_reduces() as backward:
            try:
                loss.backward()
            except RuntimeError as error:
                return {**report, "failed": str(error)}
        report["collectives"].append(len(backward))
        report["gradient"] = relative(found[0], exact[2][..., here])
        report["norm"] = found[0].double().norm().item()
        if hold:
            report["logits unchanged by backward"] = torch.equal(held[0].detach(), before)
    report["observed"] = observed.observed()
    return report


def reference_of(values: Any, labels: Any, weights: Any, of_entropy: Any, change: Any, temperature: float) -> Any:
    """In float64, as `token_reference.reference`, of what is made of the values; the gradient is that of the values."""
    leaf = values.double().requires_grad_()
    logits = change(leaf).double() / temperature
    known = labels != IGNORED
    log_probs, entropy, gradient = reference(logits, labels.clamp(min=0), weights * known, of_entropy)
    logits.backward(gradient)
    return log_probs * known, entropy, leaf.grad


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    difference = (found.double() - exact).norm().item()
    return difference / exact.norm().item() if exact.any() else difference


def part_of_this_rank(vocabulary: int = VOCABULARY) -> slice:
    from megatron.core import parallel_state

    size = vocabulary // parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return slice(rank * size, (rank + 1) * size)


# -- memory ----------------------------------------------------------------------------------------------------------


def memory(tokens: int = 4096, columns: int = 4096) -> dict[str, list[float]]:
    """Bytes beside this rank's logits, forward and backward, in multiples of the logits, by dtype and entropies."""
    module = importlib.import_module("swift.megatron.trainers.vocab_parallel_utils")
    report = {}
    for dtype, width in ((torch.float32, columns), (torch.bfloat16, 2 * columns)):
        for compute_entropy in (False, True):
            values = torch.zeros(1, tokens, width, dtype=dtype)
            labels = torch.zeros(1, tokens, dtype=torch.long)
            logits = Source.apply(torch.zeros(1, requires_grad=True), values.clone, lambda gradient: None)
            with peak_memory() as forward:
                logps, entropies = module.compute_logps_and_entropy_from_logits(
                    logits, labels, compute_entropy=compute_entropy
                )
            del logits, entropies
            loss = logps.sum()
            with peak_memory() as backward:
                loss.backward()
            name = f"{str(dtype).removeprefix('torch.')}{', entropies' if compute_entropy else ''}"
            report[name] = [forward.bytes / values.nbytes, backward.bytes / values.nbytes]
    return report


# -- GKD's divergence ------------------------------------------------------------------------------------------------


def divergence() -> dict[str, Any]:
    """The loss of GKD between a student and a teacher, by beta: its error, and that of its gradient."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 2, 6, VOCABULARY).mul_(3).unbind()
    labels = torch.randint(0, VOCABULARY, (2, 6)).masked_fill_(torch.rand(2, 6) < 0.3, IGNORED)
    here, report = part_of_this_rank(), {}
    for beta in (0.0, 0.5, 1.0):
        leaf = student[..., here].clone().requires_grad_()
        loss = gkd_loss(leaf, teacher[..., here], labels, beta, 0.9)
        loss.backward()
        exact = student.double().requires_grad_()
        wanted = divergence_as_defined(exact, teacher.double(), labels, beta, 0.9)
        wanted.backward()
        report[str(beta)] = {
            "loss": abs(loss.item() - wanted.item()) / wanted.item(),
            "gradient": relative(leaf.grad, exact.grad[..., here]),
        }
    return report


def gkd_loss(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float, temperature: float
) -> Any:
    """As the release's trainer computes it: a method before 4.3, then a function that is given the trainer's."""
    module: Any = importlib.import_module("swift.megatron.trainers.gkd_trainer")
    trainer = object.__new__(module.MegatronGKDTrainer)
    trainer.temperature, trainer.beta, trainer.sft_alpha = temperature, beta, 0
    if hasattr(trainer, "generalized_jsd_loss"):
        return trainer.generalized_jsd_loss(student, teacher, labels, beta)
    trainer.args = SimpleNamespace(context_parallel_size=1)
    trainer._all_reduce_metric, trainer._step, trainer.steps_per_generation = lambda metric: metric, 0, 2
    of_teacher = module.TeacherOutput(full_logits=teacher)
    of_teacher.labels = labels  # a field since 4.4
    loss, _ = trainer.loss_func(student, labels=labels, teacher_output=of_teacher)
    return loss


def divergence_as_defined(student: Any, teacher: Any, labels: Any, beta: float, temperature: float) -> torch.Tensor:
    """Mean over tokens of beta KL(t, m) + (1 - beta) KL(s, m), where m is beta t + (1 - beta) s.

    Of KL(t, s) for beta 0, of KL(s, t) for beta 1.
    """
    known = labels != IGNORED
    s, t = ((logits[known] / temperature).log_softmax(-1) for logits in (student, teacher))

    def divergence(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return (of.exp() * (of - to)).sum()

    if beta in (0.0, 1.0):
        return (divergence(t, s) if beta == 0 else divergence(s, t)) / known.sum()
    mixture = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return (beta * divergence(t, mixture) + (1 - beta) * divergence(s, mixture)) / known.sum()


# -- GRPO's training step --------------------------------------------------------------------------------------------

BATCH, SEQUENCE, TEMPERATURE, CLIP, BETA = 2, 8, 0.8, 0.2, 0.1


def step() -> dict[str, Any]:
    """The error of the gradient that GRPO's loss hands to the model's logits; the norm of the weights' gradients."""
    module: Any = importlib.import_module("swift.megatron.trainers.grpo_trainer")
    batch_class = importlib.import_module("swift.rl_core.data").GRPOBatch
    return {name: grpo_step(module.MegatronGRPOTrainer, batch_class, name == "entropies") for name in ("", "entropies")}


def grpo_step(trainer_class: Any, batch_class: Any, entropies: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = megatron_model()
    tokens, labels = torch.randint(0, VOCABULARY, (2, BATCH, SEQUENCE)).unbind()
    labels[:, :3] = IGNORED  # the prompt
    shifted = labels.roll(-1, -1)
    known = shifted != IGNORED
    old, behind = (torch.rand(2, BATCH, SEQUENCE) - 4.4).unbind()
    advantages = torch.tensor([[1.0], [-0.7]]).expand(BATCH, SEQUENCE)
    batch = batch_class(
        completion_mask=known,
        truncated_mask=torch.zeros(BATCH, dtype=torch.bool),
        seq_lengths=torch.full((BATCH,), SEQUENCE),
        old_per_token_logps=old,
        ref_per_token_logps=behind,
        advantages=advantages,
    )
    made_by_model: list[torch.Tensor] = []
    arrived: list[torch.Tensor] = []

    def forward(**inputs: Any) -> torch.Tensor:
        rows = inputs["input_ids"].shape[1]  # with context parallelism, each rank attends to its own
        inputs["attention_mask"] = torch.ones(rows, rows, dtype=torch.bool).triu(1)[None, None]
        logits: torch.Tensor = model(**inputs)
        made_by_model.append(logits.detach().clone())
        logits.register_hook(lambda gradient: arrived.append(gradient.clone()))
        return logits

    trainer = grpo_trainer(trainer_class, model, entropies)
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    data = {"input_ids": tokens, "labels": labels, "position_ids": positions, "grpo_batch": batch}
    forward.config = model.config  # type: ignore[attr-defined]
    output, loss_of = trainer.forward_step(iter([data]), forward)
    loss, _ = loss_of(output)
    del output, loss_of
    loss.backward()
    whole, place = of_all_ranks(made_by_model[0])
    exact = whole.double().requires_grad_()
    wanted = grpo_as_defined(exact, shifted, known, old.double(), behind.double(), advantages)
    wanted.backward()
    from megatron.core import parallel_state

    # Of weights that each rank has a part of, or all of, and of the logits.
    squares = torch.zeros(3, dtype=torch.double)
    squares[2] = arrived[0].double().square().sum()
    for weight in model.parameters():
        squares[0 if getattr(weight, "tensor_model_parallel", False) else 1] += weight.grad.double().square().sum()
    for parts in (squares[:1], squares[2:]):
        torch.distributed.all_reduce(parts, group=parallel_state.get_tensor_model_parallel_group())
    return {
        "loss": abs(loss.item() - wanted.item()) / abs(wanted.item()),
        "gradient": relative(arrived[0], exact.grad[place]),
        "norm": squares[:2].sum().sqrt().item(),
        "norm at the logits": squares[2].sqrt().item(),
        "norm in float64": exact.grad.norm().item(),
    }


def grpo_as_defined(logits: Any, labels: Any, known: Any, old: Any, behind: Any, advantages: Any) -> torch.Tensor:
    """The clipped objective with a KL penalty (Shao et al., DeepSeekMath, 2024, eq. 3 and 4): mean over samples."""
    logps = (logits / TEMPERATURE).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    ratio = (logps - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    penalty = (behind - logps).exp() - (behind - logps) - 1
    return -(((objective - BETA * penalty) * known).sum(-1) / known.sum(-1)).mean()


def grpo_trainer(trainer_class: Any, model: Any, entropies: bool) -> Any:
    """The trainer without its set-up, which would load a model and start a server for rollouts."""
    from megatron.core import parallel_state

    trainer = object.__new__(trainer_class)
    trainer.args = SimpleNamespace(
        task_type="causal_lm",
        pipeline_model_parallel_size=1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        cp_partition_mode="zigzag",
        padding_free=False,
        overlong_filter=False,
        delta=None,
        num_microbatches=1,
        report_to=[],
        is_multimodal=False,
    )
    trainer.enable_routing_replay = trainer.disable_rollout_importance_sampling = False
    trainer.rollout_importance_sampling_mode = trainer.off_policy_sequence_mask_delta = None
    trainer.log_rollout_offpolicy_metrics = trainer.kl_in_reward = trainer._has_teacher = False
    trainer.compute_entropy = trainer.log_entropy = entropies
    trainer.top_entropy_quantile, trainer.importance_sampling_level, trainer.loss_type = 1.0, "token", "grpo"
    trainer.temperature, trainer.beta, trainer.epsilon_low, trainer.epsilon_high = TEMPERATURE, BETA, CLIP, CLIP
    trainer.micro_batch_size, trainer._step, trainer.steps_per_generation = BATCH, 0, 2
    trainer.unwrapped_models, trainer._metrics = [model], defaultdict(lambda: defaultdict(list))
    return trainer


def megatron_model() -> Any:
    """The same weights whatever the number of ranks: each takes its part of those of the whole."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        init_method_std=0.1,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
    )


def of_all_ranks(logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The logits of all tokens over the whole vocabulary, and where among them this rank's are.

    Of 2 n equal parts of the sequence, rank r of n has the parts r and 2 n - 1 - r.
    """
    from megatron.core import parallel_state

    columns = part_of_this_rank()
    context, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    parts = torch.arange(SEQUENCE).chunk(2 * ranks)
    rows = torch.arange(SEQUENCE) if ranks == 1 else torch.cat([parts[context], parts[2 * ranks - 1 - context]])
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (rows, columns, logits))
    whole = torch.empty(BATCH, SEQUENCE, VOCABULARY)
    for their_rows, their_columns, part in everyone:
        whole[:, their_rows[:, None], torch.arange(VOCABULARY)[their_columns]] = part
    return whole, (slice(None), rows[:, None], torch.arange(VOCABULARY)[columns])


PARTS: dict[str, Callable[[], Any]] = {
    "functions": functions,
    "memory": memory,
    "divergence": divergence,
    "step": step,
    "context": step,  # of two context-parallel ranks
}
