"""megatron-core's losses, and training on it as frameworks enter it, once for every rollout."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hunt import groups
from hunt.outcomes import Outcome
from hunt.trainers import CannotRun, trainer


@trainer("megatron_core/cross-entropy", "megatron_core/fused-cross-entropy")
def cross_entropy(*, name: str, looked_at: str) -> Outcome:
    """A caller's float32 logits, which a policy's entropy may be computed of afterwards."""
    import torch

    torch.compiler.set_stance("force_eager")
    groups.start_megatron()
    from tests.patches.megatron_core import cross_entropy_in_place_ranks as cases

    generator = torch.Generator().manual_seed(5)
    logits, target = torch.randn(4, 2, 64, generator=generator), torch.randint(64, (4, 2), generator=generator)
    given = {"logits": logits.detach().clone()}
    cases.losses_of("fused" if "fused" in name else "plain", logits, target).sum()
    return {"inputs": given if looked_at == "before" else {"logits": logits.detach()}}


@trainer("megatron_core/rollouts", "megatron_core/rollouts-and-saves")
def take_rollouts(*, name: str, rollouts: int, of_steps: int, ranks: int = 1) -> Outcome:
    """Steps of a GPT with overlapping all that overlaps, in as many entries into training."""
    return taken(rollouts, of_steps, "none-twice", saves="saves" in name)


@trainer("verl_training/rollouts", entry="verl")
@trainer("swift_training/rollouts", entry="swift")
@trainer("megatron_bridge_training/rollouts", entry="megatron_bridge")
def enter_rollouts(*, entry: str, rollouts: int, of_steps: int, ranks: int = 1) -> Outcome:
    """The same, as each framework enters training."""
    return taken(rollouts, of_steps, f"tests.harness.framework_entries:install_{entry}", saves=False)


def taken(rollouts: int, of_steps: int, entry: str, saves: bool) -> Outcome:
    """The losses of all steps; a single rollout is what the tests call the reference."""
    import torch

    from tests.harness import rollout_training as harness

    groups.alone()
    with tempfile.TemporaryDirectory() as folder:
        scenario = ["--scenario", "reference"] if rollouts == 1 else ["--save"] * saves
        if entry != "none-twice":  # without the forward pre-hooks, whose bug would be met after this one
            scenario.append("--no-overlap-param-gather")
        args = harness.parse(
            ["--out", folder, *scenario, "--entry", entry, "--rollouts", str(rollouts), "--steps", str(of_steps)]
        )
        args.out = Path(folder)
        calls = harness.prepare(args)
        harness.start_megatron(args)
        try:
            training = harness.Training(args, calls)
        except ImportError as error:
            raise CannotRun(str(error)) from error
        training.run()
    if failure := training.report["failure"]:
        raise RuntimeError(f"{failure['exception']}: {failure['message']}, in {failure['traceback'][-1]}")
    torch.distributed.barrier()
    return {"losses": {"actor": [float.fromhex(one) for one in training.report["losses"]["actor"]]}}
