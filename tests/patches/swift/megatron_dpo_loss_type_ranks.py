"""ms-swift's Megatron DPO with each loss: a training step of a small model, and packed sequences on any ranks.

``--out FOLDER [PART ...]``, with a release of ms-swift on sys.path. Real are MegatronDPOTrainer's ``forward_step`` and
``loss_func`` with all that they call, and megatron-core's model. Ours are the batch and the trainer's set-up, which
would load a model. The yardstick are the published formulas in float64, of the same weights or token losses.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from rlhf_patches.proving import states
from tests.patches.swift import null_ref_context_ranks
from tests.patches.swift.logits_ranks import BATCH, IGNORED, SEQUENCE, VOCABULARY, megatron_model, relative, start

NAME = "swift-megatron-dpo-loss-type"
BETA = 0.1


def log_s(x: torch.Tensor) -> torch.Tensor:
    return functional.logsigmoid(x)


#: Loss of the log-ratios of policy and reference, of the chosen answers and of the rejected ones: sums over tokens, and
#: means for IPO.
FORMULAS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # Rafailov et al. 2023, arXiv 2305.18290, eq. 7
    "sigmoid": lambda good, bad: -log_s(BETA * (good - bad)),
    # Liu et al. 2023, arXiv 2309.06657, the hinge loss with gamma = beta
    "hinge": lambda good, bad: (1 - BETA * (good - bad)).clamp(min=0),
    # Azar et al. 2023, arXiv 2310.12036, eq. 17
    "ipo": lambda good, bad: (good - bad - 1 / (2 * BETA)) ** 2,
    # D'Oosterlinck et al. 2024, arXiv 2408.06266, APO-zero
    "apo_zero": lambda good, bad: 1 - (BETA * good).sigmoid() + (BETA * bad).sigmoid(),
    # Wu et al. 2024, arXiv 2405.00675, the hard labels' form
    "sppo_hard": lambda good, bad: (good - 1 / (2 * BETA)) ** 2 + (bad + 1 / (2 * BETA)) ** 2,
}
OUT_OF_REACH = ("bco_pair", "discopop", "sft", "hinged")


def as_published(loss_type: str, policy: torch.Tensor, reference: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Mean over pairs; log-probabilities ``[sequences, tokens]``, the chosen answers first."""
    ratios = ((policy - reference) * known).sum(-1)
    if loss_type == "ipo":
        ratios = ratios / known.sum(-1)
    return FORMULAS.get(loss_type, FORMULAS["sigmoid"])(*ratios.chunk(2)).mean()


def trainer_of(loss_type: str, packed: bool) -> Any:
    from megatron.core import parallel_state

    module: Any = importlib.import_module("swift.megatron.trainers.dpo_trainer")
    args = SimpleNamespace(
        tuner_type="full",
        mcore_ref_adapter=None,
        ref_adapters=None,
        rpo_alpha=None,
        padding_free=packed,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        loss_type=loss_type,
        beta=BETA,
        label_smoothing=0.0,
        reference_free=False,
        f_divergence_type="reverse_kl",
        micro_batch_size=1,
    )
    null_ref_context_ranks.Args.current = args  # what ms-swift 3 reads with `get_args()`
    trainer = object.__new__(module.MegatronDPOTrainer)
    trainer.args, trainer.dummy_dpo_trainer = args, module.DummyDPOTrainer(args)
    return trainer


def compared(loss: Any, gradient: Any, wanted: Any, wanted_gradient: Any) -> dict[str, float]:
    return {
        "value": loss.item(),
        "loss": abs(loss.item() - wanted.item()) / wanted.item(),
        "gradient": relative(gradient, wanted_gradient),
    }


