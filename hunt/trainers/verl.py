"""verl's losses, within the loop over micro-batches of its engine for FSDP, and its estimators of advantages.

The engine's ``forward_backward_batch`` is real, from a global mini-batch to gradients; the model is a parameter for
each token, its log-probability or value, which is the cheapest model that a loss can be asked about: its gradient is
that of the loss. The batch is what verl's trainers make: nested since 0.9 (``use_v1``), padded before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

from hunt import groups, policy_formulas
from hunt.outcomes import Outcome
from hunt.policy_formulas import Limits, Response
from hunt.trainers import CannotRun, trainer

PROMPTS, RESPONSES = (3, 5, 4, 2, 5, 3, 1, 4), (9, 2, 6, 4, 11, 1, 7, 5)
RESPONSE = 12
NO_TOKENS = (2, 5)
"""Rows of which none counts, where rows are to be padding."""
GROUPS = "aabbaabb"
MODES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo")
AVERAGES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
PAPERS = {"vanilla": "ppo", "geo_mean": "gmpo"}
"""What the formula of a loss is called, where it has another name than verl's."""
DIVERGENCES = {"kl-loss": "k3", **{f"kl-{kind}": kind for kind in ("k1", "k2", "abs", "k1+", "k3+")}}
FIELDS = ("old_log_probs", "advantages", "ref_log_prob", "values", "returns")


def made(order: str, answers: int, without: tuple[int, ...] = (), apart: float | None = None) -> list[dict[str, Any]]:
    """Rows without padding: what is known of each token of a response, and which counts; 3 tokens in may not.

    Args:
        order: of the rows.
        answers: tokens that do not count, within each response that is long enough.
        without: rows of which none counts.
        apart: how far the old policy's log-probabilities are from the model's.
    """
    import torch

    rows = []
    for index, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        generator = torch.Generator().manual_seed(index)
        inside = answers if response > 3 else 0
        mask = torch.tensor([1] * min(response, 3) + [0] * inside + [1] * (response - 3)).bool()
        row: dict[str, Any] = {"index": index, "prompt": prompt, "mask": mask if index not in without else mask & False}
        for name in (*FIELDS, "model"):  # what stands in tokens that do not count is another number
            values = torch.randn(response, generator=generator) * (1.0 if name in ("advantages", "returns") else 0.3)
            values = values - 1.0 if "prob" in name or name == "model" else values
            row[name] = torch.full((len(mask),), -7.0).masked_scatter(mask, values)
        row["advantages"][:] = 1.0 - 0.4 * index  # of a sequence, as GRPO's
        if apart is not None:
            drawn = torch.zeros(len(mask)).masked_scatter(mask, apart * torch.randn(response, generator=generator))
            row["old_log_probs"] = torch.where(mask, (row["model"] + drawn).clamp(max=-0.05), row["old_log_probs"])
        rows.append(row)
    return rows if order == "given" else rows[::-1]


