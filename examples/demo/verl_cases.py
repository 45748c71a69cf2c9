"""verl: the workers of the tests, with an older release side by side."""

from __future__ import annotations

from collections.abc import Iterator

import fp32_gradients
from cases import Case, Group, Row, Runner, proved

from tests.harness.forkserver import Level, verl, verl_agent_loop, verl_sft

CRITIC = Case(
    "verl",
    "verl-critic-loss-scale",
    "PPO's critic, 4 micro-batches",
    "PPO's critic on FSDP, two ranks: gradient of a mini-batch in four micro-batches",
)

FP32 = Case(
    "verl",
    "verl-fp32-gradients",
    "Megatron-Bridge, 64 micro-batches",
    "the gradients of 64 micro-batches on two ranks, on Megatron-Bridge in bfloat16",
)


def critic(runner: Runner) -> Iterator[Row]:
    """The engine's forward_backward_batch with value_loss, on two data-parallel ranks."""
    levels = (*verl("0.8"), Level("tests.harness.loading:verl_critic"))
    report = runner.forked(
        "rlhf_patches.patches.verl.proofs.critic_loss_scale_ranks", levels=levels, TORCHDYNAMO_DISABLE="1"
    )[0]
    before, after = (report[state]["cases"]["four"] for state in ("before", "after"))
    without, patched = f"norm {before['norm']:.2f} times", f"{after['norm']:.3f} times"
    off = f"float64 {after['distance']:.0e}"
    yield Row(
        CRITIC,
        report["version"],
        without,
        patched,
        off,
        before["norm"] > 3.5 and after["distance"] < 1e-5,
        (f"{without} what it is over the mini-batch", patched, f"{off[8:]} from float64"),
    )


GROUPS = (
    Group((CRITIC,), critic),
    proved("verl.tool_separator", lambda: verl_agent_loop("0.8")),
    proved("verl.resume_epoch", verl_sft),
    fp32_gradients.group(FP32, "tests.patches.verl.fp32_gradients_ranks", lambda: verl("0.7")),
)