def step(loss_type: str) -> dict[str, float]:
    """`forward_step` of a policy and a reference model: padded pairs of several lengths."""
    torch.manual_seed(0)
    policy, reference = megatron_model(), megatron_model()
    for weight in reference.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.02)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 2 * BATCH, SEQUENCE)).unbind()
    for row, (prompt, end) in enumerate(((3, 8), (2, 5), (3, 4), (2, 8))):
        labels[row, :prompt] = labels[row, end:] = IGNORED
    data = {
        "input_ids": tokens,
        "position_ids": torch.arange(SEQUENCE).expand_as(tokens),
        "attention_mask": torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None],
        "labels": labels,
    }
    trainer = trainer_of(loss_type, packed=False)
    trainer.ref_models, trainer.get_batch = [reference], lambda iterator, vp_stage=None: dict(data)
    policy.get_input_tensor, policy.vp_stage = lambda: None, None  # of a first stage, which receives nothing
    output, loss_of = trainer.forward_step(iter(()), policy)
    loss, _ = loss_of(output)
    loss.backward()
    weight = policy.output_layer.weight
    gradient, weight.grad = weight.grad, None

    def in_float64(model: Any) -> torch.Tensor:
        """The same weights, from here on."""
        logits = model.double()(tokens, data["position_ids"], data["attention_mask"])
        chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return chosen

    wanted = as_published(loss_type, in_float64(policy), in_float64(reference).detach(), labels != IGNORED)
    wanted.backward()
    return compared(loss, gradient, wanted, weight.grad)


LENGTHS, PROMPTS = (8, 4, 12, 4), (2, 1, 5, 3)


def packed(loss_type: str) -> dict[str, float]:
    """`loss_func` of token losses, four sequences in one row, each context-parallel rank with its part of each."""
    from megatron.core import parallel_state

    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    torch.manual_seed(0)
    policy, reference = torch.rand(2, sum(LENGTHS)).mul_(4).unbind()
    known = torch.cat([torch.arange(length) >= prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)])
    here = torch.cat([part.chunk(ranks)[rank] for part in torch.arange(sum(LENGTHS)).split(LENGTHS)])
    labels = torch.where(known, 1, IGNORED)[here][None]
    leaf = policy[here][None].clone().requires_grad_()
    pack = SimpleNamespace(
        num_samples=2, seq_lens=torch.tensor(LENGTHS), cu_seqlens_q=torch.tensor([0, *LENGTHS]).cumsum(0)
    )
    trainer = trainer_of(loss_type, packed=True)
    if hasattr(trainer, "ref_forward"):  # before 3.9 the reference's sums come from a pass before
        sums = trainer.get_logps(reference[here][None], labels, pack)
        loss, _ = trainer.loss_func(leaf, ref_logps=sums, labels=labels, packed_seq_params=pack)
    else:
        both = torch.cat([reference[here][None], leaf])
        loss, _ = trainer.loss_func(both, labels=labels, packed_seq_params=pack)
    loss.backward()
    exact = policy.double().requires_grad_()
    rows = (
        torch.nn.utils.rnn.pad_sequence(each.split(LENGTHS), batch_first=True)
        for each in (-exact, -reference.double(), known)
    )
    wanted = as_published(loss_type, *rows)
    wanted.backward()
    # The trainer divides the loss by the number of context-parallel ranks, whose gradients are added up.
    return compared(loss * ranks, leaf.grad[0], wanted, exact.grad[here])


PARTS: dict[str, Callable[[str], dict[str, float]]] = {"step": step, "packed": packed}


def observe(parts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {part: {loss_type: PARTS[part](loss_type) for loss_type in FORMULAS} for part in parts}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlhf_patches").addHandler(handler)
    try:
        for loss_type in OUT_OF_REACH:
            values = [packed(loss_type)["value"] for _ in range(2)]
            found[loss_type] = {"values": values, "said": [line for line in said if f" {loss_type}:" in line]}
        found["of the bug"] = [line for line in said if "the bug" in line]
    finally:
        logging.getLogger("rlhf_patches").removeHandler(handler)
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args()
    start(context=int(os.environ["WORLD_SIZE"]))
    states.report(NAME, lambda: observe(options.parts), options.out)
