"""TRL's chunked loss under real DeepSpeed ZeRO-3, and GRPO's default loss: the workers of the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from cases import Case, Group, Row, Runner, proved

from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import TORCH, TRL, Level, beside

PATCH = "trl-chunked-nll-zero3"
TRAINED = Case("trl", PATCH, "loss, head is trained")
UNEQUAL = Case("trl", PATCH, "1 chunk on one rank, 5 on other", "loss, 1 chunk on one rank and 5 on the other")
SLEEP = Case(
    "trl",
    "trl-vllm-sleep-weights",
    "GRPO, vLLM asleep between steps",
    "GRPOTrainer, colocated engine with sleep mode, 3 steps: generations with the policy's weights",
)
SERVED = Case(
    "trl",
    "trl-online-dpo-server",
    "Online DPO, vLLM server",
    "OnlineDPOTrainer, vLLM server, with trl-online-dpo-server-padding too: error of the gradient",
)
OLD = Case(
    "trl",
    "trl-optional-packages",
    "GRPO of 0.21 on transformers 5",
    "GRPOTrainer of TRL 0.21.0 with transformers 5, and trl-warnings-issued: import and training",
)
KTO = Case(
    "trl",
    "trl-kto-liger-reference",
    "KTO, Liger and PEFT",
    "KTOTrainer, use_liger_kernel and LoRA: size of the gradient",
)
TRAINER = Case("trl", PATCH, "SFTTrainer, torch_compile", "SFTTrainer, torch_compile, masks differ")


def loss(runner: Runner) -> Iterator[Row]:
    """The loss on a partitioned head, through torchrun."""
    reports = runner.launched("tests.patches.trl.chunked_nll_zero3_ranks", "partitioned_head", "unpatched")
    before = [report["unpatched"] for report in reports]
    after = [report["partitioned_head"]["partitioned"] for report in reports]
    for case, without, name in (
        (TRAINED, before[0]["backward"], "equal-float32"),
        (UNEQUAL, before[1]["stall"], "unequal-float32"),
    ):
        found = [report[name] for report in after]
        same = all(all(one["same_outputs"] + one["same_gradients"]) for one in found)
        gathers = f"{len(found[0]['forward'])} gather forward, {len(found[0]['backward'])} backward"
        yield row(case, reports[0]["versions"]["trl"], without, gathers, same)


def trainer(runner: Runner) -> Iterator[Row]:
    """SFTTrainer with torch_compile and LoRA."""
    worker = "tests.patches.trl.chunked_nll_zero3_training_ranks"
    runs = ("unpatched:lora", "patched:compiled-lora")
    reports = runner.forked(worker, *runs, levels=TRL)
    eager, compiled = ([report[run] for report in reports] for run in runs)
    same = all(one["logged"] == other["logged"] for one, other in zip(eager, compiled, strict=True))
    losses = [float.fromhex(step["loss"]) for step in compiled[0]["logged"]]
    try:
        (failed, *_) = runner.forked(worker, "unpatched:compiled-lora", levels=TRL)
        without = failed["unpatched:compiled-lora"].get("failed", "")
    except RuntimeError as error:  # gloo ended the process
        without = str(error)
    yield row(TRAINER, reports[0]["versions"]["trl"], without, f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", same)


def sleep(runner: Runner) -> Iterator[Row]:
    """Which generations come from the policy's present weights, of an engine that drops them after each."""
    levels = beside("trl-1.5", "trl")
    (report,) = runner.forked("tests.patches.trl.vllm_sleep_weights_ranks", "steps", levels=levels, ranks=1)
    found = {state: report[state]["steps"]["generations"] for state in ("before", "after")}
    own = {state: sum(each["weights"] == 0 for each in found[state]) for state in found}
    without, with_it = (f"{own[state]} of {len(found[state])}" for state in found)
    error = max(each["logprobs"] for each in found["after"])
    repaired = own["before"] == 1 and own["after"] == len(found["after"]) and error < 1e-12
    words = (without, with_it, f"log-probabilities in float64: {error:.0e}")
    yield Row(SLEEP, report["version"], without, with_it, f"float64 {error:.0e}", repaired, words)


