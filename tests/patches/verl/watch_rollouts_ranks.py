"""verl's trainers on an engine that has lost LoRA, or not, while they are watched: ``--out FOLDER``.

Of verl 0.8 it is `RayPPOTrainer.fit`, whose weights go to the engine through the real `get_per_tensor_param`, with its
bug or repaired; of the newest `PPOTrainer.fit`. The engine samples one token after the other. What stands in: the
workers, whose model is called here, and what moves data between processes.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from omegaconf import OmegaConf

from rlhf_patches.patches.verl import _watched_rollouts
from rlhf_patches.patches.verl.proofs import lora_buckets_ranks, merged_lora_ranks
from rlhf_patches.proving import states
from tests.harness import watched
from tests.patches.verl.watch_rollouts_cases import NEWER, OLDER

NAME = "verl-watch-rollouts"
PROMPTS, PROMPT, RESPONSE, SAMPLES, STEPS = 4, 3, 6, 2, 2


def log_probabilities(model: Any, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Of the responses in rows of prompts with responses."""
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(2, tokens[:, PROMPT:, None])[:, :, 0]


class Engine:
    """Samples from the weights that it was given last."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.model = merged_lora_ranks.make_model(merged_lora_ranks.Case(lora=False))
        self.sampler = torch.Generator().manual_seed(3)
        self.exact: list[float] = []
        self.receiver: Any = None if trainer.merge else lora_buckets_ranks.extended()()

    def update_weights(self, *_: object) -> None:
        if not self.trainer.merge:
            self.update_adapter()
            return
        tensors, _ = self.trainer.worker.get_per_tensor_param(base_sync_done=True)
        state = {name: tensor.detach().float().clone() for name, tensor in tensors}
        self.model.load_state_dict(state, strict=False)

    def update_adapter(self) -> None:
        """The adapter alone, through the real extension of vLLM's worker, in two buckets."""
        tensors, settings = self.trainer.worker.get_per_tensor_param(base_sync_done=True)
        sent = {name: tensor.detach() for name, tensor in tensors}
        lora_buckets_ranks.update(self.receiver, sent, -(-len(sent) // 2), peft_config=settings, base_sync_done=True)
        (adapter,) = self.receiver.adapters.values()
        self.model = copy.deepcopy(self.trainer.policy)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:  # a layer that no adapter is loaded for is the base model's
                    parameter.copy_(adapter.get(name.replace(".default", ""), torch.tensor(0.0)))

    def sleep_replicas(self) -> None:
        """Nothing is to be freed."""

    def sampled(self, prompts: torch.Tensor) -> torch.Tensor:
        tokens = prompts
        for _ in range(RESPONSE):
            with torch.no_grad():
                logits = self.model(input_ids=tokens).logits[:, -1] / self.trainer.temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=self.sampler)], 1)
        return tokens

    def generate_sequences(self, prompts: Any) -> Any:
        """As an agent loop's workers answer: rows of the batch, without padding here."""
        protocol = importlib.import_module("verl.protocol")
        tokens = self.sampled(self.trainer.prompts.repeat_interleave(SAMPLES, 0))
        ones = torch.ones_like(tokens)
        found = {
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "input_ids": tokens,
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
            "response_mask": ones[:, PROMPT:],
            "rm_scores": (tokens[:, PROMPT:] % 2).float(),
        }
        if self.trainer.config.actor_rollout_ref.rollout.calculate_log_probs:
            found["rollout_log_probs"] = log_probabilities(self.model, tokens, self.trainer.temperature)
        rows: list[dict[str, Any]] = [{} for _ in tokens]
        made = protocol.DataProto.from_dict(
            tensors=found, non_tensors={"multi_modal_inputs": numpy.array(rows, dtype=object)}
        )
        made.meta_info["timing"] = {}
        self.note(tokens)
        return made

    def note(self, tokens: torch.Tensor) -> None:
        """The mean |trainer - engine| in float64, of the models themselves."""
        policy, engine = (copy.deepcopy(each).double() for each in (self.trainer.policy, self.model))
        difference = log_probabilities(policy, tokens) - log_probabilities(engine, tokens)
        self.exact.append(difference.abs().mean().item())


