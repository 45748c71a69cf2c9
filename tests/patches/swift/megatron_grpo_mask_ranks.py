"""A training step of ms-swift's Megatron GRPO, from the rollout to the weights' gradient.

``--out FOLDER``, with a release of ms-swift on sys.path. Real are ``_generate_and_score_completions``, ``forward_step``
and the loss of MegatronGRPOTrainer with what they call, and megatron-core's model. Ours are the rollouts, their
advantages, the collator's padding or packing, the attention mask, which CUDA kernels build, and the trainer's set-up,
which would load a model. The yardstick are the completions' tokens, each row by itself, in float64.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.patches.swift import null_ref_context_ranks
from tests.patches.swift.logits_ranks import IGNORED, VOCABULARY, megatron_model, relative, start

NAME = "swift-megatron-grpo-mask"
CAP = 2.0
ADVANTAGES = (1.0, -0.7)
#: Which tokens of a row the policy has written: two turns with the user's between them, and one.
WRITTEN = ((0, 0, 0, 1, 1, 0, 1, 1), (0, 0, 1, 1, 1, 1))


def rollouts(with_logprobs: bool) -> list[dict[str, Any]]:
    """Rows as the engine returns them; its log-probabilities by turn."""
    torch.manual_seed(0)
    rows = []
    for written in WRITTEN:
        known = torch.tensor(written).bool()
        tokens = torch.randint(0, VOCABULARY, known.shape)
        row = {"tokens": tokens, "labels": tokens.where(known, IGNORED), "is_truncated": False}
        sampled = (-torch.rand(int(known.sum())) - 3.4).tolist()
        if with_logprobs:
            row["rollout_logprobs"] = [sampled[:2], sampled[2:]]
        rows.append(row)
    return rows


def collated(rows: list[dict[str, Any]], packed: bool) -> dict[str, Any]:
    columns = ("tokens", "labels")
    if packed:
        tokens, labels = (torch.cat([row[name] for row in rows])[None] for name in columns)
        positions = torch.cat([torch.arange(len(row["tokens"])) for row in rows])[None]
    else:
        tokens, labels = (
            torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
            for name, fill in zip(columns, (0, IGNORED), strict=True)
        )
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


class Model:
    """megatron-core's, whose native attention takes a mask where TransformerEngine's takes lengths."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.training = model, model.config, True

    def __call__(self, **inputs: Any) -> Any:
        inputs.pop("packed_seq_params", None)
        places = inputs["position_ids"][0]
        sequence = (places == 0).cumsum(0)
        apart = sequence[:, None] != sequence[None]
        inputs["attention_mask"] = (apart | torch.ones_like(apart).triu(1))[None, None]
        return self.model(**inputs)


def shifted(by: str) -> dict[str, Any]:
    """A user's own repair, in a method of this name."""
    released: Any = getattr(importlib.import_module("swift.megatron.trainers.grpo_trainer").MegatronGRPOTrainer, by)

    def loss_func(trainer: Any, output: Any, data: dict[str, Any]) -> Any:
        return released(trainer, output, {**data, "completion_mask": data["completion_mask"].roll(-1, -1)})

    def generate(trainer: Any, batch: Any) -> Any:
        made = released(trainer, batch)
        for each in made:
            each["completion_mask"] = each["completion_mask"].roll(-1, -1)
        return made

    def prepare(trainer: Any, data: dict[str, Any], *args: Any) -> Any:
        if "completion_mask" in data:
            data = {**data, "completion_mask": data["completion_mask"].roll(-1, -1)}
        return released(trainer, data, *args)

    return {by: {"loss_func": loss_func, "_prepare_batch": prepare}.get(by, generate)}


def trainer_of(model: Any, loss_type: str, packed: bool, mode: str | None, own: str = "") -> Any:
    module: Any = importlib.import_module("swift.megatron.trainers.grpo_trainer")
    args = SimpleNamespace(
        **dict.fromkeys((f"{each}_parallel_size" for each in ("tensor_model", "pipeline_model", "context")), 1),
        **dict.fromkeys(("delta", "fp8_recipe", "fp8_format", "attention_backend", "mtp_num_layers", "enable_mtp")),
        **dict.fromkeys(
            ("sequence_parallel", "overlong_filter", "mlp_padding_free", "log_entropy", "is_multimodal"), False
        ),
        padding_free=packed,
        hidden_size=model.config.hidden_size,
        micro_batch_size=len(WRITTEN),
        task_type="causal_lm",
        report_to=[],
        loss_type=loss_type,
    )
    null_ref_context_ranks.Args.current = args  # what ms-swift 3 reads with `get_args()`
    kind = module.MegatronGRPOTrainer
    trainer = object.__new__(type("Own", (kind,), shifted(own)) if own else kind)
    trainer.args, trainer.device, trainer.stimer = args, torch.device("cpu"), Timer()
    trainer.truncation_strategy, trainer.dynamic_sample, trainer.kl_in_reward = "delete", False, False
    trainer.rollout_importance_sampling_mode, trainer.rollout_importance_sampling_threshold = mode, CAP
    trainer.log_rollout_offpolicy_metrics = trainer.disable_rollout_importance_sampling = False
    trainer.off_policy_sequence_mask_delta, trainer.beta, trainer.importance_sampling_level = None, 0.0, "token"
    trainer.compute_entropy = trainer.log_entropy = trainer.log_completions = False
    trainer.top_entropy_quantile, trainer.temperature, trainer.loss_type = 1.0, 1.0, loss_type
    trainer.epsilon_low, trainer.epsilon_high, trainer.micro_batch_size = 0.2, 5.0, len(WRITTEN)
    trainer._step, trainer.steps_per_generation = 0, 2
    trainer.unwrapped_models, trainer._metrics = [model], defaultdict(lambda: defaultdict(list))
    trainer.template = SimpleNamespace(
        padding_free=packed,
        encode=lambda row, **_: row,
        data_collator=lambda rows, padding_to=None: collated(rows, packed),
    )
    trainer._template_context = lambda template: contextlib.nullcontext()
    trainer._get_rollout_group = lambda: torch.distributed.group.WORLD
    for name in (
        *("get_local_rollout_batch", "_generate_completions"),
        *("_maybe_replace_response_token", "resample_encode_failed_inputs"),
    ):
        setattr(trainer, name, lambda batch: batch)
    trainer._score_completions = lambda batch: None
    trainer._compute_advantages = lambda *_, **__: torch.tensor(ADVANTAGES)
    return trainer


