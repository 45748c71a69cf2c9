"""Real vLLM with adapters of a trainer's, watched and not: ``--out FOLDER --swift FOLDER`` on one rank.

They come as ms-swift hands them over, by its own class and its own way of loading, from FOLDER.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest

from rlhf_patches.patches.vllm import _watched_requests
from rlhf_patches.proving import states
from tests.harness import vllm_on_cpu, watched
from tests.patches.vllm.watch_requests_cases import CASES, Case

NAME = "vllm-watch-requests"
PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14])
NUMBER = 111


def swift(folder: Path) -> SimpleNamespace:
    """ms-swift's `TensorLoRARequest` and `patch_vllm_load_adapter`: these definitions alone, of a module of thousands.

    To import it takes ten seconds, and packages that are not here.
    """
    text = (folder / "swift" / "rlhf_trainers" / "utils.py").read_text()
    wanted: list[ast.stmt] = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        and node.name in ("TensorLoRARequest", "patch_vllm_load_adapter")
    ]
    names: dict[str, Any] = {"__name__": "swift.rlhf_trainers.utils", "LoRARequest": LoRARequest, "torch": torch}
    exec("from msgspec import field\nfrom typing import Dict, Optional", names)
    exec(compile(ast.Module(wanted, []), "swift/rlhf_trainers/utils.py", "exec"), names)
    return SimpleNamespace(**names)


def adapter(checkpoint: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """PEFT's configuration and tensors of an adapter with which other tokens are sampled; in a folder as well."""
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder)
    return json.loads((folder / "adapter_config.json").read_text()), get_peft_model_state_dict(model)


class Trainer:
    """Sends an adapter to the engine, and asks it for rollouts."""

    def __init__(self, folder: Path, of_swift: SimpleNamespace) -> None:
        checkpoint = vllm_on_cpu.checkpoint(folder / "model")
        self.folder = folder / "adapter"
        self.config, self.tensors = adapter(checkpoint, self.folder)
        of_swift.patch_vllm_load_adapter()
        self.request = of_swift.TensorLoRARequest
        self.engine = vllm.LLM(
            model=checkpoint,
            max_model_len=32,
            enforce_eager=True,
            dtype="float32",
            enable_lora=True,
            max_lora_rank=8,
            max_loras=1,
            enable_prefix_caching=False,
        )

    def send(self, how: str) -> None:
        """As `_move_adapter_to_vllm` and `update_adapter_flattened_param` do."""
        own: dict[str, Any] = {"lora_name": "swift_lora", "lora_int_id": NUMBER, "load_inplace": True}
        if how == "folder":
            self.engine.llm_engine.add_lora(LoRARequest(**own, lora_path=str(self.folder)))
            return
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        request = self.request(**own, lora_path="dummy", peft_config=self.config, lora_tensors=tensors)
        if how == "colocate":
            self.engine.llm_engine.add_lora(request)
        else:
            self.engine.collective_rpc(lambda worker: worker.add_lora(request))

    def rollouts(self, asks: int) -> list[Any]:
        """Of each prompt the tokens and their log-probabilities."""
        named = LoRARequest(lora_name="swift_lora", lora_int_id=NUMBER, lora_path="dummy")
        outputs = self.engine.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            vllm.SamplingParams(max_tokens=3, logprobs=0, seed=1),
            lora_request=[named] * asks + [None] * (len(PROMPTS) - asks),
            use_tqdm=False,
        )
        return [
            [[token, each[token].logprob] for token, each in zip(one.token_ids, one.logprobs, strict=True)]
            for output in outputs
            for one in output.outputs
        ]

    def run(self, case: Case) -> dict[str, Any]:
        rounds = []
        for asks in case.asks:
            for _ in range(case.adapters):
                self.send(case.sent)
            if case.idle:
                self.engine.collective_rpc("execute_dummy_batch")
            else:
                rounds.append(self.rollouts(asks))
        self.engine.llm_engine.remove_lora(NUMBER)
        return {"rounds": rounds}


def observe(case: Case, trainer: Trainer) -> dict[str, Any]:
    _watched_requests.ENGINES.clear()
    patches = None if case.watched else ()
    return watched.observe(NAME, _watched_requests.FIGURES, lambda: trainer.run(case), patches, case.limits)


def main() -> None:
    parser = states.parser()
    parser.add_argument("--swift", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainers: list[Trainer] = []

    def start() -> dict[str, Any]:
        trainers.append(Trainer(options.out, swift(options.swift)))
        return {"base": trainers[0].rollouts(0)}

    found = {"start": watched.observe(NAME, _watched_requests.FIGURES, start)}
    found |= {name: observe(case, trainers[0]) for name, case in CASES.items()}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
