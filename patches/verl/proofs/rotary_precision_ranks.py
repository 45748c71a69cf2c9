"""Models of verl's FSDP engine, as it loads and casts them: ``--out FOLDER [CASE ...]``, on one rank.

Real are the release's function that builds a model, and a Llama on disk.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from rlhf_patches.patches import _rotary_model
from rlhf_patches.proving import states

NAME = "verl-rotary-precision"
CASES: dict[str, dict[str, Any]] = {
    "reference": {"dtype": "bf16", "forward_only": True},
    "actor": {"dtype": "bf16"},
    "critic": {"dtype": "bf16", "model_type": "value_model"},
    "by default": {"dtype": "fp32"},
    "own code": {"dtype": "bf16", "remote": True},
}


@functools.cache
def folder() -> str:
    made = states.folder()
    _rotary_model.model().save_pretrained(made)
    return made


def built(case: dict[str, Any]) -> torch.nn.Module:
    """By the engine's own function."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    implementation = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    engine = object.__new__(implementation.FSDPEngineWithLMHead)
    config = AutoConfig.from_pretrained(folder())
    engine.engine_config = SimpleNamespace(
        model_dtype=case["dtype"], forward_only=case.get("forward_only", False), use_torch_compile=False
    )
    engine.model_config = SimpleNamespace(
        hf_config=config,
        local_path=folder(),
        trust_remote_code=False,
        model_type=case.get("model_type", "language_model"),
        use_liger=False,
        use_fused_kernels=False,
        fused_kernel_options=None,
        enable_gradient_checkpointing=False,
        override_config={},
    )
    engine.device_mesh = None
    engine.use_remove_padding, engine.ulysses_sequence_parallel_size = False, 1
    loaded: Any = AutoModelForTokenClassification.from_pretrained
    # verl asks for FlashAttention, which is for CUDA.
    without = lambda *given, attn_implementation, **more: loaded(*given, **more)  # noqa: E731
    with mock.patch.object(AutoModelForTokenClassification, "from_pretrained", without):
        built: torch.nn.Module = engine._build_module()
    return built


def outcome(case: dict[str, Any], exact: _rotary_model.Exact) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    with states.heard() as messages, contextlib.ExitStack() as until:
        if case.get("remote"):
            own = _rotary_model.model(remote=True)
            until.enter_context(mock.patch.object(AutoModelForCausalLM, "from_pretrained", return_value=own))
        model = built(case)
    messages = [each for each in messages if NAME in each and "not transformers'" in each]
    found: dict[str, Any] = {"buffers": _rotary_model.kinds(model), "messages": messages}
    if case.get("model_type") is None:
        weight = model.get_parameter("model.embed_tokens.weight")

        def gradient(loss: torch.Tensor) -> torch.Tensor:
            (of_weight,) = torch.autograd.grad(loss, [weight])
            return of_weight

        found |= exact.compared(model, gradient)
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    exact = _rotary_model.Exact()
    states.report(NAME, lambda: {case: outcome(CASES[case], exact) for case in options.cases}, options.out)