def settings_of(release: Any, changed: dict[str, object]) -> Any:
    """verl's own defaults, and what is changed."""
    config = OmegaConf.load(Path(release.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    settings: dict[str, object] = {
        "trainer.logger": ["console"],
        "trainer.total_epochs": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.balance_batch": False,
        "trainer.resume_mode": "disable",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.model.path": "none",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    }
    for name, value in {**settings, **changed}.items():
        OmegaConf.update(config, name, value)
    return config


def set_up(trainer: Any, config: Any, merge: bool = True) -> Any:
    """What both trainers are given, in place of workers; LoRA is merged, or its adapter is sent by itself."""
    torch.manual_seed(0)
    trainer.config = config
    trainer.temperature = config.actor_rollout_ref.rollout.temperature
    trainer.prompts = torch.randint(32, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1))
    trainer.merge, case = merge, merged_lora_ranks.Case(merge=merge)
    trainer.policy = merged_lora_ranks.make_model(case)
    trainer.engine = Engine(trainer)
    with torch.no_grad():  # sure of some tokens, as policies are
        for model in (trainer.policy, trainer.engine.model):
            model.get_output_embeddings().weight.mul_(50)
    trainer.worker = merged_lora_ranks.make_engine(case, copy.deepcopy(trainer.policy))
    trainer.checkpoint_manager = trainer.async_rollout_manager = trainer.engine
    trainer.total_training_steps, trainer.global_steps = STEPS, 0
    return trainer


def older(changed: dict[str, object]) -> Any:
    """`RayPPOTrainer` whose workers' calls are answered here."""
    import verl

    module = importlib.import_module("verl.trainer.ppo.ray_trainer")
    protocol = importlib.import_module("verl.protocol")

    class Trainer(module.RayPPOTrainer):  # type: ignore[name-defined]
        def _compute_old_log_prob(self, batch: Any) -> Any:
            found = log_probabilities(self.worker.module, batch.batch["input_ids"], self.temperature)
            made = {"old_log_probs": found, "entropys": torch.zeros_like(found)}
            return protocol.DataProto.from_dict(tensors=made), 0.0

        def _update_actor(self, batch: Any) -> Any:
            return protocol.DataProto(meta_info={"metrics": {}})

        def _start_profiling(self, *_: object) -> None: ...

        def _stop_profiling(self, *_: object) -> None: ...

    merge = changed.get("actor_rollout_ref.model.lora.merge", True)
    trainer = set_up(object.__new__(Trainer), settings_of(verl, changed), merge=bool(merge))
    trainer.train_dataloader = [
        {"dummy": trainer.prompts, "raw": numpy.array([""] * PROMPTS, dtype=object)} for _ in range(STEPS)
    ]
    trainer.train_dataset = trainer.actor_rollout_wg = types.SimpleNamespace()
    trainer.use_critic = trainer.use_rm = trainer.use_reference_policy = False
    trainer.resource_pool_manager = types.SimpleNamespace(get_n_gpus=lambda: 1)
    trainer._dump_executor, trainer._dump_futures = ThreadPoolExecutor(1), []
    return trainer


def newer(kind: str, lost: bool) -> Any:
    """A trainer of ``v1``, of whose steps what `_compute_old_log_prob` does to the metrics."""
    import verl

    base = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    base.tq.kv_clear = lambda **_: None
    debug = importlib.import_module("verl.utils.debug.metrics")
    modes = {"PPOTrainerSync": "sync", "PPOTrainerColocateAsync": "colocate_async"}
    module = importlib.import_module(f"verl.trainer.ppo.v1.trainer_{modes[kind]}")

    class Trainer(getattr(module, kind)):  # type: ignore[misc]
        def step(self, metrics: dict[str, Any], timing_raw: Any) -> Any:
            batch = self.engine.generate_sequences(None)
            policy = self.engine.model if not lost else self.policy
            batch.batch["old_log_probs"] = log_probabilities(policy, batch.batch["input_ids"])
            metrics.update(debug.calculate_debug_metrics(batch))
            return types.SimpleNamespace(keys=[], partition_id="train")

        def _nothing(self, *_: object, **__: object) -> Any:
            return {}

        on_step_begin = on_step_end = on_train_begin = on_train_end = _compute_metrics = _consume_sync_metrics = (
            _nothing
        )
        _start_profiling = _stop_profiling = _reissue_inflight_prompts = _shutdown_dump_executor = _nothing

    trainer = set_up(object.__new__(Trainer), settings_of(verl, {"trainer.v1.trainer_mode": modes[kind]}))
    trainer.trainer_mode, trainer.steps_per_epoch = modes[kind], STEPS
    return trainer


def observe(trainer: Any, patches: tuple[str, ...], *arguments: object) -> dict[str, Any]:
    return watched.observe(NAME, _watched_rollouts.FIGURES, lambda: fitted(trainer, *arguments), patches)


def fitted(trainer: Any, *arguments: object) -> dict[str, Any]:
    logged: list[dict[str, Any]] = []
    console = importlib.import_module("verl.utils.logger").LocalLogger
    keep = console.log
    console.log = lambda self, data, step: logged.append(dict(data))
    try:
        trainer.fit(*arguments)
    finally:
        console.log = keep
    metrics = [{name: value for name, value in each.items() if name in NAMED} for each in logged]
    return {"metrics": metrics, "exact": trainer.engine.exact}


NAMED = (
    *("training/rollout_probs_diff_mean", "rollout_corr/kl", "rollout_corr/log_ppl_abs_diff"),
    *("critic/score/mean", "training/global_step"),
)


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.cpu.empty_cache = lambda: None  # CUDA's, when adapters are collected
    import verl

    parser = states.parser()
    parser.add_argument("cases", nargs="*", help="of the older release; all, if none is named")
    options = parser.parse_args()
    if verl.__version__.startswith("0.8"):
        chosen = {case: OLDER[case] for case in options.cases or OLDER}
        found = {case: observe(older(changed), patches) for case, (changed, patches) in chosen.items()}
    else:
        found = {case: observe(newer(*of), (NAME,), None) for case, of in NEWER.items()}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
