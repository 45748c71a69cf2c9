"""ms-swift's GRPO while it is watched, with engines of which something is wrong, and right ones.

``--out FOLDER [CASE ...]`` on one rank.

Real are the trainer's updates of the engine's weights, its ``training_step`` and ``log`` with all that they call, its
``_infer_single_or_multi_turn``, and the rollout server with its workers. Ours are the engines, which keep what they are
sent and sample one token after the other, and the trainer's set-up. The yardstick is the mean |trainer - engine| of the
two models in float64.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import json
import os
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.swift import _watched_rollouts
from rlhf_patches.patches.swift.proofs import grpo_loss_scale_ranks as training
from rlhf_patches.patches.swift.proofs import lora_counted_twice_ranks as updates
from rlhf_patches.patches.swift.proofs import rollout_worker_seed_ranks as workers
from rlhf_patches.proving import states
from tests.harness import watched
from tests.patches.swift.watch_rollouts_cases import GROUPS, NEWEST, RESUMED

NAME = "swift-watch-rollouts"
UPDATES, MICRO_BATCHES = 2, 4


class Server(updates.Sampler):
    """Loses what it is sent, as one whose worker raises: its log says so, and nobody else."""

    lost = False

    def get_model_state_keys(self) -> list[str]:
        return []  # a name is a name here

    def process_weights_after_loading(self) -> None:
        """Nothing is to be done."""

    reset_encoder_cache = reset_mm_cache = process_weights_after_loading

    def load_adapter(self, tensors: dict[str, torch.Tensor]) -> None:
        if not (self.lost and self.adapters):
            super().load_adapter(tensors)


def rollout_settings(**changed: Any) -> dict[str, Any]:
    """Arguments of ms-swift, as a user sets them who samples from all of the vocabulary."""
    return {
        "temperature": 0.9,
        **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_words": []},
        **{"use_vllm": True, "vllm_mode": "server", "vllm_gpu_memory_utilization": 0.9},
        **{"vllm_tensor_parallel_size": 1, "max_completion_length": workers.TOKENS, "async_generate": False},
        **changed,
    }


def make_trainer(model: Any, changed: dict[str, Any]) -> Any:
    trainer = training.make_trainer(model, "dapo", None)
    changed = dict(changed)
    ours = {name: changed.pop(name) for name in list(changed) if name in rollout_settings()}
    vars(trainer.args).update(rollout_settings(**ours))
    trainer._prepare_rollout_params()
    trainer.multi_turn_scheduler = trainer._cached_vllm_param_names = None
    trainer.enable_server_multi_turn = False
    trainer.log_rollout_offpolicy_metrics, trainer.rollout_importance_sampling_threshold = True, 2.0
    trainer.log_completions, trainer._logs = False, {"prompt": []}
    trainer.custom_metrics = defaultdict(lambda: defaultdict(list))
    trainer.state = SimpleNamespace(global_step=0, epoch=None, log_history=[])
    trainer.control, trainer.callback_handler = None, SimpleNamespace(on_log=lambda *_: None)
    trainer.args.include_num_input_tokens_seen = "no"
    vars(trainer).update(changed)
    return trainer


# -- log-probabilities -------------------------------------------------------------------------------------------------


def resumed(lost: bool = False, evaluated: bool = False, **changed: Any) -> dict[str, Any]:
    """Two updates of an engine, rollouts of each, a step on them, and what is logged."""
    mixin = updates.make_trainer("server", new=False, lora=True, level=0, batches=None, resumed=True)
    policy = mixin.model
    with torch.no_grad():  # sure of some tokens, as policies are
        policy.get_output_embeddings().weight.mul_(50)
    trainer = make_trainer(policy, changed)
    of_updates = {name: value for name, value in vars(mixin).items() if name not in ("accelerator", "args", "model")}
    vars(trainer).update(of_updates)
    vars(trainer.args).update({**vars(mixin.args), "async_generate": False})
    trainer.engine = trainer.vllm_client = engine = Server()
    engine.lost = lost
    found: dict[str, Any] = {"logged": [], "exact": [], "trained": []}
    for step in range(UPDATES):
        with torch.no_grad():
            trainer._move_model_to_vllm()
        model = model_of(engine, policy)
        tokens = rollouts(model, trainer.temperature, step)
        known = log_probabilities(model, tokens, trainer.temperature)
        (policy.eval if evaluated else policy.train)()
        for batch in torch.arange(len(tokens)).split(training.ROWS):
            run = trainer.compute_loss if evaluated else trainer.training_step
            run(policy, inputs_of(tokens[batch], known[batch]))
        found["exact"].append(off(model, policy, tokens, trainer.temperature))
        trainer.state.global_step = step + 1
        logs: dict[str, Any] = {}
        trainer.log(logs)
        found["logged"].append({name: value for name, value in logs.items() if name != "step"})
        gradients = [each.grad for each in policy.parameters() if each.grad is not None]
        found["trained"].append([gradient.double().sum().item() for gradient in gradients])
        policy.zero_grad()
        updates.learn(policy)
    return found


def model_of(engine: updates.Sampler, policy: Any) -> Any:
    """The model that the engine samples from."""
    model = copy.deepcopy(policy).unload()
    state = dict(engine.weights)
    for name in (each.removesuffix(".lora_A.weight") for each in engine.adapter if each.endswith(".lora_A.weight")):
        state[f"{name}.weight"] = engine.samples_with(name)
    kept = model.load_state_dict(state, strict=False)
    assert not kept.unexpected_keys
    return model.eval()


def rollouts(model: Any, temperature: float, seed: int) -> torch.Tensor:
    """Prompts with completions, of all micro-batches."""
    random = torch.Generator().manual_seed(seed)
    shape = (MICRO_BATCHES * training.ROWS, training.PROMPT)
    tokens = torch.randint(model.config.vocab_size, shape, generator=random)
    for _ in range(training.COMPLETION):
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[:, -1] / temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=random)], 1)
    return tokens


def log_probabilities(model: Any, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, training.PROMPT - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(2, tokens[:, training.PROMPT :, None])[:, :, 0]


def off(model: Any, policy: Any, tokens: torch.Tensor, temperature: float) -> float:
    """The mean |trainer - engine| in float64."""
    trainer, engine = (copy.deepcopy(each).double().eval() for each in (policy, model))
    difference = log_probabilities(trainer, tokens, temperature) - log_probabilities(engine, tokens, temperature)
    return difference.abs().mean().item()


def inputs_of(tokens: torch.Tensor, known: torch.Tensor) -> dict[str, Any]:
    """A micro-batch in which the trainer has yet to compute its own log-probabilities."""
    mask = torch.ones_like(known, dtype=torch.bool)
    batch = {"tokens": tokens, "mask": mask, "old": known, "advantages": torch.tensor([[1.0], [-0.7]])}
    inputs = training.inputs_of(batch, MICRO_BATCHES * mask.numel())
    mine = {"old_per_token_logps": None, "rollout_per_token_logps": known}
    if "grpo_batch" in inputs:
        vars(inputs["grpo_batch"]).update(mine)
    else:
        inputs.update(mine)
    return inputs


# -- completions -------------------------------------------------------------------------------------------------------


class Engine(workers.Engine):
    """Returns what ms-swift's does."""

    certain = False

    def infer(self, infer_requests: list[Any], request_config: Any, use_tqdm: Any = None) -> list[Any]:
        if self.certain:
            self.weights = torch.eye(workers.VOCABULARY)[3]
        known = (self.weights / self.weights.sum()).log().tolist()
        rows = super().infer(infer_requests, request_config)
        return [output_of(row, [known[token] for token in row]) for row in rows]