def batch_of(
    rows: list[dict[str, Any]], *, nested: bool, padding: int, more: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """As a trainer hands it to the engine; ``index`` is for the model, and there may be more fields of tokens."""
    import torch
    from tensordict import TensorDict

    prompt, response = max(PROMPTS), padding + max(len(row["mask"]) for row in rows)
    ids = {"prompts": [torch.ones(row["prompt"], dtype=torch.long) for row in rows]}
    ids["responses"] = [torch.ones(len(row["mask"]), dtype=torch.long) for row in rows]
    ids["input_ids"] = [torch.cat(pair) for pair in zip(ids["prompts"], ids["responses"], strict=True)]
    of_tokens = {name: [row[name] for row in rows] for name in FIELDS}
    of_tokens["response_mask"] = of_tokens["loss_mask"] = [row["mask"].long() for row in rows]
    of_tokens |= more
    jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {"index": torch.tensor([row["index"] for row in rows]), "input_ids": jagged(ids.pop("input_ids"))}
    if nested:
        tensors |= {name: jagged(values) for name, values in {**ids, **of_tokens}.items()}
    else:

        def padded(values: list[Any], width: int, left: bool = False) -> Any:
            pads = [(width - len(value), 0) if left else (0, width - len(value)) for value in values]
            return torch.stack([torch.nn.functional.pad(*pair) for pair in zip(values, pads, strict=True)])

        tensors |= {
            name: padded(values, response) for name, values in {**of_tokens, "responses": ids["responses"]}.items()
        }
        tensors["prompts"] = padded(ids["prompts"], prompt, left=True)
        tensors["attention_mask"] = torch.cat([tensors["prompts"], tensors["responses"]], 1)
    return TensorDict(tensors, batch_size=len(rows))


def step(rows: list[dict[str, Any]], loss: Any, output: Any, *, micro_batch: int, ranks: int, **layout: Any) -> Outcome:
    """Through the engine: the loss, and the gradient of each row's parameters.

    Args:
        rows: of the global mini-batch.
        loss: verl's function, without ``config``.
        output: what the model returns of a micro-batch's rows, by name, given each row's parameters.
        micro_batch, ranks: how the rows are divided.
        layout: of `batch_of`.
    """
    import torch

    try:
        engines = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    except ModuleNotFoundError as error:
        raise CannotRun("this verl has no engine") from error
    from verl.utils import tensordict_utils as tu

    rank = groups.start(ranks)
    parameters = {row["index"]: torch.nn.Parameter(row["model"].clone()) for row in rows}
    base: Any = engines.FSDPEngine
    by_index = {row["index"]: row for row in rows}

    class Engine(base):
        ulysses_sequence_parallel_size, module, scaler, engine_config = 1, torch.nn.Linear(1, 1), None, None

        def get_data_parallel_group(self) -> Any:
            return torch.distributed.group.WORLD

        def get_data_parallel_size(self) -> int:
            return ranks

        def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            chosen = micro_batch["index"].tolist()
            predicted = output([by_index[index] for index in chosen], [parameters[index] for index in chosen])
            found, metrics = loss_function(model_output=predicted, data=micro_batch)
            return found, {"loss": found.detach().item(), "metrics": metrics}

    Engine.__abstractmethods__ = frozenset()
    data = batch_of(rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks], **layout)
    if (of_rank := len(rows) // ranks) % micro_batch:  # verl has micro-batches of several sizes by tokens only
        tokens = data["input_ids"].offsets()[-1].item() * micro_batch // of_rank
        settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": max(tokens, 18)}
    else:
        settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": micro_batch}
    tu.assign_non_tensor(data, **settings, global_batch_size=len(rows))
    found = object.__new__(Engine).forward_backward_batch(data, loss)
    total = torch.tensor(sum(found["loss"]))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for tensor in (total, *(parameters[index].grad for index in sorted(parameters))):  # as FSDP averages them
        torch.distributed.all_reduce(tensor)
        tensor /= ranks
    gradient = {f"row {row['index']}": parameters[row["index"]].grad[row["mask"]] for row in rows if row["mask"].any()}
    return {"loss": {"step": total}, "gradient": gradient}


def of_tokens(name: str, rows: list[dict[str, Any]], parameters: list[Any]) -> dict[str, Any]:
    """One number for each token of prompt and response, flat; the one of a token stands at the token before."""
    import torch

    parts = [
        torch.nn.functional.pad(parameter, (row["prompt"] - 1, 1))
        for row, parameter in zip(rows, parameters, strict=True)
    ]
    return {name: torch.cat(parts)}


def response_of(row: dict[str, Any], policy: Any) -> Response:
    """The tokens of a row that count, given their log-probabilities."""
    names = {"old": "old_log_probs", "advantages": "advantages", "reference": "ref_log_prob"}
    return Response(policy, **{name: row[field][row["mask"]].double() for name, field in names.items()})


def by_formula(rows: list[dict[str, Any]], loss: Callable[[list[dict[str, Any]], list[Any]], Any]) -> Outcome:
    """As `step`, of a function of the rows and of what the model says of their tokens that count."""
    import torch

    parameters = [torch.nn.Parameter(row["model"][row["mask"]].double()) for row in rows]
    total = loss(rows, parameters)
    total.backward()
    gradient = {f"row {row['index']}": each.grad for row, each in zip(rows, parameters, strict=True) if len(each)}
    return {"loss": {"step": total.detach()}, "gradient": gradient}


SETTINGS = frozenset(
    {"micro_batch", "accumulation", "ranks", "order", "answers", "padding", "padding_free", "by", "apart"}
)
"""Of `step_of`."""


def step_of(
    loss: Any,
    config: Any,
    output: str,
    *,
    micro_batch: int = 8,
    accumulation: int = 1,
    ranks: int = 1,
    order: str = "given",
    answers: int = 0,
    padding: int = 0,
    padding_free: bool | None = None,
    by: str = "trainer",
    apart: float | None = None,
    formula: Callable[[list[dict[str, Any]], list[Any]], Any] | None = None,
) -> Outcome:
    """A step with one of verl's losses, of a model that returns one number for each token."""
    rows = made(order, answers, apart=apart)
    if by == "formula":
        if formula is None:
            raise CannotRun("chooses tokens at random")
        return by_formula(rows, formula)
    return step(
        rows,
        functools.partial(loss, config),
        functools.partial(of_tokens, output),
        micro_batch=micro_batch,
        ranks=ranks,
        nested=_nested(padding_free, padding),
        padding=padding,
    )


def _nested(padding_free: bool | None, padding: int) -> bool:
    from importlib.metadata import version

    default = tuple(map(int, version("verl").split(".")[:2])) >= (0, 9) and not padding
    return default if padding_free is None else padding_free


@trainer(
    *(f"verl/{mode}-{average}" for mode in MODES for average in AVERAGES),
    "verl/fixed-scale",
    *(f"verl/{name}" for name in DIVERGENCES),
    takes=SETTINGS,
)
def actor(*, name: str, **settings: Any) -> Outcome:
    from verl.workers.config import ActorConfig

    more: dict[str, Any] = {}
    if name == "fixed-scale":
        mode, average, more["loss_scale_factor"] = "vanilla", "seq-mean-token-sum-norm", 10
    elif name in DIVERGENCES:
        mode, average, more["use_kl_loss"], more["kl_loss_coef"] = "vanilla", "token-mean", True, 0.5
        more["kl_loss_type"] = DIVERGENCES[name]
    else:
        mode, _, average = name.partition("-")
    try:
        losses = importlib.import_module("verl.workers.utils.losses")
        policies = importlib.import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
    except (AttributeError, ModuleNotFoundError) as error:
        raise CannotRun("this verl has no losses for its engine") from error
    if mode not in policies:
        raise CannotRun(f"this verl has no loss {mode}")
    policy = type(ActorConfig.__dataclass_fields__["policy_loss"].default_factory())
    options = {"dro": {"dro_beta": 0.3}, "kl_cov": {"kl_cov_ratio": 0.2}}.get(mode, {})
    try:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode=average,
            policy_loss=policy(loss_mode=mode, **options),
            **more,
        )
    except (ValueError, TypeError) as error:
        raise CannotRun(str(error)) from error
    of_loss = functools.partial(actor_formula, mode, average, DIVERGENCES.get(name), more.get("loss_scale_factor"))
    formula = None if mode == "clip_cov" else of_loss
    return step_of(losses.ppo_loss, config, "log_probs", formula=formula, **settings)


