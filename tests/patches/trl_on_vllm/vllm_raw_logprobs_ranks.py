"""Log-probabilities from the real worker of `trl vllm-serve` on the real vLLM: ``--out FOLDER``.

Each temperature before apply() of trl-vllm-raw-logprobs and after it, beside those of the same weights in float64.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm.utils import network_utils

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states
from tests.harness import vllm_on_cpu

NAME = "trl-vllm-raw-logprobs"
CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.5": {"temperature": 1.5},
    "top_p 0.5": {"temperature": 1.0, "top_p": 0.5},
}


def observe(model: str, prompts: list[list[int]]) -> dict[str, list[Any]]:
    """Ask a worker as the server does: for each case and prompt the tokens and their log-probabilities."""
    from trl.scripts import vllm_serve

    arguments = vllm_serve.ScriptArguments(model=model, max_model_len=64, enforce_eager=True, dtype="float32")
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=vllm_serve.llm_worker, args=(arguments, 0, network_utils.get_open_port(), theirs))
    worker.start()
    theirs.close()
    assert ours.recv() == {"status": "ready"}
    found = {}
    for case, settings in CASES.items():
        parameters = vllm.SamplingParams(n=2, max_tokens=8, logprobs=0, seed=1, **settings)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        ours.send(
            {"type": "call", "method": "generate", "kwargs": {"prompts": requests, "sampling_params": parameters}}
        )
        found[case] = [
            [
                list(output.prompt_token_ids),
                list(completion.token_ids),
                [vllm_serve.sanitize_logprob(next(iter(each.values()))) for each in completion.logprobs],
            ]
            for output in ours.recv()
            for completion in output.outputs
        ]
    ours.send({"type": "shutdown"})
    worker.join()
    return found


def main() -> None:
    """Write the report."""
    out: Path = states.parser().parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = vllm_on_cpu.checkpoint(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        prompts = [small.tokenizer()(prompt)["input_ids"] for prompt in small.PROMPTS]

        def differences() -> dict[str, float]:
            """Of each case the largest difference of a token's log-probability from the exact one."""
            found = observe(checkpoint, prompts)
            return {
                case: max(
                    abs(one - other)
                    for prompt, completion, logprobs in rows
                    for one, other in zip(
                        logprobs, vllm_on_cpu.exact(model, prompt, completion, CASES[case]["temperature"]), strict=True
                    )
                )
                for case, rows in found.items()
            }

        states.report(NAME, differences, out, reverted=False)