def served(runner: Runner) -> Iterator[Row]:
    """The gradient of a step on a server's completions, against its definition."""
    levels = beside("trl-1.5", "trl")
    (report,) = runner.forked("tests.patches.trl.online_dpo_ranks", "server", levels=levels, ranks=1)
    before, after = (report[state]["server"]["error"] for state in ("before", "after"))
    without, with_it = f"{before:.0%} off", f"{after:.0e} off"
    words = (without, with_it, f"its definition in float64: {after:.0e}")
    version, _ = report["trl-online-dpo-server"]
    yield Row(SERVED, version, without, with_it, f"float64 {after:.0e}", before > 0.5 and after < 1e-5, words)


def old(runner: Runner) -> Iterator[Row]:
    """GRPO of an older TRL beside transformers 5, held against the same beside transformers 4."""
    release = unpacked.folders("trl==0.21.0")
    found = []
    for more in ("", f":{side_by_side.folder('transformers-4.57')}"):
        levels = (*TORCH, Level("tests.harness.loading:transformers_alone", release + more))
        found += runner.forked("tests.patches.trl.old_trl_ranks", "GRPO", levels=levels, ranks=1)
    new, reference = (each["trained"]["GRPO"]["norms"] for each in found)
    without = found[0]["before"]["GRPO"].partition("No module")
    error = max(abs(one - other) / other for one, other in zip(new, reference, strict=True))
    repaired = bool(without[1]) and error < 1e-12
    short, norms = "".join(without[1:])[:26], " ".join(f"{norm:.4f}" for norm in new)
    words = ("".join(without[1:]).splitlines()[0], f"norms {norms}", f"with transformers 4.57.6: {error:.0e}")
    yield Row(OLD, found[0]["trl"], short, f"norms {norms}", f"4.57.6: {error:.0e}", repaired, words)


def kto(runner: Runner) -> Iterator[Row]:
    """The gradient of KTO with Liger's loss and PEFT, held against the formula in float64."""
    levels = (
        Level("tests.harness.loading:torch_and_interpreter", str(side_by_side.folder("liger-0.8"))),
        Level("tests.harness.loading:trl_kto_with_liger", unpacked.folders("trl==1.12.0")),
    )
    (report,) = runner.forked("rlhf_patches.patches.trl.proofs.kto_liger_reference_ranks", levels=levels, ranks=1)
    before, after = (report[state]["PEFT"] for state in ("before", "after"))
    without, with_it = (f"{found['factor']:.2f} x its size" for found in (before, after))
    repaired = before["error"] > 0.5 and after["error"] < 1e-6
    words = (without, with_it, f"the formula in float64: {after['error']:.0e}")
    yield Row(KTO, report["version"], without, with_it, f"float64 {after['error']:.0e}", repaired, words)


def row(case: Case, release: str, without: str | None, after: str, same: bool) -> Row:
    """``same``: bit for bit what the yardstick gave. ``without``: the failure, if there was one."""
    repaired = same and bool(without)
    verdict = "bit for bit" if repaired else "NO"
    known = r"Received data size[^?]*\?[^?]*\?|Timed out waiting \w+|Connection reset by peer"
    found = re.search(known, without or "")
    long = found.group() if found else (without or "nothing failed").partition(". ")[0][:120]
    short = long if len(long) <= 26 else long.partition(":")[0][:26]
    brief = re.sub(r"(\d) gather forward, (\d) backward", r"\1 + \2 gathers", after)
    return Row(case, release, short, brief, verdict, repaired, (long, after, verdict))


GROUPS = (
    Group((TRAINED, UNEQUAL), loss),
    Group((TRAINER,), trainer),
    proved("trl.grpo_dapo_scale", partial(beside, "trl-1.5", "trl")),
    proved("trl.grpo_truncated_count", partial(beside, "trl-1.5", "trl")),
    proved("trl.dropout_ratio", lambda: TRL),
    Group((SLEEP,), sleep),
    Group((SERVED,), served),
    Group((OLD,), old),
    Group((KTO,), kto),
)
