"""What happens on each of two ranks in the tests of trl-chunked-nll-zero3: real TRL, real DeepSpeed ZeRO-3, gloo.

``--out FOLDER SCENARIO``: each rank writes its report.
Start-up takes most of the time, so a scenario holds many cases, and the tests look at the report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness import zero3_on_cpu as zero3
from tests.harness.timeouts import wait_at_most

RANK, COMMUNICATION = zero3.start()

import torch
import trl
from transformers.integrations import deepspeed as hf_deepspeed
from trl.trainer import sft_trainer

import rlhf_patches

NAME = "trl-chunked-nll-zero3"
BATCH, LENGTH, HIDDEN, VOCABULARY, CHUNK = 2, 33, 16, 99, 8
TOKENS = {  # valid tokens on each rank; a chunk is 8
    "equal": (40, 40),
    "unequal": (5, 40),
    "one-masked": (0, 40),
    "all-masked": (0, 0),
}


# ------------------------------------------------------------------------------------- a head and its inputs


def make_head(
    dtype: torch.dtype = torch.float32, bias: bool = False, trainable: bool = True, width: int = HIDDEN
) -> torch.nn.Linear:
    """The same on both ranks every time."""
    generator = torch.Generator().manual_seed(7)
    head = torch.nn.Linear(width, VOCABULARY, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return head.to(dtype).requires_grad_(trainable)


def make_inputs(tokens: str, dtype: torch.dtype, shifted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and labels (aligned ones if ``shifted``) of this rank, the valid ones scattered."""
    generator = torch.Generator().manual_seed(100 + RANK)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.full((BATCH, LENGTH), -100)
    usable = labels[:, : LENGTH - 1] if shifted else labels[:, 1:]
    number = TOKENS[tokens][RANK]
    where = torch.randperm(usable.numel(), generator=generator)[:number]
    values = torch.full((usable.numel(),), -100)
    values[where] = torch.randint(0, VOCABULARY, (number,), generator=generator)
    usable.copy_(values.view_as(usable))
    return hidden, labels


