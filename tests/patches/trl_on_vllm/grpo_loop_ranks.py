"""TRL's GRPO on real vLLM, in the trainer's process or on TRL's own server: ``--out FOLDER --case CASE``.

All patches are applied. Of every rollout: how far the engine's log-probability of each sampled token is from that of
the policy's weights at that moment, in float64; and from that of the weights that the engine was started with.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small, tool_loop
from rlhf_patches.proving import states
from tests.harness import trl_server, vllm_on_cpu
from tests.patches.trl_on_vllm.grpo_loop_cases import CASES, STEPS
from tests.patches.trl_on_vllm.tool_loop_ranks import LIKELY


class Observed(GRPOTrainer):
    """Looks at every rollout right after it was made."""

    start: Any
    differences: list[float]
    from_start: list[float]
    calls: list[int]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        policy = copy.deepcopy(self.accelerator.unwrap_model(self.model)).double().eval()
        self.differences.append(self._difference(made, policy))
        self.from_start.append(self._difference(made, self.start))
        self.calls.append(int((made["completion_ids"] == tool_loop.CALL).sum()))
        return made

    def _difference(self, made: Any, policy: Any) -> float:
        tokens = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
        mask = torch.cat([made["prompt_mask"], made["completion_mask"]], dim=1)
        with torch.no_grad():
            logits = policy(input_ids=tokens, attention_mask=mask).logits[:, made["prompt_ids"].shape[1] - 1 : -1]
        exact = (logits / self.args.temperature).log_softmax(-1).gather(-1, made["completion_ids"][..., None])[..., 0]
        differences = (made["sampling_per_token_logps"] - exact).abs()
        sampled = made["completion_mask"] * made.get("tool_mask", 1)
        return float((differences * sampled).max())


def trainer(settings: dict[str, Any], folder: Path, stack: contextlib.ExitStack) -> Observed:
    """One that changes the policy a lot in each step; a server of its rollouts ends with the stack."""
    settings = dict(settings)
    peft_config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear") if settings.pop("lora", False) else None
    rows: list[Any] = [" ".join(f"w{first + more}" for more in range(1 + first % 3)) for first in range(32)]
    tokenizer, tools, likely = small.tokenizer(), None, None
    if settings.pop("tools", False):
        tokenizer, tools, likely = tool_loop.tokenizer(), [tool_loop.look], LIKELY
        rows = [[{"role": "user", "content": row}] for row in rows]
        settings |= {"max_completion_length": 24, "generation_kwargs": {"stop_token_ids": [tool_loop.CALL]}}
    checkpoint = vllm_on_cpu.checkpoint(folder / "model", spread=0.05, tokenizer=tokenizer, likely=likely)
    if settings.get("vllm_mode") == "server":
        port, _ = stack.enter_context(trl_server.serving(checkpoint, max_model_len=64))
        trl_server.send_weights()
        settings |= {"vllm_server_base_url": f"http://127.0.0.1:{port}", "vllm_group_port": trl_server.open_port()}
    made = Observed(
        model=AutoModelForCausalLM.from_pretrained(checkpoint),
        reward_funcs=lambda completions, **_: [float(len(set(str(one).split()))) for one in completions],
        args=GRPOConfig(
            str(folder / "out"),
            **{
                **small.STEPS,
                "use_vllm": True,
                "vllm_mode": "colocate",
                "vllm_gpu_memory_utilization": 0.1,
                "vllm_max_model_length": 64,
                "max_steps": STEPS,
                "per_device_train_batch_size": 4,
                "num_generations": 4,
                "max_completion_length": 8,
                "learning_rate": 3e-2,
                **settings,
            },
        ),
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=tokenizer,
        peft_config=peft_config,
        tools=tools,
    )
    made.start = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    made.differences, made.from_start, made.calls = [], [], []
    return made


def train(settings: dict[str, Any], folder: Path) -> Observed:
    """A trainer that has trained, with what it saw."""
    with contextlib.ExitStack() as stack:
        made = trainer(settings, folder, stack)
        made.train()
    return made


def main() -> None:
    """Write the report."""
    parser = states.parser()
    parser.add_argument("--case", choices=CASES, required=True)
    arguments = parser.parse_args()
    rows = rlhf_patches.apply()
    with tempfile.TemporaryDirectory() as folder:
        made = train(CASES[arguments.case], Path(folder))
    found: dict[str, Any] = {name: getattr(made, name) for name in ("differences", "from_start", "calls")}
    found["applied"] = [row.name for row in rows if row.status.value == "applied"]
    found["watched"] = dict(rlhf_patches.report()["trl-watch-rollouts"].observations)
    (arguments.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
