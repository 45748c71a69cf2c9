"""SkyRL's padding functions, and the logits of a real GPTModel under sequence parallelism, on two ranks.

``--out FOLDER PART ...``, with the folder of a SkyRL release on sys.path. Each part runs as released and then with
`skyrl-sequence-parallel-logits`; each rank writes its report.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.harness import megatron_on_cpu

megatron_on_cpu.install()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_patches
from tests.harness import absent_packages
from tests.harness.skyrl_on_cpu import MODEL_WRAPPER
from tests.patches.skyrl import logprob_backward_training_ranks as training

MEGATRON_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.megatron_utils"
COLUMNS = 9  # of logits
# What makes the CPU wait for a GPU; indexing by a mask runs nonzero.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "index.Tensor", "index_put")


def utils() -> Any:
    absent_packages.install()  # 0.4.0 imports TransformerEngine on the way
    return importlib.import_module(MEGATRON_UTILS)


# ------------------------------------------------------------------------------------- equality with the loop


def masks() -> dict[str, torch.Tensor]:
    """True for real tokens, ``[B, S]``."""
    generator = torch.Generator().manual_seed(5)
    place = torch.arange(13)
    lengths = torch.tensor([[13], [1], [6], [7]])
    ragged = torch.rand(64, 13, generator=generator) > 0.4
    return {
        "left": place >= 13 - lengths,
        "right": place < lengths,
        "full": torch.ones(3, 13, dtype=torch.bool),  # the length is rounded up: longer than before
        "ragged": ragged[:5],
        "an empty row": torch.stack([place > 20, place > 5, place < 3]),
        "all rows empty": torch.zeros(2, 13, dtype=torch.bool),
        "one row": ragged[:1],
        "one token": torch.ones(1, 1, dtype=torch.bool),
        "64 rows": ragged,
    }


def around(mask: torch.Tensor, pre_process: bool = True) -> dict[str, torch.Tensor]:
    """What goes into the model, and what comes back, with the gradient of each number of its output."""
    rows, length = mask.shape
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(1, 1000, (rows, length), generator=generator)
    positions = (mask.long().cumsum(1) - 1).masked_fill(~mask, 0)
    ids, new_mask, new_positions = utils().remove_left_padding(tokens, mask, positions, pre_process=pre_process)
    found = {"ids": ids, "mask": new_mask, "positions": new_positions}
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(*new_mask.shape, COLUMNS, generator=generator).to(dtype).requires_grad_()
        if not pre_process:
            found["untouched"] = utils().recover_left_padding(logits, new_mask, mask, length, post_process=False)
            found["the same object"] = torch.tensor(found["untouched"] is logits)
            continue
        # Not contiguous, as nothing guarantees that it is.
        restored = utils().recover_left_padding(logits.mT.contiguous().mT, new_mask, mask, length)
        weights = torch.randn(restored.shape, generator=generator).to(dtype)
        (gradient,) = torch.autograd.grad((restored * weights).sum(), logits)
        found |= {f"logits in {dtype}": restored.detach(), f"gradient in {dtype}": gradient}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def padding(state: Callable[[], None]) -> dict[str, Any]:
    """Equality with the loop, of values, dtypes and gradients."""
    cases = {name: functools.partial(around, mask) for name, mask in masks().items()}
    cases["not the first stage"] = functools.partial(around, masks()["ragged"], False)
    before = {name: case() for name, case in cases.items()}
    state()
    return {
        name: {
            key: [before[name][key].dtype == tensor.dtype and torch.equal(before[name][key], tensor), tensor.shape]
            for key, tensor in case().items()
        }
        for name, case in cases.items()
    }


# ------------------------------------------------------------------------------------- the number of operations


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function).removeprefix("aten."))
        return function(*args, **(kwargs or {}))


def counted(rows: int) -> dict[str, int]:
    """Operations of one micro-batch: forward, backward, and how many of them wait for a GPU."""
    mask = masks()["64 rows"][:rows]
    tokens = torch.ones(mask.shape, dtype=torch.long)
    with _Counted() as forward:
        _, new_mask, _ = utils().remove_left_padding(tokens, mask, tokens)
        with torch.no_grad():
            logits = torch.ones(*new_mask.shape, COLUMNS, requires_grad=True)
        restored = utils().recover_left_padding(logits, new_mask, mask, mask.shape[1])
    weights = torch.ones_like(restored)
    with _Counted() as backward:
        restored.backward(weights)
    waiting = [name for name in forward.names + backward.names if name.startswith(WAITING)]
    return {"forward": len(forward.names), "backward": len(backward.names), "waiting": len(waiting)}


def operations(state: Callable[[], None]) -> dict[str, Any]:
    found = {}
    for name in ("before", "after"):
        found[name] = {rows: counted(rows) for rows in (1, 64)}
        if name == "before":
            state()
    return found


# ------------------------------------------------------------------------------------- what is refused


def message(function: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    try:
        function(*arguments, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(state: Callable[[], None]) -> dict[str, Any]:
    """Outputs and masks that do not fit together."""
    mask = masks()["left"]
    fewer = mask.clone()
    fewer[0, -1] = False

    def found() -> dict[str, str]:
        recover = utils().recover_left_padding
        return {
            "split": message(recover, torch.ones(4, 7, COLUMNS), torch.ones(4, 14, dtype=torch.bool), mask, 13),
            "longer": message(recover, torch.ones(4, 26, COLUMNS), mask, mask, 13),
            "rows": message(recover, torch.ones(3, 13, COLUMNS), mask, mask, 13),
            "length": message(recover, torch.ones(4, 13, COLUMNS), mask, mask, 14),
            "lengths": message(recover, torch.ones(4, 13, COLUMNS), fewer, mask, 13),
        }

    before, log = found(), ""
    try:
        utils().recover_left_padding(torch.ones(4, 7, COLUMNS), torch.ones(4, 14, dtype=torch.bool), mask, 13)
    except IndexError:
        log = traceback.format_exc()
    state()
    return {"before": before, "after": found(), "log": log}


# ------------------------------------------------------------------------------------- sequence parallelism

CASE = {"bf16": False, "packed": False, "entropy": True, "chunk": None}


def trained(**model: Any) -> dict[str, Any]:
    original = training.make_model
    training.make_model = functools.partial(original, **model)
    try:
        return training.train(CASE)
    finally:
        training.make_model = original


def recorded(run: Callable[[], Any]) -> list[list[int]]:
    """The shapes of the model's output and of its input, as `recover_left_padding` gets them."""
    module: Any = sys.modules[MODEL_WRAPPER]
    shapes: list[Any] = []
    original = module.recover_left_padding

    def recover(result: Any, mask: Any, *arguments: Any, **settings: Any) -> Any:
        shapes.append([list(result.shape), list(mask.shape)])
        return original(result, mask, *arguments, **settings)

    module.recover_left_padding = recover
    try:
        run()
    finally:
        module.recover_left_padding = original
    return shapes