class Timer(contextlib.AbstractContextManager[None]):
    def __call__(self, **_: Any) -> Timer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def as_defined(model: Any, rows: list[dict[str, Any]], loss_type: str, mode: str | None) -> torch.Tensor:
    """Mean over rows of the mean over a completion's tokens, each by the tokens before it; CISPO's over all tokens.

    On the policy the ratio is 1 and nothing is clipped (Shao et al. 2024, arXiv 2402.03300, eq. 3; MiniMax 2025, arXiv
    2506.13585, eq. 4). Weights of the rollout engine's log-probabilities, truncated at a cap, are constants.
    """
    terms = []
    for row, written, advantage in zip(rows, WRITTEN, ADVANTAGES, strict=True):
        tokens = row["tokens"][None]
        length = tokens.shape[1]
        above = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        every = model(tokens, torch.arange(length)[None], above)[0].log_softmax(-1)
        logps = torch.stack([every[place - 1, tokens[0, place]] for place in range(length) if written[place]])
        objective = logps if loss_type == "cispo" else (logps - logps.detach()).exp()
        if mode is not None:
            sampled = torch.tensor([each for turn in row["rollout_logprobs"] for each in turn]).double()
            objective = objective * (logps.detach() - sampled).exp().clamp(max=CAP)
        terms.append(-advantage * objective)
    return torch.cat(terms).mean() if loss_type == "cispo" else torch.stack([each.mean() for each in terms]).mean()


def step(loss_type: str, packed: bool, mode: str | None = None, own: str = "") -> dict[str, Any]:
    policy = megatron_model()
    model = Model(policy)
    trainer = trainer_of(model, loss_type, packed, mode, own)
    rows = rollouts(mode is not None)
    exact = megatron_model()
    exact.load_state_dict(policy.state_dict())
    exact.double()
    policy.config.args = exact.config.args = trainer.args  # where ms-swift 4.0 reads them
    wanted = as_defined(exact, rows, loss_type, mode)
    wanted.backward()
    (batch,) = trainer._generate_and_score_completions(rows)
    mask, labels = batch["completion_mask"], batch["labels"].tolist()
    output, loss_of = trainer.forward_step(iter([batch]), model)
    loss = loss_of(output)[0]
    loss.backward()
    weights = [name for name, weight in exact.named_parameters() if weight.grad is not None]
    ours, theirs = (
        torch.cat([dict(each.named_parameters())[name].grad.flatten() for name in weights]) for each in (policy, exact)
    )
    return {
        "loss": abs(loss.item() - wanted.item()) / abs(wanted.item()),
        "gradient": relative(ours, theirs),
        "tokens": mask.sum(-1).tolist(),
        "kind": [str(mask.dtype), list(mask.shape)],
        "labels": labels == collated(rows, packed)["labels"].tolist(),
    }


def observe() -> dict[str, Any]:
    found = of_the_release()
    for own in ("loss_func", "_generate_and_score_completions", "_prepare_batch"):
        found[f"own {own}"] = step("grpo", True, own=own)
    module: Any = importlib.import_module("swift.megatron.trainers.grpo_trainer")
    if importlib.metadata.version("ms-swift").startswith("3.12."):
        real = module.pad_logps_back_to_batch
        module.pad_logps_back_to_batch = padded(real)
        try:
            found["own pad_logps_back_to_batch"] = step("grpo", True)
        finally:
            module.pad_logps_back_to_batch = real
    return found


def padded(real: Any) -> Any:
    """A user's own repair, in the function that gives a packed mask its rows."""

    def own(*args: Any, **kwargs: Any) -> Any:
        rows, more = real(*args, **kwargs)
        mask: Any = kwargs["logps_rmpad"] if "logps_rmpad" in kwargs else args[0]
        return (rows.roll(-1, -1) if set(mask.flatten().tolist()) <= {0.0, 1.0} else rows), more

    return own


def of_the_release() -> dict[str, Any]:
    layouts: tuple[bool, ...] = (True, False)
    losses: list[tuple[str, str | None]] = [("grpo", None), ("cispo", None), ("grpo", "token_truncate")]
    if importlib.metadata.version("ms-swift").startswith("3.11."):  # packs always, and divides CISPO's by prompts too
        layouts, losses = (True,), [losses[0], losses[2]]
    return {
        f"{'packed' if packed else 'padded'} {loss_type}{' corrected' if mode else ''}": step(loss_type, packed, mode)
        for packed in layouts
        for loss_type, mode in losses
    }


def main() -> None:
    options = states.parser().parse_args()
    start(context=1)
    utils: Any = importlib.import_module("swift.megatron.trainers.utils")
    utils.get_wandb_writer = lambda: None  # Megatron-LM's, which ms-swift 3 asks after each timed call
    states.report(NAME, observe, options.out)
