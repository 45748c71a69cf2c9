"""The same of verl's workers before 0.8: ``--out FOLDER``, on one rank.

`_build_model_optimizer` and `_build_critic_model_optimizer` are real, up to where they print the size of the model.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from rlhf_patches.patches import _rotary_model
from rlhf_patches.patches.verl.proofs import rotary_precision_ranks as engines
from rlhf_patches.proving import states

CASES = {
    "reference": ("ref", None),
    "actor": ("actor", "bf16"),
    "critic": ("critic", "bf16"),
    "by default": ("actor", None),
}
TOKENIZER = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)


class Built(Exception):
    """Carries the model out of the function."""


def stop(model: Any, *_: Any, **__: Any) -> None:
    raise Built(model)


def without_flash(owner: Any) -> Any:
    """FlashAttention is for CUDA."""
    loaded = owner.from_pretrained
    return mock.patch.object(
        owner, "from_pretrained", lambda *given, **more: loaded(*given, **{**more, "attn_implementation": "sdpa"})
    )


def built(role: str, dtype: str | None) -> torch.nn.Module:
    from omegaconf import OmegaConf

    workers = importlib.import_module("verl.workers.fsdp_workers")
    models = importlib.import_module("verl.utils.model")
    worker = object.__new__(workers.CriticWorker if role == "critic" else workers.ActorRolloutRefWorker)
    fsdp = OmegaConf.create({} if dtype is None else {"model_dtype": dtype})
    config = OmegaConf.create({"model": {"path": engines.folder(), "tokenizer_path": engines.folder()}, "actor": {}})
    config.model.fsdp_config = fsdp
    vars(worker).update(
        {
            "config": config,
            "device_mesh": None,
            "_is_actor": role == "actor",
            "_is_lora": False,
            "_qat_enabled": False,
            "_rank": 0,
        },
        ulysses_sequence_parallel_size=1,
    )
    with (
        without_flash(AutoConfig),
        without_flash(AutoModelForCausalLM),
        without_flash(AutoModelForTokenClassification),
        mock.patch.object(workers, "hf_tokenizer", return_value=TOKENIZER),
        mock.patch.object(workers, "log_gpu_memory_usage", return_value=None),
        mock.patch.object(workers, "hf_processor", return_value=None),
        mock.patch.object(models, "print_model_size", stop),
        mock.patch.object(models, "get_generation_config", return_value=None),
    ):
        try:
            if role == "critic":
                worker._build_critic_model_optimizer(config)
            else:
                worker._build_model_optimizer(engines.folder(), fsdp, None, {}, role=role)
        except Built as done:
            model: torch.nn.Module = done.args[0]
            return model
    raise AssertionError("it did not print the size of the model")


def outcome(role: str, dtype: str | None, exact: _rotary_model.Exact) -> dict[str, Any]:
    model = built(role, dtype)
    found: dict[str, Any] = {"buffers": _rotary_model.kinds(model)}
    if role != "critic":
        weight = model.get_parameter("model.embed_tokens.weight")
        found |= exact.compared(model, lambda loss: torch.autograd.grad(loss, [weight])[0])
    return found


def main() -> None:
    options = states.parser().parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    exact = _rotary_model.Exact()
    states.report(engines.NAME, lambda: {name: outcome(*case, exact) for name, case in CASES.items()}, options.out)
