"""What TRL's server answers when its worker has died: ``--out FOLDER [--engine]``.

The server is TRL's own, with its worker, before apply() of trl-vllm-serve-dead-worker and after it. Without
``--engine`` a class stands for vLLM's engine, which takes seconds to start and for which nobody asks here but by what
it raises.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm

import rlhf_patches
from rlhf_patches.proving import states
from tests.harness import trl_server, vllm_on_cpu

NAME = "trl-vllm-serve-dead-worker"
LONGEST = 16
#: Seconds that what is released gets to answer once the worker is gone. What is repaired answers within milliseconds,
#: and has all the time that a busy machine may take for these.
TIMEOUT = 4
LONG = 120
RIGHT, TOO_LONG = [3, 4, 5], [3] * (LONGEST + 1)


class Engine:
    """Answers with one token, and raises where a prompt is too long, as vLLM does."""

    def __init__(self, **settings: Any) -> None:
        self.longest = settings["max_model_len"]

    def generate(self, prompts: list[Any], sampling_params: Any) -> list[Any]:
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        if max(map(len, tokens)) > self.longest:
            raise ValueError("The decoder prompt is longer than the maximum model length")
        completion = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0, rank=1)}])
        return [SimpleNamespace(prompt_token_ids=each, outputs=[completion]) for each in tokens]


def answer(port: int, prompt: list[int], timeout: float) -> Any:
    """The status of an answer, or that there is none."""
    body = json.dumps({"prompts": [prompt], "max_tokens": 2}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate/", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except TimeoutError:
        return "no answer"


def observe(model: str, deadly: Any) -> dict[str, Any]:
    """A right request, one that the worker dies of, or its death by a signal; then a right one again."""
    with trl_server.serving(model, max_model_len=LONGEST) as (port, process):
        timeout = LONG if rlhf_patches.in_force(NAME) else TIMEOUT
        first = answer(port, RIGHT, LONG)
        if deadly is signal.SIGKILL:
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        return {"first": first, "deadly": answer(port, TOO_LONG, timeout), "next": answer(port, RIGHT, timeout)}


def main() -> None:
    """Write the report."""
    parser = states.parser()
    parser.add_argument("--engine", action="store_true")
    arguments = parser.parse_args()
    if not arguments.engine:
        vllm.LLM = Engine
    deaths = {"raised": None, "killed": signal.SIGKILL}
    with tempfile.TemporaryDirectory() as folder:
        model = vllm_on_cpu.checkpoint(Path(folder)) if arguments.engine else folder
        states.report(
            NAME, lambda: {name: observe(model, death) for name, death in deaths.items()}, arguments.out, reverted=False
        )
