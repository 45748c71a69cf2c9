"""TRL's GRPO with a tool on its own `trl vllm-serve` and real vLLM: ``--out FOLDER --patch PATCH [--beside PATCH...]``.

Trainer, tool loop, client and server are TRL's, and they speak HTTP. The policy's head is such that it calls the tool
often. Of each turn of a conversation: by how much the server's log-probabilities are off from those of the same weights
in float64, after what stands before it in that very conversation.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import rlhf_patches
from rlhf_patches.patches.trl.proofs import tool_loop
from rlhf_patches.proving import states
from tests.harness import trl_server, vllm_on_cpu

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PROMPTS = ("w1", "w2 w3", "w4", "w5 w6", "w7", "w8 w9", "w10", "w11 w12")
LIKELY = {tool_loop.CALL: 2.5, tool_loop.END: 1.5}
TURN = {"max_tokens": 6, "stop_token_ids": [tool_loop.CALL], "seed": 1}


def turns(batch: dict[str, Any], weights: Any) -> list[list[float]]:
    """Of each conversation's turns, which are runs of the policy's tokens, the largest difference of a token."""
    found = []
    for row, tokens in enumerate(batch["completion_ids"].tolist()):
        length = int(batch["completion_mask"][row].sum())
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        exact = vllm_on_cpu.exact(weights, prompt, tokens[:length])
        sampled = batch["sampling_per_token_logps"][row].tolist()
        own = batch["tool_mask"][row].tolist()
        differences: list[float] = []
        for at in range(length):
            if own[at]:
                if not at or not own[at - 1]:
                    differences.append(0.0)
                differences[-1] = max(differences[-1], abs(sampled[at] - exact[at]))
        found.append(differences)
    return found


def main() -> None:
    """Write the report."""
    parser = states.parser()
    parser.add_argument("--patch", required=True)
    parser.add_argument("--beside", nargs="*", default=(), help="applied before as after")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        checkpoint = vllm_on_cpu.checkpoint(Path(folder), tokenizer=tool_loop.tokenizer(), likely=LIKELY)
        port = 0
        if RANK == 0:
            settings = {"max_model_len": 64, "dtype": "float32"}
            port, _ = stack.enter_context(trl_server.serving(checkpoint, **settings))
        trl_server.send_no_weights()
        if options.beside:
            rlhf_patches.apply(only=options.beside)
        own = PROMPTS[RANK * len(PROMPTS) // RANKS : (RANK + 1) * len(PROMPTS) // RANKS]
        trainer = tool_loop.trainer(
            options.out,
            policy=transformers.AutoModelForCausalLM.from_pretrained(checkpoint),
            vllm_server_base_url=f"http://127.0.0.1:{port}",
            generation_kwargs=TURN,
            max_tool_calling_iterations=1,
            per_device_train_batch_size=2 * len(own),
        )
        weights = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        states.report(
            options.patch,
            lambda: turns(tool_loop.generated(trainer, own), weights),
            options.out,
            reverted=False,
        )
