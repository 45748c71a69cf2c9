"""Training that is entered once per rollout: a tiny GPT with real megatron-core on two CPU ranks.

Each case runs without and with the patches. The yardstick is one uninterrupted run of the same steps. Of each framework
one patched run is torchrun's; the other ranks are forked from a process that has loaded the frameworks.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import MEGATRON, trainer
from tests.harness.torchrun import Reports

WORKER = "tests.harness.rollout_training"


@functools.cache
def reference(runner: Runner) -> Reports:
    reports = runner.forked(WORKER, "--scenario", "reference", levels=MEGATRON)
    assert reports[0]["failure"] is None, reports[0]["failure"]
    return reports


def rows(runner: Runner, case: Case, arguments: tuple[str, ...], stand_in: bool, forked: bool) -> Iterator[Row]:
    """Repaired: losses and all parameters bit for bit the yardstick's, and a failure without the patch."""
    levels = trainer(arguments[1])
    before = runner.forked(WORKER, *arguments, levels=levels)
    if forked:
        after = runner.forked(WORKER, *arguments, "--apply", levels=levels)
    else:
        after = runner.launched(WORKER, *arguments, "--apply")
    same = all(
        report["failure"] is None
        and report["losses"] == expected["losses"]
        and report["final_state"] == expected["final_state"]
        for report, expected in zip(after, reference(runner), strict=True)
    )
    (without, long_without), (with_it, long_with) = seen(before), seen(after)
    verdict = "bit for bit" if same else "NO"
    release = "stand-in" if stand_in else importlib.metadata.version(case.framework)
    repaired = same and before[0]["failure"] is not None
    yield Row(case, release, without, with_it, verdict, repaired, (long_without, long_with, verdict))


def seen(reports: Reports) -> tuple[str, str]:
    """What happened, in a few words and in more."""
    failure = reports[0]["failure"]
    if failure is None:
        losses = [float.fromhex(loss) for loss in reports[0]["losses"].get("actor", [])]
        said = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        return said, said
    message = failure["message"].splitlines()[0].partition(";")[0]
    long = f"`{failure['exception']}` in rollout {failure['rollout']} ({failure['doing']}): {message}"
    where = "saving rollout" if failure["doing"] == "save" else "rollout"
    return f"{failure['exception']}, {where} {failure['rollout']}", long


def group(case: Case, *arguments: str, stand_in: bool = False, forked: bool = False) -> Group:
    return Group((case,), lambda runner: rows(runner, case, arguments, stand_in, forked))


MEGATRON_CORE = ("megatron-core", "megatron-core-forward-pre-hook-reentry")
SWIFT = ("ms-swift", "swift-no-sync-reentry")
BRIDGE = ("megatron-bridge", "megatron-bridge-no-sync-reentry")
VERL = ("verl", "verl-no-sync-reentry")
SLIME = ("slime", "slime-no-sync-reentry")
MEGATRON_LM = ("megatron-lm", "megatron-lm-no-sync-reentry")
FUNCTION = "tests.harness.framework_entries:install"
GROUPS = (
    group(Case(*MEGATRON_CORE, "training, rollout after rollout"), "--entry", "none-twice", forked=True),
    group(Case(*MEGATRON_CORE, "a save between rollouts"), "--entry", "none-twice", "--save"),
    group(Case(*SWIFT, "setup_model_training per rollout"), "--entry", f"{FUNCTION}_swift"),
    group(
        Case(*BRIDGE, "_update_model_config_funcs", "_update_model_config_funcs per rollout"),
        *("--entry", f"{FUNCTION}_megatron_bridge"),
    ),
    group(
        Case(*VERL, "register_megatron_training_hooks", "register_megatron_training_hooks per rollout"),
        *("--entry", f"{FUNCTION}_verl"),
    ),
    group(Case(*SLIME, "train() per rollout"), "--entry", "slime", stand_in=True),
    group(Case(*MEGATRON_LM, "train() per rollout"), "--entry", "megatron-lm", stand_in=True),
)
