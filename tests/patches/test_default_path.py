"""A proof that calls the patched function itself says who calls it by default: its inputs are to be that caller's.

Of what runs the framework's own trainer, or its engine, nothing is to be said.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.patch import Patch
from rlhf_patches.guards import locating, sources
from rlhf_patches.guards.places import NotFound
from rlhf_patches.patches.catalogue import LISTED

ROOT = Path(__file__).parents[2]
CALLERS = {
    "accelerate-fsdp1-rotary-precision": "accelerate.state:AcceleratorState.__init__",
    "accelerate-resume-order": "transformers.trainer:Trainer",
    "deepspeed-topk-drops": "deepspeed.moe.sharded_moe:TopKGate.forward",
    "openrlhf-k3-gradient": "because it takes log-probabilities, and any may come",
    "openrlhf-own-sampling": "openrlhf.trainer.ray.vllm_engine:RolloutRayActor.generate_responses",
    "peft-disable-adapter-restore": "because users and trainers enter the context alike, and it takes nothing",
    "peft-lora-merge-drift": "because users and trainers merge alike: all adapters that are there",
    "peft-save-adapter-prefix": "peft.peft_model:PeftModel.save_pretrained",
    "skyrl-advantage-padding": "skyrl.train.trainer:RayPPOTrainer._execute_training_step",
    "skyrl-loss-outputs-once": "because the Tinker API's backend and SFT's trainer call it alike, with a batch",
    "skyrl-step-wise-advantages": "skyrl.train.trainer:RayPPOTrainer.train",
    "swift-null-ref-context-hf": "swift.rlhf_trainers.grpo_trainer:GRPOTrainer",
    "transformers-moe-aux-loss": "transformers.trainer:Trainer.training_step",
    "transformers-router-loss-reentrant": "because users and trainers enable checkpointing alike, with its arguments",
    "trl-chunked-nll-zero3": "because the forward that SFTTrainer gives the model calls it so, with the head's weight",
    "trl-distillation-scale": "because subclasses call it by super(), and compute_loss comes once outside train()",
    "trl-dpo-second-eos": "because only a subclass's own function calls it; DPOTrainer maps it over the data set",
    "trl-metrics-deadlock": "trl.trainer.grpo_trainer:GRPOTrainer._prepare_inputs",
    "trl-online-dpo-accumulation": "because only a subclass calls it by super(); Trainer's own loop calls the step",
    "trl-vllm-nan-logprob": "trl.trainer.grpo_trainer:GRPOTrainer._prepare_inputs",
    "verl-critic-loss-scale": "because its own calls are without an engine, which calls the loss that it is given",
    "verl-dr-grpo-length-bias": "because the controller has each worker initialize its model, without arguments",
    "verl-gmpo-micro-batches": "because its own calls are the old workers'; the engine calls what ppo_loss looks up",
    "verl-lora-buckets": "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights",
    "verl-merged-lora": "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights",
    "verl-replica-seed": "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica.launch_servers",
    "verl-resume-epoch": "verl.trainer.sft_trainer:run_sft",
    "verl-rollout-seed": "verl.workers.rollout.llm_server:LLMServerClient.generate",
    "verl-rotary-precision": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_model_optimizer",
    "verl-tool-separator": "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    "verl-trl-value-head": "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module",
}
"""By patch, the function of the release that hands over what the proof does, or why it does not matter who does."""

ANY = {"__init__", "forward", "step", "train"}
"""Names by which much is called that is not patched."""


def called_itself():
    """By patch, the functions that it changes and that its proof's worker calls."""
    paths = {listed.name: listed.path for listed in LISTED}
    bugs = [path.partition(":")[0].removeprefix("rlhf_patches.patches.") for path in paths.values()]
    found = {}
    for patch in (item.patch for item in registry.load()[0]):
        if not isinstance(patch, Patch) or patch.name not in paths:
            continue
        framework, bug = paths[patch.name].partition(":")[0].rsplit(".", 2)[1:]
        targets = {re.split(r"[.:]", change.target)[-1] for variant in patch.variants for change in variant.changes}
        longer = tuple(f"{other}_ranks" for other in bugs if other.startswith(f"{framework}.{bug}_"))
        for file in (ROOT / "patches" / framework / "proofs").glob(f"{bug}*_ranks.py"):
            if f"{framework}.{file.stem}" in longer:  # another patch's
                continue
            calls = {
                each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
                for each in ast.walk(ast.parse(file.read_text()))
                if isinstance(each, ast.Call)
            }
            if names := calls & targets - ANY:
                found.setdefault(patch.name, set()).update(names)
    return found


def test_each_such_proof_names_the_default_caller():
    assert called_itself().keys() == CALLERS.keys()


@pytest.mark.parametrize("name", [name for name, caller in CALLERS.items() if not caller.startswith("because ")])
def test_the_caller_calls_it_in_the_release_that_is_installed(name):
    module, _, qualname = CALLERS[name].partition(":")
    try:
        source = locating.read_module(module)
    except NotFound:
        pytest.skip(f"{module} is not installed here")
    node = sources.parse(source)
    for part in qualname.split("."):
        node = next(each for each in ast.walk(node) if getattr(each, "name", None) == part)
    text = ast.unparse(node)
    assert any(re.search(rf"\b{called}\b", text) for called in called_itself()[name]), text
