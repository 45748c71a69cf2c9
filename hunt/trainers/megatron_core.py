"""megatron-core's losses, and training on it as frameworks enter it, once for every rollout."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

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


LENGTHS = (16, 9, 12, 5, 14, 7, 3, 10)


@trainer("megatron_core/gpt", "megatron_core/gpt-per-token")
def gpt(
    *,
    name: str,
    micro_batch: int = 8,
    accumulation: int = 1,
    ranks: int = 1,
    order: str = "given",
    parallel: str = "",
) -> Outcome:
    """A step of a GPT within DistributedDataParallel: a loss per micro-batch, or of all tokens that count."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    groups.start_megatron(ranks if parallel else 1, ranks)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.harness import small_gpt

    per_token = "per-token" in name
    if len(LENGTHS) % (micro_batch * accumulation):
        raise CannotRun("Megatron has micro-batches of one size")
    model = small_gpt.make_model(False, calculate_per_token_loss=per_token)
    model.config.finalize_model_grads_func = finalize_model_grads
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(small_gpt.VOCABULARY, (len(LENGTHS), 17), generator=generator)
    # A mean of means over micro-batches is one of all where each row has as many tokens.
    counted = torch.arange(16) < torch.tensor(LENGTHS if per_token else [9] * len(LENGTHS))[:, None]
    rows = torch.arange(len(LENGTHS)) if order == "given" else torch.arange(len(LENGTHS)).flip(0)
    rows = rows.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]

    def forward_step(iterator: Any, model: Any) -> Any:
        chosen = next(iterator)
        losses = model(tokens[chosen, :-1], None, None, labels=tokens[chosen, 1:])

        def loss_of(output: Any) -> Any:
            total, number = (output * counted[chosen]).sum(), counted[chosen].sum()
            noted.append(total.detach() / (1 if per_token else number))
            return (total, number.int(), {}) if per_token else (total / number, {})

        return losses, loss_of

    noted: list[Any] = []
    batches = rows.split(micro_batch)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=16,
        micro_batch_size=micro_batch,
        forward_only=False,
    )
    loss = torch.stack(noted).sum()
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    count = counted.sum() if per_token else len(batches) * parallel_state.get_data_parallel_world_size()
    gradient = {}
    for key, parameter in model.module.named_parameters():
        parts = [parameter.main_grad]
        if getattr(parameter, "tensor_model_parallel", False) and parallel:
            parts = [torch.empty_like(parameter.main_grad) for _ in range(ranks)]
            torch.distributed.all_gather(parts, parameter.main_grad.contiguous())
        gradient[key] = torch.cat(parts, max(getattr(parameter, "partition_dim", 0), 0))
    return {"loss": {"step": loss / count}, "gradient": gradient}