def actor_formula(
    mode: str,
    average: str,
    divergence: str | None,
    scale: float | None,
    rows: list[dict[str, Any]],
    policies: Sequence[Any],
) -> Any:
    """What `actor` computes, with verl's defaults; without a scale the longest response is it."""
    responses = [response_of(row, policy) for row, policy in zip(rows, policies, strict=True)]
    if mode == "kl_cov":
        losses = policy_formulas.kl_cov(responses, 0.2, 0.1)
    else:
        limits = Limits(dual=None if mode == "gspo" else 3.0)
        losses = [policy_formulas.LOSSES[PAPERS.get(mode, mode)](response, limits) for response in responses]
    if divergence:
        of_each = [policy_formulas.divergence(divergence, each.policy, each.reference) for each in responses]
        losses = [loss + 0.5 * more for loss, more in zip(losses, of_each, strict=True)]
    of_responses = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}  # whatever is asked for
    scale = scale or max(len(row["mask"]) for row in rows)
    return policy_formulas.averaged(losses, of_responses.get(mode, average), scale)


@trainer(*(f"verl/critic-{average}" for average in AVERAGES if average != "token-sum"), takes=SETTINGS)
def critic(*, name: str, **settings: Any) -> Outcome:
    from verl.workers.config import CriticConfig

    try:
        losses = importlib.import_module("verl.workers.utils.losses")
    except ModuleNotFoundError as error:
        raise CannotRun("this verl has no losses for its engine") from error
    config = object.__new__(CriticConfig)  # its constructor wants a tokenizer
    vars(config).update(loss_agg_mode=name.partition("-")[2], cliprange_value=0.5, loss_scale_factor=None)
    return step_of(
        losses.value_loss, config, "values", formula=functools.partial(critic_formula, config.loss_agg_mode), **settings
    )