def output_of(tokens: list[int], known: list[float]) -> Any:
    protocol = importlib.import_module(f"{'swift.llm.infer' if is_old() else 'swift.infer_engine'}.protocol")
    message = protocol.ChatMessage("assistant", " ".join(map(str, tokens)))
    pairs = zip(tokens, known, strict=True)
    logprobs = {"content": [{"token": str(token), "logprob": value} for token, value in pairs]}
    choice = protocol.ChatCompletionResponseChoice(0, message, "length", logprobs, token_ids=tokens)
    usage = protocol.UsageInfo(1, len(tokens), 1 + len(tokens))
    response = protocol.ChatCompletionResponse("a model", [choice], usage, prompt_token_ids=[1, 2])
    return protocol.RolloutOutput(response=response)


def group(certain: bool = False, **changed: Any) -> dict[str, Any]:
    """A group of a server with as many workers as samples, sent through the trainer."""
    Engine.certain = certain
    with workers.serving(workers.SAMPLES) as server:
        return grouped(lambda *asked: asyncio.run(server.infer(*asked)), changed)


def grouped(engines: Callable[[list[Any], Any], list[Any]], changed: dict[str, Any]) -> dict[str, Any]:
    trainer = make_trainer(training.make_model(), changed)
    trainer.template.template_meta = SimpleNamespace(default_system=None)
    trainer.vllm_client = SimpleNamespace(
        infer=lambda requests, config, **_: engines(requests, SimpleNamespace(**config))
    )
    prompt = [{"role": "user", "content": "a prompt"}]
    rows = [{"messages": list(prompt), "request_id": str(row), "prompt_id": "0"} for row in range(workers.SAMPLES)]
    if not is_old():
        rows = trainer.to_samples(rows)
    made = trainer._infer_single_or_multi_turn(rows, trainer.request_config)
    return {"samples": [(row if isinstance(row, dict) else vars(row))["response_token_ids"] for row in made]}


def with_seeds(seeds: list[int]) -> dict[str, Any]:
    """The same of engines with these seeds: the newest release's server gives each its own."""
    engines = [object.__new__(Engine) for _ in seeds]
    for engine, seed in zip(engines, seeds, strict=True):
        engine.generator = torch.Generator().manual_seed(seed)
        engine.weights = torch.rand(workers.VOCABULARY, generator=torch.Generator().manual_seed(1))

    def infer(requests: list[Any], config: Any) -> list[Any]:
        return [engine.infer([each], config)[0] for engine, each in zip(engines, requests, strict=True)]

    return grouped(infer, {})


# -- cases -------------------------------------------------------------------------------------------------------------


def is_old() -> bool:
    return "rlhf_trainers" not in training.family().trainer_class.__module__


def observe(run: Callable[[], dict[str, Any]], patches: tuple[str, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    return watched.observe(NAME, _watched_rollouts.FIGURES, run, patches)


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", help="of a release with cases by name; all, if none is named")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {}
    for case, (patches, changed) in (RESUMED if is_old() else NEWEST).items():
        if case in (options.cases or [case]):
            found[case] = observe(functools.partial(resumed, **changed), patches)
    if is_old():
        workers.Engine.of, workers.server().GRPOVllmEngine = workers.server().GRPOVllmEngine, Engine
        for case, (patches, changed) in GROUPS.items():
            if case in (options.cases or [case]):
                found[case] = observe(functools.partial(group, **changed), patches)
    else:
        found["one seed"] = observe(lambda: with_seeds([0] * workers.SAMPLES), (NAME,))
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
