"""SkyRL's advantages and policy loss, its controller, and its workers, as far as they run without a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from hunt import groups, policy_formulas
from hunt.outcomes import Outcome
from hunt.policy_formulas import Limits, Response
from hunt.trainers import CannotRun, trainer

POLICIES = {"regular": "ppo", "dual_clip": "ppo", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo"}
"""Losses of SkyRL's, and their formulas."""


@trainer("skyrl/grpo", "skyrl/gae")
def advantages(*, name: str, padding: int) -> Outcome:
    """The gradient of the policy loss for each log-probability, by way of the normalized advantages."""
    from rlhf_patches.patches.skyrl.proofs import advantage_padding_ranks as cases

    given: dict[str, Any] = {
        "values": cases.rows(0.3, 1),
        "log_probs": cases.rows(-1.0, 2),
        "old_log_probs": cases.rows(-1.0, 3),
    }
    found = cases.gradient(name, 9 + padding, given)
    return {"gradient": {f"row {at}": row for at, row in enumerate(found)}}


@trainer(*(f"skyrl/policy-{name}" for name in POLICIES))
def policy(*, name: str, by: str = "trainer") -> Outcome:
    """A sum over tokens, since the advantages are divided before; a tool's answer within a response does not count."""
    import torch

    kind = name.partition("-")[2]
    generator, mask = torch.Generator().manual_seed(6), torch.ones(4, 9).bool()
    for row, length in enumerate((9, 5, 7, 2)):
        mask[row, length:] = False
    mask[0, 3:5] = False
    own = -1.0 + 0.3 * torch.randn(4, 9, generator=generator)
    old = (own + 0.7 * torch.randn(4, 9, generator=generator)).clamp(max=-0.05)
    advantages = torch.tensor([[1.0], [-0.7], [0.4], [-1.3]]).expand(4, 9)
    if by == "formula":
        own = own.double()
    own.requires_grad_()
    if by == "formula":
        limits = Limits(dual=3.0 if kind == "dual_clip" else None)
        loss = torch.zeros((), dtype=torch.float64)
        for each, before, advantage, counts in zip(own, old.double(), advantages.double(), mask, strict=True):
            response = Response(each[counts], before[counts], advantage[counts])
            loss = loss + policy_formulas.LOSSES[POLICIES[kind]](response, limits).sum()
    else:
        module = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
        cispo = SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.2)
        config = SimpleNamespace(policy_loss_type=kind, loss_reduction="sequence_mean", off_policy_correction=None)
        vars(config).update(eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0, cispo=cispo)
        config.sapo = SimpleNamespace(tau_pos=1.0, tau_neg=1.05)
        loss, _ = module.PolicyLossRegistry.get(kind)(own, old, advantages, config, loss_mask=mask.float())
    loss.backward()
    return {"loss": {"step": loss.detach()}, "gradient": {"log-probabilities": own.grad}}


@trainer("skyrl_dispatch/outputs")
def outputs(*, mesh_tensor: int) -> Outcome:
    """Which samples a client gets the outputs of, from two data-parallel groups."""
    import ray

    from rlhf_patches.patches.skyrl.proofs import loss_outputs_once_ranks as cases

    ray.put = ray.get = lambda value: value
    try:
        module = cases.modules.worker_dispatch()
    except (AttributeError, ImportError) as error:
        raise CannotRun(f"this SkyRL has no controller of that kind: {error}") from error
    mesh = cases.make_mesh(2, 1, mesh_tensor, 1)
    found = cases.run(cases.make_dispatch(module, cases.without_actors(module, mesh)), 6)
    return {"values": {"samples": found["samples"], "losses": found["losses"]}}


@trainer("skyrl_megatron/fsdp-cross_entropy", "skyrl_megatron/fsdp-policy")
def worker(*, name: str, packing: bool) -> Outcome:
    """What a worker returns of each sample, whatever micro-batches it has packed them into."""
    import torch

    groups.start()
    try:
        from tests.patches.skyrl import loss_outputs_packed_ranks as cases

        module = cases.skyrl_on_cpu.megatron_worker()
        chosen, _ = cases.fsdp(module, cases.BUDGET if packing else -1)
    except (AttributeError, ImportError, FileNotFoundError) as error:
        raise CannotRun(f"this SkyRL has no such worker: {error}") from error
    torch.manual_seed(11)  # SkyRL draws the tokens of padding
    loss = name.partition("-")[2]
    found = chosen.forward_backward(cases.make_batch(0), loss_fn=None if loss == "policy" else loss)
    returned = importlib.import_module("numpy").concatenate([one["logprobs"] for one in found.loss_fn_outputs])
    return {"values": {"log-probabilities": returned}}


@trainer("skyrl_megatron/step")
def megatron_step(*, recipe: str, ranks: int = 2) -> Outcome:
    """A mini-batch of packed rows on two tensor-parallel ranks; layers refuse what TransformerEngine would."""
    import torch

    groups.start_megatron(ranks)
    try:
        from tests.patches.skyrl import fp8_alignment_ranks as cases
    except ImportError as error:
        raise CannotRun(str(error)) from error
    case = {"parallel": "tensor", "packed": True, "rows": "ragged", "recipe": None if recipe == "none" else recipe}
    try:
        found = cases.step(case, refuse=recipe != "none")
    except AttributeError as error:
        if error.name != "remove_microbatch_padding":
            raise
        raise CannotRun("since 0.3 the step has another option for it, and aligns by itself") from error
    for failure in found["failed"].values():
        raise RuntimeError(failure)
    assert torch.is_tensor(found["inference"])
    return {"values": {"log-probabilities": found["inference"]}, "gradient": found["gradients"]}