def critic_formula(average: str, rows: list[dict[str, Any]], predicted: Sequence[Any]) -> Any:
    """What `critic` computes."""
    given = [(row["values"][row["mask"]].double(), row["returns"][row["mask"]].double()) for row in rows]
    losses = [
        policy_formulas.clipped_values(each, old, returns, 0.5)
        for each, (old, returns) in zip(predicted, given, strict=True)
    ]
    return policy_formulas.averaged(losses, average, max(len(row["mask"]) for row in rows))


@trainer("verl/distillation-forward_kl_topk", "verl/distillation-k3")
def distillation(
    *, name: str, micro_batch: int = 8, accumulation: int = 1, ranks: int = 1, order: str = "given"
) -> Outcome:
    """Of two of the rows no token counts, as of those with which a trainer fills a batch up."""
    import torch
    from verl.workers.config import ActorConfig

    try:
        losses = importlib.import_module("verl.trainer.distillation.losses")
    except ModuleNotFoundError as error:
        raise CannotRun("this verl has no distillation") from error
    mode = name.partition("-")[2]
    settings = {"use_task_rewards": False, "use_policy_gradient": False, "loss_max_clamp": None, "topk": 4}
    distilled = SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode=mode, **settings))
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    others = ("student_mass", "teacher_mass", "overlap_token_advantage", "overlap_count")

    def output(rows: list[dict[str, Any]], parameters: list[Any]) -> dict[str, Any]:
        found = of_tokens("log_probs", rows, parameters)
        fixed = {name: torch.full_like(found["log_probs"], 0.5) for name in others}
        of_each = of_tokens("distillation_losses", rows, parameters)["distillation_losses"]
        return {**fixed, **found, "distillation_losses": -of_each}  # which are above 0

    def loss(model_output: Any, data: Any) -> Any:
        teacher = [torch.full((row,), -1.5) for row in data["input_ids"].offsets().diff().tolist()]
        data["teacher_logprobs"] = torch.nested.as_nested_tensor([one[:, None] for one in teacher], layout=torch.jagged)
        return losses.distillation_ppo_loss(
            config=config, distillation_config=distilled, model_output=model_output, data=data
        )

    rows = made(order, 0, NO_TOKENS)
    return step(rows, loss, output, micro_batch=micro_batch, ranks=ranks, nested=False, padding=0)
