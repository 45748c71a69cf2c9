"""A step of megatron-core's own layers without TransformerEngine, as released, patched and reverted: one line of JSON.

On a GPU by NCCL; ``--cpu`` runs it on the stand-in of the other tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
CPU = "--cpu" in sys.argv
if CPU:
    from tests.harness import megatron_on_cpu

    megatron_on_cpu.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

import rlhf_patches  # noqa: E402
from rlhf_patches.definitions.status import Status  # noqa: E402
from tests.harness.small_gpt import VOCABULARY, make_model  # noqa: E402

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
}
CASES = {
    f"{name}, {dtype}": (dtype == "bfloat16", settings)
    for name, settings in (("dense", {}), ("experts", EXPERTS))
    for dtype in ("float32", "bfloat16")
}


def step(bf16, settings):
    """The loss, and each parameter's gradient."""
    model = make_model(bf16, **settings)
    if not CPU:
        model.cuda()
    model.zero_grad_buffer()
    tokens = torch.arange(48).view(2, 24) * 7 % VOCABULARY
    positions = torch.arange(24).expand(2, 24)
    losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))
    losses.mean().backward()
    return losses.mean().item(), {name: each.main_grad.double() for name, each in model.named_parameters()}


def main():
    os.environ.update(RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo" if CPU else "nccl")
    parallel_state.initialize_model_parallel()
    if not CPU:
        torch.set_default_device("cuda")
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 asks for it by name without TransformerEngine
    report = {}
    with contextlib.redirect_stdout(sys.stderr):
        for name, (bf16, settings) in CASES.items():
            found = [step(bf16, settings)]
            applied = rlhf_patches.apply()
            found.append(step(bf16, settings))
            rlhf_patches.revert()
            found.append(step(bf16, settings))
            (loss, exact), *others = found
            size = sum(each.square().sum() for each in exact.values()).sqrt()
            report[name] = {
                "applied": sorted(row.name for row in applied if row.status is Status.APPLIED),
                "norm": size.item(),
                "off": [
                    [abs(other - loss), max(((grads[each] - exact[each]).norm() / size).item() for each in exact)]
                    for other, grads in others
                ],
            }
    print(json.dumps(report))


main()
