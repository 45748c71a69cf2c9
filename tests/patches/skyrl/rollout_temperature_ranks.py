"""What SkyRL's own functions ask of vLLM, and the ratios that its own correction makes of the answers.

``--out FOLDER`` on one rank, with the folder of a SkyRL release on sys.path. vLLM is not there: of it only the argument
parser is asked, with its default (0.20.2: ``raw_logprobs``), and what its sampler would return is computed here, in
float64: log softmax of the logits, or of the logits over the temperature where it is asked for processed ones.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import skyrl_on_cpu

NAME = "skyrl-rollout-temperature"
SERVERS, *ENGINES = skyrl_on_cpu.INFERENCE
NEW_ENOUGH, TOO_OLD = "0.16.0", "0.10.1.1"
VOCABULARY, TOKENS = 50, 64

CASES: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3, "additional_kwargs": {"include_stop_str_in_output": True}},
    "of training": {"temperature": 1.0, "training": 0.7},
    "not set for training": {"temperature": 0.7, "training": None},
    # As released.
    "temperature 1": {"temperature": 1.0},
    "temperature 0": {"temperature": 0.0},
    "training at 1": {"temperature": 0.7, "training": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_k": 20},
    "min_p": {"temperature": 0.7, "min_p": 0.1},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.1},
    "more of vLLM's": {"temperature": 0.7, "additional_kwargs": {"presence_penalty": 0.5}},
    "the user's own": {"temperature": 0.7, "own": {"logprobs_mode": "raw_logprobs", "max_model_len": 7}},
}


class _Engine:
    """vLLM's ``AsyncEngineArgs`` and ``FrontendArgs``, of which the first has the option."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--logprobs-mode", default="raw_logprobs")
        return parser


def install_vllm() -> None:
    frontend = SimpleNamespace(add_cli_args=lambda parser: parser)
    names: dict[str, dict[str, Any]] = {
        "vllm": {"AsyncEngineArgs": _Engine},
        "vllm.config": {"WeightTransferConfig": SimpleNamespace},
        "vllm.entrypoints": {},
        "vllm.entrypoints.openai": {},
        "vllm.entrypoints.openai.cli_args": {"FrontendArgs": frontend},
        "vllm.entrypoints.launchers": {},
        "vllm.entrypoints.launchers.cli_args": {"FrontendArgs": frontend},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cuda")},
        "vllm.utils": {},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    }
    for name, content in names.items():
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)


class Config(SimpleNamespace):
    """Every setting that is not given is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def config(temperature: float, own: dict[str, Any] | None = None, **settings: Any) -> Config:
    training = settings.pop("training", temperature)
    sampling = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, **settings}
    engine = Config(backend="vllm", engine_init_kwargs=own or {}, expert_parallel_size=1)
    model = Config(path="model", lora=Config(rank=0))
    trainer = Config(
        algorithm=Config(temperature=training), policy=Config(model=model), placement=Config(), strategy="fsdp2", seed=3
    )
    sampled = SimpleNamespace(temperature=temperature, **sampling)
    return Config(trainer=trainer, generator=Config(inference_engine=engine, sampling_params=sampled))


def of_servers(settings: dict[str, Any]) -> Any:
    module: Any = importlib.import_module(SERVERS)
    made = {name: lambda *args: "nccl" for name in ("get_transfer_strategy", "get_vllm_receive_backend")}
    vars(module).update(made, get_config_as_dict=dict, register_receive_engines=lambda: None)
    return module.build_vllm_cli_args(config(**settings)).logprobs_mode


def of_engines(name: str, settings: dict[str, Any], vllm: str = NEW_ENOUGH) -> dict[str, Any] | None:
    """``engine_init_kwargs`` that arrive; None where the release has no such function."""
    module: Any = importlib.import_module(name)
    if not hasattr(module, "create_ray_wrapped_inference_engines_from_config"):
        return None
    arrived: dict[str, Any] = {}
    wrapped: Any = importlib.import_module("skyrl.backends.skyrl_train.inference_engines.ray_wrapped_inference_engine")
    wrapped.create_ray_wrapped_inference_engines = lambda **kwargs: arrived.update(kwargs)
    module.create_ray_wrapped_inference_engines = wrapped.create_ray_wrapped_inference_engines
    cfg = config(**settings)
    importlib.metadata.version = lambda distribution_name: (
        {"vllm": vllm}.get(distribution_name) or VERSION(distribution_name)
    )
    try:
        module.create_ray_wrapped_inference_engines_from_config(cfg, None, None)
    finally:
        importlib.metadata.version = VERSION
    theirs = cfg.generator.inference_engine.engine_init_kwargs
    assert theirs == settings.get("own", {})
    return {"kwargs": arrived["engine_init_kwargs"], "the same": arrived["engine_init_kwargs"] is theirs}


VERSION = importlib.metadata.version


def ratio(mode: str, temperature: float) -> float:
    """How far the token ratios of SkyRL's correction are from 1, where the weights are the same."""
    correction: Any = importlib.import_module("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
    torch.manual_seed(5)
    logits = 3 * torch.randn(1, TOKENS, VOCABULARY, dtype=torch.float64)
    trained = (logits / temperature).log_softmax(-1)
    tokens = torch.multinomial(trained[0].exp(), 1)[None]
    sampled = trained if mode == "processed_logprobs" else logits.log_softmax(-1)
    pair = [found.gather(-1, tokens).squeeze(-1) for found in (trained, sampled)]
    settings = SimpleNamespace(token_tis_ratio_clip_high=1e9)
    found, *_ = correction.compute_tis_ratio(*pair, torch.ones(1, TOKENS), "token", settings)
    return float((found - 1).abs().max())


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, settings in CASES.items():
        found[case] = {"servers": of_servers(settings), **{name: of_engines(name, settings) for name in ENGINES}}
    first = CASES["temperature 0.7"]
    found["old vLLM"] = {name: of_engines(name, first, TOO_OLD) for name in ENGINES}
    found["ratio"] = ratio(found["temperature 0.7"]["servers"], 0.7)
    return found


def main() -> None:
    install_vllm()
    states.report(NAME, observe, states.parser().parse_args().out)
