"""ms-swift's trainers, with Megatron and without, made without their set-up, which would load models from a disk."""

from __future__ import annotations

import importlib
from typing import Any

from hunt import groups
from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer

ROWS, PROMPT, COMPLETION = 8, 4, 6
LENGTHS = (6, 1, 6, 3, 2, 6, 4, 5)


@trainer(*(f"swift/grpo-{loss}" for loss in ("grpo", "dapo", "cispo", "bnpo", "dr_grpo")))
def grpo(*, name: str, micro_batch: int = 8, accumulation: int = 1, order: str = "given") -> Outcome:
    """`training_step` over the micro-batches of one optimizer step, each as ms-swift's rollouts make it."""
    import torch

    from rlhf_patches.patches.swift.proofs import grpo_loss_scale_ranks as cases

    if ROWS % micro_batch:
        raise CannotRun("a generation is divided into micro-batches of one size")
    groups.start()
    try:
        model = cases.make_model()
    except ImportError as error:
        raise CannotRun(str(error)) from error
    torch.manual_seed(2)
    rows: dict[str, Any] = {
        "tokens": torch.randint(0, cases.VOCABULARY, (ROWS, PROMPT + COMPLETION)),
        "mask": torch.arange(COMPLETION) < torch.tensor(LENGTHS)[:, None],
        "advantages": torch.tensor([[1.0], [-0.7]]).repeat(ROWS // 2, 1),
    }
    with torch.no_grad():
        rows["old"] = (cases.logps_of(model, rows) + torch.rand(ROWS, COMPLETION) / 2 - 0.25).double()
    rows = rows if order == "given" else {key: value.flip(0) for key, value in rows.items()}
    trainer = cases.make_trainer(model, name.partition("-")[2], None)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = accumulation
    trainer.args.gradient_accumulation_steps, trainer.max_completion_length = accumulation, COMPLETION
    tokens, loss = int(rows["mask"].sum()), torch.zeros(())
    for start in range(0, ROWS, micro_batch):
        batch = {key: value[start : start + micro_batch] for key, value in rows.items()}
        cases.ROWS = len(batch["tokens"])
        loss = loss + trainer.training_step(model, cases.inputs_of(batch, tokens), None)
    gradient = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": {"step": loss}, "gradient": gradient}


@trainer("swift/loader-shuffled", "swift/loader-in-order")
def loader(*, name: str, drawn: int = 8, ranks: int = 1) -> Outcome:
    """The samples that all ranks together draw in the first epoch."""
    import torch

    from rlhf_patches.patches.swift.proofs import sampler_tail_ranks as cases

    groups.start(ranks)
    try:
        importlib.import_module("swift.trainers.mixin")
    except ImportError as error:
        raise CannotRun(str(error)) from error
    mine = cases.drawn(drawn, "shuffled" in name, False)["samples"][0]
    every: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(every, mine)
    return {"samples": {"drawn": str(sorted({sample for rank in every for sample in rank}))}}


KINDS = {"disabled": False, "adapter": True}


def reference(which: str, kind: str, passes: str, dropout: float) -> Outcome:
    """Log-probabilities of the policy's reference, and the flags of all modules and parameters thereafter."""
    import torch

    from tests.patches.swift import null_ref_context_ranks as cases

    groups.alone()
    cases.DROPOUT = dropout
    try:
        cases.prepare(which)
    except (AttributeError, ImportError) as error:
        raise CannotRun(str(error)) from error
    found = cases.lora_trainer(ref_adapter=KINDS[kind])
    values = {}
    if passes == "one":
        torch.manual_seed(5)
        values["log-probabilities"] = cases.reference_logps(found)
    elif passes == "interrupted":
        try:
            cases.enter(found, interrupted=True)()
        except cases.Interrupted:
            pass
    flags = cases.flags(cases.policies(found))
    of_each = {f"{key} {at}": str(one) for key, every in flags.items() for at, one in enumerate(every)}
    return {"values": values, "state": of_each}


@trainer(*(f"swift/reference-{kind}" for kind in KINDS))
def reference_of_transformers(*, name: str, passes: str, dropout: float = 0.1) -> Outcome:
    import importlib.util

    newer = importlib.util.find_spec("swift.rlhf_trainers") is not None
    which = (
        "swift.rlhf_trainers.dpo_trainer:DPOTrainer"
        if newer
        else "swift.trainers.rlhf_trainer.grpo_trainer:GRPOTrainer"
    )
    return reference(which, name.partition("-")[2], passes, dropout)


@trainer(*(f"swift_megatron/reference-{kind}" for kind in KINDS))
def reference_of_megatron(*, name: str, passes: str, dropout: float = 0.1) -> Outcome:
    return reference("megatron", name.partition("-")[2], passes, dropout)


@trainer(*(f"swift_megatron/dpo-{loss}" for loss in ("sigmoid", "hinge", "ipo", "apo_zero", "sppo_hard")))
def dpo(*, name: str, by: str) -> Outcome:
    """The trainer's loss of token losses, four sequences in one row, and the published formula in float64."""
    from tests.patches.swift import megatron_dpo_loss_type_ranks as cases

    groups.alone()
    found: list[Any] = []
    cases.compared = lambda *both: found.extend(both)  # type: ignore[assignment]
    try:
        cases.start(context=1)
        cases.packed(name.partition("-")[2])
    except ImportError as error:
        raise CannotRun(str(error)) from error
    loss, gradient, wanted, wanted_gradient = found
    if by == "formula":
        loss, gradient = wanted, wanted_gradient
    return {"loss": {"step": loss.detach()}, "gradient": {"token losses": gradient}}


@trainer("swift_megatron/log-probabilities", "swift_megatron/entropies")
def log_probabilities(*, name: str, parallel: str, ranks: int = 1) -> Outcome:
    """Of logits whose vocabulary is divided: the gradient of a weighted sum, put together again."""
    import torch

    from tests.patches.swift import logits_ranks as cases

    groups.alone()
    try:
        cases.start(context=1)
        module = importlib.import_module("swift.megatron.trainers.vocab_parallel_utils")
    except ImportError as error:
        raise CannotRun(str(error)) from error
    torch.manual_seed(0)
    values, weights = torch.randn(3, 5, cases.VOCABULARY) * 3, torch.randn(3, 5)
    labels = torch.randint(0, cases.VOCABULARY, (3, 5)).masked_fill_(torch.rand(3, 5) < 0.3, cases.IGNORED)
    mine = values[..., cases.part_of_this_rank()].clone().requires_grad_()
    entropies = name == "entropies"
    found, more = module.compute_logps_and_entropy_from_logits(mine * 1.0, labels, compute_entropy=entropies)
    loss = (found * weights).sum() + (more.sum() if entropies else 0.0)
    loss.backward()
    parts: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(parts, mine.grad)
    return {"loss": {"step": loss.detach()}, "gradient": {"logits": torch.cat(parts, -1)}}


@trainer("swift_kto/packed", "swift_kto/padded")
def kto(*, name: str, sequence: bool = False, ranks: int = 2) -> Outcome:
    """`forward_step` and the loss on the last pipeline stage, which gets its input from another one."""
    from tests.patches.swift import kto_sequence_parallel_ranks as cases

    groups.start(ranks)
    case = cases.Case(name, "last", "sequence" if sequence else "tensor", "kl", "longer")
    if name == "padded" and cases.Version("3.12") > cases.SWIFT:
        raise CannotRun("this ms-swift packs always")
    found: dict[str, Any] = {}

    def keep(case: Any, halves: Any, expected: Any, output: Any, loss: Any, given: Any, grads: Any, model: Any) -> Any:
        found.update(loss={"step": loss.detach()}, gradient=dict(grads))

    make_trainer = cases.make_trainer
    setattr(cases, "errors", keep)  # noqa: B010 - of another type

    def with_models(*given: Any) -> Any:
        trainer = make_trainer(*given)
        trainer.peft_models, trainer.unwrapped_models = [], []  # which another patch reads
        return trainer

    setattr(cases, "make_trainer", with_models)  # noqa: B010 - of another type
    with cases.tensor_parallel(ranks):
        report = cases.step(case, {})
    if report["failure"]:
        raise RuntimeError(f"{report['failure']} in {report['failed in']}")
    return found