def call(
    weight: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor, labels: torch.Tensor, case: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """TRL's function, looked up as its own caller looks it up."""
    items = {"none": None, "number": 37, "tensor": torch.tensor(37)}[case.get("items", "none")]
    return sft_trainer._chunked_cross_entropy_loss(
        hidden,
        weight,
        CHUNK,
        **{"shift_labels" if case.get("shifted") else "labels": labels},
        num_items_in_batch=items,
        logit_scale=case.get("scale", 1.0),
        final_logit_softcapping=case.get("softcap"),
        lm_head_bias=bias,
    )


def exact(weight: Any, bias: Any, hidden: Any, labels: Any, case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The definition, written independently and in float64: all logits at once, nothing chunked."""
    leaves = [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in (hidden, weight, bias)
    ]
    logits = torch.nn.functional.linear(*leaves)
    if not case.get("shifted"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits * case.get("scale", 1.0)
    if case.get("softcap"):
        logits = case["softcap"] * (logits / case["softcap"]).tanh()
    mask = (labels != -100).double()
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    picked = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    number = mask.sum()
    loss = -(picked * mask).sum() / (number.clamp(min=1) if case.get("items", "none") == "none" else 37)
    correct = ((logits.argmax(-1) == labels) * mask).sum()
    entropy = -((log_p.exp() * log_p).sum(-1) * mask).sum()
    loss.backward()
    return (loss, correct, entropy, number), [None if x is None else x.grad for x in leaves]


@contextlib.contextmanager
def zero3_configured() -> Any:
    """What `transformers` calls enabled; TRL 1.6 and later looks at every parameter's ds_status then."""
    config = hf_deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        yield
    finally:
        hf_deepspeed.unset_hf_deepspeed_config()
        del config


def failure(function: Callable[[], Any], logs: list[str] | None = None) -> str | None:
    """What it raised; the traceback is added to ``logs``."""
    try:
        function()
    except Exception as error:
        if logs is not None:
            logs.append(traceback.format_exc())
        return f"{type(error).__name__}: {error}"
    return None


def error_of(found: Any, wanted: Any) -> float:
    """The largest deviation, relative to the largest value wanted."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    scale = wanted.abs().max().item() or 1.0
    return (found.double() - wanted).abs().max().item() / scale


# ------------------------------------------------------------------------------------- cases on a bare head

CASES: dict[str, dict[str, Any]] = {
    f"{tokens}-{dtype}": {"tokens": tokens, "dtype": dtype} for tokens in TOKENS for dtype in ("float32", "bfloat16")
} | {
    "shift-labels": {"shifted": True},
    "items-number": {"items": "number"},
    "items-tensor": {"items": "tensor", "shifted": True},
    "items-masked": {"items": "number", "tokens": "one-masked"},
    "bias": {"bias": True},
    "bias-masked": {"bias": True, "tokens": "one-masked"},
    "bias-bfloat16": {"bias": True, "dtype": "bfloat16"},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 1.5},
    "scale-softcap-bias": {"scale": 0.5, "softcap": 2.0, "bias": True, "items": "tensor"},
    "frozen": {"trainable": False},
    "frozen-bias": {"trainable": False, "bias": True},
    "frozen-hidden": {"hidden": False},
    "frozen-both": {"hidden": False, "trainable": False},
    "entropy-in-the-loss": {"entropy": True},
    "autocast": {"autocast": True, "tokens": "equal"},
}


def run_case(case: dict[str, Any], head: torch.nn.Linear) -> dict[str, Any]:
    """Forward and backward on this head; tensors are looked at by `compare`."""
    dtype = getattr(torch, case.get("dtype", "float32"))
    hidden, labels = make_inputs(case.get("tokens", "unequal"), dtype, bool(case.get("shifted")))
    hidden = hidden.detach().requires_grad_(case.get("hidden", True))
    seen: dict[str, Any] = {}
    if hidden.requires_grad and zero3_head(head):
        # Runs when the loss is through and the layers below it are next.
        hidden.register_hook(lambda _: seen.update(gathered_below=zero3.available(head.weight)))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(case.get("autocast"))),
        COMMUNICATION.during() as forward,
    ):
        outputs = call(head.weight, head.bias, hidden, labels, case)
    between = zero3.available(head.weight) if zero3_head(head) else None
    with COMMUNICATION.during() as backward:
        if outputs[0].requires_grad:
            (outputs[0] + 0.1 * outputs[2] if case.get("entropy") else outputs[0]).backward()
    gradients = [hidden.grad, head.weight.grad, None if head.bias is None else head.bias.grad]
    return {
        "outputs": [x.detach() for x in outputs],
        "requires_grad": [x.requires_grad for x in outputs[:2]],
        "gradients": gradients,
        "forward": forward,
        "backward": backward,
        "left_gathered": [between, seen.get("gathered_below"), zero3_head(head) and zero3.available(head.weight)],
    }


def zero3_head(head: torch.nn.Linear) -> bool:
    return hasattr(head.weight, "ds_status")


def head_of(case: dict[str, Any]) -> torch.nn.Linear:
    dtype = getattr(torch, case.get("dtype", "float32"))
    return make_head(dtype, case.get("bias", False), case.get("trainable", True))


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def compare(case: dict[str, Any], patched: dict[str, Any], unpatched: dict[str, Any]) -> dict[str, Any]:
    """What a test needs to know, as JSON."""
    report = {
        "same_outputs": [same(*pair) for pair in zip(patched["outputs"], unpatched["outputs"], strict=True)],
        "same_gradients": [same(*pair) for pair in zip(patched["gradients"], unpatched["gradients"], strict=True)],
        "same_requires_grad": patched["requires_grad"] == unpatched["requires_grad"],
        "forward": patched["forward"],
        "backward": patched["backward"],
        "left_gathered": patched["left_gathered"],
        "number": int(patched["outputs"][3]),
    }
    if not (case.get("autocast") or case.get("entropy") or case.get("hidden") is False):
        head = head_of(case)
        dtype = getattr(torch, case.get("dtype", "float32"))
        hidden, labels = make_inputs(case.get("tokens", "unequal"), dtype, bool(case.get("shifted")))
        outputs, gradients = exact(head.weight, head.bias, hidden, labels, case)
        report["errors"] = [error_of(*pair) for pair in zip(patched["outputs"], outputs, strict=True)]
        report["gradient_errors"] = [error_of(*pair) for pair in zip(patched["gradients"], gradients, strict=True)]
    return report


def partitioned_head(report: dict[str, Any]) -> None:
    """Every case: unpatched on a plain head, patched on a partitioned one, and patched on a plain one."""
    unpatched = {name: run_case(case, head_of(case)) for name, case in CASES.items()}
    rlhf_patches.apply(only=NAME)
    report["status"] = str(rlhf_patches.report()[NAME].status)
    report["plain"] = {
        name: compare(case, run_case(case, head_of(case)), unpatched[name]) for name, case in CASES.items()
    }
    with zero3_configured():
        report["partitioned"] = {
            name: compare(case, run_case(case, zero3.partition(head_of(case))), unpatched[name])
            for name, case in CASES.items()
        }
        report["available"] = {name: compare(case, run_gathered(case), unpatched[name]) for name, case in CASES.items()}
        for trial in TRIALS:
            report[trial.__name__] = trial()
    rlhf_patches.revert()
    report["reverted"] = {
        name: compare(case, run_case(case, head_of(case)), unpatched[name]) for name, case in list(CASES.items())[:3]
    }


def run_gathered(case: dict[str, Any]) -> dict[str, Any]:
    """As with tied embeddings: somebody else has gathered the head, and keeps it."""
    head = zero3.partition(head_of(case))
    for parameter in head.parameters():
        parameter.all_gather()
    return run_case(case, head)


# ------------------------------------------------------------------------------------- trials


def fresh(tokens: str = "unequal", bias: bool = False) -> tuple[Any, ...]:
    """A partitioned head, its plain twin's gradients times one call, hidden states and labels."""
    head = zero3.partition(make_head(bias=bias))
    hidden, labels = make_inputs(tokens, torch.float32, False)
    _, (_, weight, _) = exact(make_head().weight, None, hidden, labels, {})
    return head, weight, hidden, labels


def outcome(head: Any, wanted: Any, communication: Any, found: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "error": error_of(head.weight.grad if found is None else found, wanted),
        "gathers": [name for name, _ in communication],
        "left_gathered": zero3.available(head.weight),
        "hooks": len(head.weight._post_accumulate_grad_hooks or ()),
        **more,
    }


def one_graph_two_calls() -> dict[str, Any]:
    head, weight, hidden, labels = fresh()
    with COMMUNICATION.during() as seen:
        losses = [call(head.weight, None, hidden, labels, {})[0] for _ in range(2)]
        (losses[0] + losses[1]).backward()
    return outcome(head, 2 * weight, seen)


def accumulation() -> dict[str, Any]:
    head, weight, hidden, labels = fresh()
    with COMMUNICATION.during() as seen:
        for _ in range(3):
            call(head.weight, None, hidden, labels, {})[0].backward()
    return outcome(head, 3 * weight, seen)


def retain_graph() -> dict[str, Any]:
    head, weight, hidden, labels = fresh()
    with COMMUNICATION.during() as seen:
        loss = call(head.weight, None, hidden, labels, {})[0]
        loss.backward(retain_graph=True)
        between = zero3.available(head.weight)
        loss.backward()
    return outcome(head, 2 * weight, seen, between=between, again=failure(loss.backward))


def _checkpointed(reentrant: bool) -> dict[str, Any]:
    head, weight, hidden, labels = fresh()

    def body(hidden: torch.Tensor) -> torch.Tensor:
        return call(head.weight, None, hidden * 1.0, labels, {})[0]

    with COMMUNICATION.during() as seen:
        torch.utils.checkpoint.checkpoint(body, hidden, use_reentrant=reentrant).backward()
    return outcome(head, weight, seen)


def checkpointed_reentrant() -> dict[str, Any]:
    return _checkpointed(True)


def checkpointed() -> dict[str, Any]:
    return _checkpointed(False)


def partitioned_meanwhile() -> dict[str, Any]:
    """Gathered by somebody else in forward, and partitioned again before backward."""
    head, weight, hidden, labels = fresh()
    head.weight.all_gather()
    with COMMUNICATION.during() as seen:
        loss = call(head.weight, None, hidden, labels, {})[0]
        head.weight.partition()
        loss.backward()
    return outcome(head, weight, seen)


class _Raising:
    """Puts a `_chunk` in place that raises at its n-th call on either rank."""

    def __init__(self, at: int) -> None:
        self.at, self.calls, self.original = at, 0, sft_trainer._chunk

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise MemoryError("as on a GPU that is too small")
        return self.original(*args)

    def __enter__(self) -> None:
        sft_trainer._chunk = self

    def __exit__(self, *_: object) -> None:
        sft_trainer._chunk = self.original


def after(raised: str | None, head: Any, weight: Any, hidden: Any, labels: Any) -> dict[str, Any]:
    """What an exception has left behind, and a whole step after it."""
    left = zero3.available(head.weight)
    with COMMUNICATION.during() as seen:
        call(head.weight, None, hidden, labels, {})[0].backward()
    return outcome(head, weight, seen, raised=raised, left=left)


def raises_forward() -> dict[str, Any]:
    head, weight, hidden, labels = fresh("equal")
    with _Raising(3):
        raised = failure(lambda: call(head.weight, None, hidden, labels, {}))
    return after(raised, head, weight, hidden, labels)


def raises_backward() -> dict[str, Any]:
    head, weight, hidden, labels = fresh("equal")
    with _Raising(7):  # five chunks forward, then the second one of backward
        loss = call(head.weight, None, hidden, labels, {})[0]
        raised = failure(loss.backward)
    return after(raised, head, weight, hidden, labels)


def raises_in_a_hook() -> dict[str, Any]:
    """As if DeepSpeed's reduction failed, whose hook comes before ours."""
    head, weight, hidden, labels = fresh("equal")

    def fails(_: Any) -> None:
        raise RuntimeError("reduction failed")

    hook = head.weight.register_post_accumulate_grad_hook(fails)
    raised = failure(call(head.weight, None, hidden, labels, {})[0].backward)
    hook.remove()
    head.weight.grad = None
    return after(raised, head, weight, hidden, labels)


def gradient_asked_for() -> dict[str, Any]:
    head, weight, hidden, labels = fresh()
    with COMMUNICATION.during() as seen:
        loss = call(head.weight, None, hidden, labels, {})[0]
        (found,) = torch.autograd.grad(loss, [head.weight])
    return outcome(head, weight, seen, found=found)


def partial_backward() -> dict[str, Any]:
    head, weight, hidden, labels = fresh()
    with COMMUNICATION.during() as seen:
        loss = call(head.weight, None, hidden, labels, {})[0]
        loss.backward(inputs=[hidden])
        left = zero3.available(head.weight)
        call(head.weight, None, hidden, labels, {})[0].backward(inputs=[head.weight])
    return outcome(head, weight, seen, left=left)


def in_flight() -> dict[str, Any]:
    """DeepSpeed has begun to fetch the head for a module that comes next."""
    head, weight, hidden, labels = fresh()
    fetching = head.weight.all_gather_coalesced([head.weight])
    raised = failure(lambda: call(head.weight, None, hidden, labels, {}))
    fetching.wait()
    head.weight.partition()
    with COMMUNICATION.during() as seen:
        call(head.weight, None, hidden, labels, {})[0].backward()
    return outcome(head, weight, seen, raised=raised)


def no_grad() -> dict[str, Any]:
    head, _, hidden, labels = fresh()
    with torch.no_grad(), COMMUNICATION.during() as seen:
        call(head.weight, None, hidden, labels, {})
    return outcome(head, None, seen)


def memory() -> dict[str, Any]:
    """The largest tensor that any operation makes, forward and backward, on many tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    head = zero3.partition(make_head())
    hidden = torch.randn(1, 40 * CHUNK + 1, HIDDEN, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (1, 40 * CHUNK + 1))
    with Largest() as largest:
        call(head.weight, None, hidden, labels, {})[0].backward()
    limit = max(hidden.numel(), head.weight.ds_numel, CHUNK * VOCABULARY)
    return {"largest": largest.numel, "limit": limit, "full_logits": 40 * CHUNK * VOCABULARY}


TRIALS = (
    one_graph_two_calls,
    accumulation,
    retain_graph,
    checkpointed_reentrant,
    checkpointed,
    partitioned_meanwhile,
    raises_forward,
    raises_backward,
    raises_in_a_hook,
    gradient_asked_for,
    partial_backward,
    in_flight,
    memory,
    no_grad,
)


# ------------------------------------------------------------------------------------- a DeepSpeed engine


class Model(torch.nn.Module):
    """A body and a head.

    Args:
        use: "discovered" reads the weight so that DeepSpeed sees it, as TRL's own forward does; "unseen" does not;
            "called" does not either, and calls the head as a module too, for a penalty on its logits.
    """

    def __init__(self, dtype: torch.dtype, bias: bool = False, use: str = "unseen") -> None:
        super().__init__()
        self.body = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)) * 0.3)
        self.head = make_head(torch.float32, bias)
        self.to(dtype)
        self.unseen = [self.head.weight, self.head.bias]
        self.use = use

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(inputs))
        # Before the loss, so that its backward comes after the loss's, which has gathered the head by then.
        penalty = self.head(hidden).square().mean() if self.use == "called" else 0.0
        weight, bias = (self.head.weight, self.head.bias) if self.use == "discovered" else self.unseen
        return call(weight, bias, hidden, labels, {})[0] + penalty


def make_engine(model: Model, accumulate: int = 1) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": next(model.parameters()).dtype is torch.bfloat16},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_engine(tokens: str, dtype: torch.dtype, bias: bool, accumulate: int, use: str) -> dict[str, Any]:
    """Two optimizer steps; each gradient that DeepSpeed has reduced against the exact one of both ranks together."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    model = Model(dtype, bias, use)
    engine = make_engine(model, accumulate)
    report: dict[str, Any] = {"errors": {}, "left_gathered": False, "losses": [], "forward": [], "backward": []}
    inputs, labels = make_inputs(tokens, dtype, False)
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, (inputs.detach(), labels))
    for _ in range(2):
        values = [safe_get_full_fp32_param(parameter) for parameter in model.parameters()]
        for _ in range(accumulate):
            with COMMUNICATION.during() as forward:
                loss = engine(inputs.detach(), labels)
            with COMMUNICATION.during() as backward:
                engine.backward(loss)
            report["losses"].append(loss.item().hex())
            report["forward"].append(sum(name.startswith("all_gather") for name, _ in forward))
            report["backward"].append(sum(name.startswith("all_gather") for name, _ in backward))
            report["left_gathered"] |= zero3.available(model.unseen[0]) and use != "discovered"
            if accumulate == 1 or engine.is_gradient_accumulation_boundary():
                found = [safe_get_full_grad(parameter) for parameter in model.parameters()]
            engine.step()
        wanted = engine_gradients(values, dtype, everyone, penalized=use == "called")
        for (name, _), one, other in zip(model.named_parameters(), found, wanted, strict=True):
            report["errors"][name] = max(report["errors"].get(name, 0.0), error_of(one, other))
    report["final"] = [safe_get_full_fp32_param(parameter).sum().item().hex() for parameter in model.parameters()]
    engine.destroy()
    return report


def engine_gradients(
    values: list[torch.Tensor], dtype: torch.dtype, everyone: list[Any], penalized: bool
) -> list[torch.Tensor]:
    """In float64, averaged over the ranks, from the parameters as the forward pass sees them."""
    body, weight, *rest = (value.to(dtype).double().requires_grad_() for value in values)
    bias = rest[0] if rest else None
    total = torch.zeros((), dtype=torch.float64)
    for inputs, labels in everyone:
        logits = torch.nn.functional.linear(torch.tanh(inputs.double() @ body.t()), weight, bias)
        if penalized:
            total = total + logits.square().mean() / len(everyone)
        logits, mask = logits[:, :-1], labels[:, 1:] != -100
        picked = logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        total = total - (picked * mask).sum() / mask.sum().clamp(min=1) / len(everyone)
    total.backward()
    return [value.grad for value in (body, weight, *rest)]


ENGINES: dict[str, tuple[Any, ...]] = {
    "equal": ("equal", torch.float32, False, 1, "unseen"),
    "unequal": ("unequal", torch.float32, False, 1, "unseen"),
    "one-masked-bias": ("one-masked", torch.float32, True, 1, "unseen"),
    "accumulated": ("unequal", torch.float32, False, 2, "unseen"),
    "bfloat16": ("unequal", torch.bfloat16, True, 1, "unseen"),
    "called-as-a-module-too": ("unequal", torch.float32, False, 1, "called"),
}
DISCOVERED = ("unequal", torch.float32, True, 2, "discovered")


def engines(report: dict[str, Any]) -> None:
    """Training by DeepSpeed's own engine, the head unseen by its discovery, and seen."""
    report["discovered-unpatched"] = train_engine(*DISCOVERED)
    rlhf_patches.apply(only=NAME)
    report["discovered"] = train_engine(*DISCOVERED)
    for name, arguments in ENGINES.items():
        report[name] = train_engine(*arguments)
    rlhf_patches.revert()


# ------------------------------------------------------------------------------------- distillation

DIVERGENCE = "trl-chunked-divergence-zero3"
DIVERGENCES: dict[str, dict[str, Any]] = {
    "unequal": {},
    "equal": {"tokens": "equal"},
    "one-masked": {"tokens": "one-masked", "items": 37},
    "forward-kl": {"beta": 0.0, "bias": True},
    "reverse-kl": {"beta": 1.0, "items": 37},
    "bfloat16": {"dtype": "bfloat16", "bias": True},
    "frozen": {"trainable": False},
    "self": {"self": True},  # student and teacher share the head
}


def divergence_inputs(case: dict[str, Any]) -> tuple[Any, ...]:
    """Both heads, of different widths, both hidden states, and the mask."""
    dtype = getattr(torch, case.get("dtype", "float32"))
    student = make_head(dtype, case.get("bias", False), case.get("trainable", True))
    width = HIDDEN if case.get("self") else HIDDEN // 2
    teacher = student if case.get("self") else make_head(dtype, case.get("bias", False), width=width)
    hidden, labels = make_inputs(case.get("tokens", "unequal"), dtype, True)
    taught = torch.randn(BATCH, LENGTH, width, generator=torch.Generator().manual_seed(200 + RANK)).to(dtype)
    return student, teacher, hidden, taught, labels != -100


def run_divergence(case: dict[str, Any], partitioned: bool) -> dict[str, Any]:
    from trl.trainer import distillation_trainer

    student, teacher, hidden, taught, mask = divergence_inputs(case)
    if partitioned:
        for head in dict.fromkeys((student, teacher)):
            zero3.partition(head)
    with COMMUNICATION.during() as forward:
        outputs = distillation_trainer._chunked_divergence_loss(
            hidden,
            taught,
            student.weight,
            teacher.weight,
            mask,
            case.get("beta", 0.3),
            CHUNK,
            num_items_in_batch=case.get("items"),
            student_lm_head_bias=student.bias,
            teacher_lm_head_bias=teacher.bias,
            student_logit_scale=0.5,
            temperature=1.5,
        )
    with COMMUNICATION.during() as backward:
        outputs[0].backward()
    heads = [parameter for head in (student, teacher) for parameter in head.parameters()]
    return {
        "outputs": [x.detach() for x in outputs],
        "gradients": [hidden.grad, student.weight.grad, None if student.bias is None else student.bias.grad],
        "teacher_untouched": teacher is student or all(x.grad is None for x in teacher.parameters()),
        "forward": forward,
        "backward": backward,
        "left_gathered": partitioned and any(map(zero3.available, heads)),
    }


def exact_divergence(case: dict[str, Any]) -> list[Any]:
    """The definition in float64, nothing chunked: outputs and gradients."""
    student, teacher, hidden, taught, mask = divergence_inputs(case)
    student, teacher, mask = student.double(), teacher.double(), mask.double()
    hidden = hidden.detach().double().requires_grad_()
    log_s = (student(hidden) * 0.5 / 1.5).log_softmax(-1)
    with torch.no_grad():
        log_t = (teacher(taught.double()) / 1.5).log_softmax(-1)
    beta = case.get("beta", 0.3)
    log_m = ((1 - beta) * log_s.exp() + beta * log_t.exp()).log()

    def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    if beta in (0.0, 1.0):
        each = divergence(log_t, log_s) if beta == 0.0 else divergence(log_s, log_t)
    else:
        each = beta * divergence(log_t, log_m) + (1 - beta) * divergence(log_s, log_m)
    number = mask.sum()
    loss = (each * mask).sum() / (case.get("items") or number.clamp(min=1))
    entropy = -((log_s.exp() * log_s).sum(-1) * mask).sum()
    loss.backward()
    bias = None if student.bias is None else student.bias.grad
    return [loss, entropy, number, hidden.grad, student.weight.grad, bias]


def divergence(report: dict[str, Any]) -> None:
    """The cases of distillation, as `partitioned_head` has them for SFT; then what happens without the patch."""
    plain = {name: run_divergence(case, False) for name, case in DIVERGENCES.items()}
    rlhf_patches.apply(only=DIVERGENCE)
    report["status"] = str(rlhf_patches.report()[DIVERGENCE].status)
    report["plain"] = all(
        same(*pair) for pair in zip(run_divergence({}, False)["outputs"], plain["unequal"]["outputs"], strict=True)
    )
    cases = report["cases"] = {}
    with zero3_configured():
        for name, case in DIVERGENCES.items():
            found = run_divergence(case, True)
            pairs = list(zip((*found["outputs"], *found["gradients"]), exact_divergence(case), strict=True))
            cases[name] = {
                "same": [
                    same(*pair)
                    for key in ("outputs", "gradients")
                    for pair in zip(found[key], plain[name][key], strict=True)
                ],
                "errors": [error_of(*pair) for pair in pairs],
                **{key: found[key] for key in ("forward", "backward", "left_gathered", "teacher_untouched")},
            }
        rlhf_patches.revert()
        report["unpatched"] = failure(lambda: run_divergence({"tokens": "equal"}, True))
        found = run_divergence({"tokens": "equal", "trainable": False}, True)
        report["gathers"] = len(found["forward"] + found["backward"])


# ------------------------------------------------------------------------------------- without the patch


def unpatched(report: dict[str, Any]) -> None:
    """What the release itself does with a partitioned head; the last case may end in a time-out."""
    with zero3_configured():
        head, _, hidden, labels = fresh("equal")
        logs = report["logs"] = []
        report["forward"] = failure(lambda: call(head.weight, None, hidden, labels, {}), logs)
        if report["forward"] is None:
            head, _, hidden, labels = fresh("equal")
            report["backward"] = failure(call(head.weight, None, hidden, labels, {})[0].backward)
            head = zero3.partition(make_head(trainable=False))
            with COMMUNICATION.during() as seen:
                call(head.weight, None, hidden, labels, {})[0].backward()
            report["gathers"] = len(seen)
            stall(report)


def stall(report: dict[str, Any]) -> None:
    head = zero3.partition(make_head(trainable=False))
    hidden, labels = make_inputs("unequal", torch.float32, False)
    wait_in_vain(report, lambda: call(head.weight, None, hidden, labels, {})[0].backward())


def divergence_unpatched(report: dict[str, Any]) -> None:
    """Distillation without the patch; it ends in a time-out."""
    with zero3_configured():
        wait_in_vain(report, lambda: run_divergence({"trainable": False}, True))


def wait_in_vain(report: dict[str, Any], step: Callable[[], Any]) -> None:
    """One rank has one chunk, the other five. The first comes back, and the other one waits for it."""
    store = torch.distributed.distributed_c10d._get_default_store()
    wait_at_most(6)
    started = time.monotonic()
    report["stall"] = failure(step)
    report["stalled_for"] = time.monotonic() - started
    store.set(f"done-{RANK}", "")
    store.wait([f"done-{1 - RANK}"])  # not a collective, which the other rank would take for its gather


def disabled(report: dict[str, Any]) -> None:
    """The user has switched the patch off."""
    os.environ["RLHF_PATCHES_DISABLE"] = NAME
    report["status"] = str(rlhf_patches.apply()[NAME].status)
    with zero3_configured():
        head, _, hidden, labels = fresh("equal")
        report["failed"] = failure(lambda: call(head.weight, None, hidden, labels, {})[0].backward())
    rlhf_patches.revert()
    del os.environ["RLHF_PATCHES_DISABLE"]


# ------------------------------------------------------------------------------------- without ZeRO-3


def data_parallel(kind: str) -> dict[str, Any]:
    """Two steps of a real model under TRL's own forward; numbers as hexadecimal."""
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=1, tie_word_embeddings=False, **sizes)
    )
    sft_trainer._patch_chunked_ce_lm_head(model, chunk_size=CHUNK)
    if kind == "ddp":
        run: Any = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        run = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    elif kind == "fsdp2-head":  # the head is a shard of its own, so TRL sees a DTensor
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.lm_head, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    else:
        run = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(RANK)
    losses = []
    for _ in range(2):
        ids = torch.randint(0, VOCABULARY, (2, 20), generator=generator)
        output = run(input_ids=ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([x.item().hex() for x in (output.loss, output.num_correct_tokens, output.entropy_sum)])
    full = [getattr(parameter.detach(), "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()]
    return {"losses": losses, "final": [x.double().pow(2).sum().item().hex() for x in full]}


def without_zero3(report: dict[str, Any]) -> None:
    """DDP, FSDP2 and one process, before apply(), after it and after revert()."""
    for how in ("before", "patched", "reverted"):
        if how == "patched":
            rlhf_patches.apply(only=NAME)
        elif how == "reverted":
            rlhf_patches.revert()
        for kind in ("one process", "ddp", "fsdp2", "fsdp2-head"):
            try:
                result: Any = data_parallel(kind)
            except Exception as error:
                result = {"failed": f"{type(error).__name__}: {error}"}
            report.setdefault(kind, {})[how] = result


SCENARIOS = {
    function.__name__: function
    for function in (
        without_zero3,
        partitioned_head,
        divergence,
        disabled,
        engines,
        unpatched,
        divergence_unpatched,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    options = parser.parse_args()
    report: dict[str, Any] = {"versions": {"trl": trl.__version__}}
    for name in options.scenarios:
        SCENARIOS[name](report.setdefault(name, {}))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"rank{RANK}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the ranks may be at different collectives