def split_head(bf16: bool, gathered: bool = False, **settings: Any) -> Any:
    """A model whose output layer leaves the sequence split; ``gathered``: with the way out that our page describes."""
    model = ORIGINAL_MODEL(bf16, sequence_parallel=True)
    head = model.module.output_layer
    # As built under a configuration without sequence parallelism.
    head.sequence_parallel, head.allreduce_dgrad = False, True
    if gathered:
        head.register_forward_pre_hook(
            lambda module, inputs: (
                gather_from_sequence_parallel_region(inputs[0], tensor_parallel_output_grad=False),
                *inputs[1:],
            )
        )
    return model


ORIGINAL_MODEL = training.make_model


def logits_of(model: Any) -> torch.Tensor:
    """``[B, S, V / TP]``, or ``[B, S / TP, V / TP]``."""
    ids = training.make_micro_batches()[0]["sequences"]
    with torch.no_grad():
        logits: torch.Tensor = model(ids, None, None)
    return logits


def largest_difference(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Of all parameters' gradients, relative to their norm."""
    return max(
        ((found - before["gradients"][name]).norm() / before["gradients"][name].norm().clamp(min=1e-30)).item()
        for name, found in after["gradients"].items()
    )


def sequence_parallel(state: Callable[[], None]) -> dict[str, Any]:
    """Whether a real model's logits are split, what happens if they are, and what gathering them would give."""
    training.skyrl_on_cpu.model_wrapper()
    plain = trained()
    found: dict[str, Any] = {"shapes": recorded(lambda: trained(sequence_parallel=True))}
    before = trained(sequence_parallel=True)
    found["same as without"] = largest_difference(plain, before)
    anything: Any = training
    anything.make_model = split_head
    found["split before"] = message(training.train, CASE)
    state()
    found["split after"] = message(training.train, CASE)
    training.make_model = ORIGINAL_MODEL
    after = trained(sequence_parallel=True)
    found["gradients"] = largest_difference(before, after)
    found["log-probabilities"] = torch.equal(before["inference"], after["inference"])
    found["metrics"] = [before["metrics"], after["metrics"]]

    # What the pull request does with split logits, and what they should have been.
    whole = logits_of(ORIGINAL_MODEL(False, sequence_parallel=True))
    part = logits_of(split_head(False))
    found["parts"] = [list(whole.shape), list(part.shape)]
    joined = gather_from_sequence_parallel_region(part.transpose(0, 1).contiguous()).transpose(0, 1)
    rank, length = torch.distributed.get_rank(), part.shape[1]
    equal = [(joined[:, half] - whole[:, half]).abs().max().item() for half in (slice(0, length), slice(length, None))]
    found["gathered, own tokens and others'"] = [equal[rank], equal[1 - rank]]

    training.make_model = functools.partial(split_head, gathered=True)
    found["way out"] = largest_difference(before, training.train(CASE))
    training.make_model = ORIGINAL_MODEL
    return found


PARTS = {"padding": padding, "operations": operations, "errors": errors, "sequence_parallel": sequence_parallel}


def apply() -> None:
    rlhf_patches.apply(only="skyrl-sequence-parallel-logits")


def fill(report: dict[str, Any], parts: list[str]) -> None:
    for part in parts:
        report[part] = PARTS[part](apply)
        (row,) = [row for row in rlhf_patches.report() if row.name == "skyrl-sequence-parallel-logits"]
        report.setdefault("statuses", {})[part] = row.status
        rlhf_patches.revert()
        if part == "operations":
            report["reverted"] = {rows: counted(rows) for rows in (1, 64)}


def main() -> None:
    training.skyrl_on_cpu.on_each_rank(fill)
