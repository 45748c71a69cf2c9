"""The gradient of SkyRL's KL loss, alone: ``--out FOLDER``, on one rank, with SkyRL 0.1.0 on sys.path.

`_forward_backward_micro` of FSDP's worker, around a table of logits, and `forward_backward_mini_batch` of Megatron's
wrapper, around a GPTModel. The policy loss is 0. What the gradient should be is computed from each sequence alone,
without padding, from the logits on in float64.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from rlhf_patches.proving import states
from tests.harness import skyrl_on_cpu, small_gpt
from tests.patches.skyrl import logprob_backward_training_ranks as training
from tests.patches.skyrl import loss_outputs_packed_ranks as workers

NAME = "skyrl-kl-no-grad"
ESTIMATORS = ("k1", "abs", "k2", "k3")
COEFFICIENT = 0.5
BACKENDS = ("fsdp", "megatron")


def policy_loss(log_probs: Any, *_: Any, **__: Any) -> Any:
    """Nothing, of which the gradient is 0."""
    return 0.0 * log_probs.sum(), {}


def settings(estimator: str, on: bool) -> SimpleNamespace:
    algorithm = SimpleNamespace(
        **{"policy_loss_type": "regular", "temperature": 1.0, "use_entropy_loss": False, "entropy_loss_coef": 0.0},
        **{"use_kl_loss": on, "kl_loss_coef": COEFFICIENT, "kl_estimator_type": estimator},
    )
    return SimpleNamespace(algorithm=algorithm, use_sample_packing=False)


def fsdp(config: Any) -> tuple[Any, Any, Any]:
    """The model, a step of a micro-batch that gives the metrics, and the logits of a sequence."""
    module = skyrl_on_cpu.megatron_worker()
    worker = module.PolicyWorkerBase.__new__(module.PolicyWorkerBase)
    worker.cfg, worker.policy_loss_fn, worker.optimizer = config, policy_loss, None
    worker.model, worker.strategy = workers.Table(), workers.make_strategy()
    worker.scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])

    def step(batch: dict[str, Any]) -> Any:
        names = {"old_action_log_probs": "action_log_probs", "rollout_action_logprobs": "rollout_logprobs"}
        experience = SimpleNamespace(**{names.get(name, name): value for name, value in batch.items()})
        experience.to_device, experience.action_mask = lambda device: None, None
        return worker._forward_backward_micro(experience)

    return worker.model, step, lambda tokens: worker.model.weight[tokens]


def megatron(config: Any) -> tuple[Any, Any, Any]:
    model = small_gpt.make_model(False, length=training.LENGTH)
    wrapper = skyrl_on_cpu.model_wrapper().MegatronModelWrapper(config, [model], None, policy_loss)

    def step(batch: dict[str, Any]) -> Any:
        (metrics,) = wrapper.forward_backward_mini_batch([batch], training.LENGTH, training.ROWS)
        return metrics

    return model, step, lambda tokens: model(tokens[None], torch.arange(len(tokens))[None], None)[0]


def gradients(model: Any) -> torch.Tensor:
    found = [
        getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad
        for parameter in model.parameters()
    ]
    return torch.cat([each.double().flatten() for each in found if each is not None])


def expected(logits_of: Any, batch: dict[str, Any], estimator: str) -> torch.Tensor:
    """Schulman's estimates (http://joschu.net/blog/kl-approx.html), the mean over tokens, and over sequences."""
    terms = []
    for row, mask in enumerate(batch["attention_mask"].bool()):
        tokens = batch["sequences"][row][mask]
        log_probs = logits_of(tokens).double().log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        difference = log_probs[-training.ACTIONS :] - batch["base_action_log_probs"][row].double()
        of_token = {
            "k1": difference,
            "abs": difference.abs(),
            "k2": difference**2 / 2,
            "k3": (torch.exp(-difference) + difference - 1).clamp(max=10),  # as SkyRL limits it
        }[estimator]
        counted = batch["loss_mask"][row].double()
        terms.append((of_token * counted).sum() / counted.sum())
    return COEFFICIENT * torch.stack(terms).mean()


def of_case(backend: Any, estimator: str, on: bool = True) -> dict[str, Any]:
    batch = training.make_micro_batches()[0]
    model, step, _ = backend(settings(estimator, on))
    metrics = step(dict(batch))
    found = gradients(model)
    model, _, logits_of = backend(settings(estimator, on))
    loss = expected(logits_of, batch, estimator)
    loss.backward()
    wanted = gradients(model)
    return {
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, float)},
        "norm": float(found.norm()),
        "error": float((found - wanted).norm() / wanted.norm()),
        "loss": float(loss.detach()),
    }


def compute_approx_kl(log_probs: Any, base: Any, loss_mask: Any, kl_estimator_type: str) -> Any:
    """A user's function, with a gradient of its own."""
    return (log_probs - base).square() * loss_mask


def of_own(decorated: bool) -> float:
    """The gradient's norm with a user's function in place of SkyRL's."""
    module = skyrl_on_cpu.model_wrapper()
    released = module.compute_approx_kl
    module.compute_approx_kl = torch.no_grad()(compute_approx_kl) if decorated else compute_approx_kl
    try:
        return float(of_case(megatron, "k3")["norm"])
    finally:
        module.compute_approx_kl = released


def observe() -> dict[str, Any]:
    cases = {
        f"{backend.__name__}, {estimator}": of_case(backend, estimator)
        for backend in (fsdp, megatron)
        for estimator in ESTIMATORS
    }
    off = {f"{backend.__name__}, off": of_case(backend, "k3", on=False) for backend in (fsdp, megatron)}
    return cases | off | {"own": of_own(False), "own, without a gradient": of_own(True)}


def main() -> None:
    from megatron.core import parallel_state

    options = states.parser().parse_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    skyrl_on_cpu.install()
    states.report(NAME, observe, options.out)
