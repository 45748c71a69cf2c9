"""TRL's Online DPO on its own `trl vllm-serve` and real vLLM: ``--out FOLDER``.

What the trainer trains on, as released, with trl-online-dpo-server, and with trl-online-dpo-server-padding as well.
Trainer, client and server are TRL's, and they speak HTTP.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from trl.experimental import online_dpo

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states
from tests.harness import trl_server, vllm_on_cpu

SERVER, PADDING = "trl-online-dpo-server", "trl-online-dpo-server-padding"
STATES = {"before": (), "server": (SERVER,), "after": (SERVER, PADDING)}
PROMPTS = ("w1 w2", "w3 w4 w5", "w6", "w7 w8 w9 w10", "w11", "w12 w13", "w14 w15 w16", "w17")
TOKENS = 6
TOLERANCE = 1e-3
"""Of one log-probability: all is float32 in vLLM, and logits are of the order of 10."""


def trainer(checkpoint: str, port: int, out: Path) -> Any:
    """One of the policy that the server has."""
    return online_dpo.OnlineDPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(checkpoint),
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(checkpoint),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=online_dpo.OnlineDPOConfig(
            str(out / "trainer"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=f"http://127.0.0.1:{port}",
            max_new_tokens=TOKENS,
            max_length=32,
            temperature=1.0,
            generation_kwargs={"seed": 1},
            **small.STEPS,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=small.tokenizer(),
    )


def observe(trainer: Any, exact: Any) -> dict[str, Any]:
    """What becomes of a batch.

    Returns:
        ``prompts``: how many the server was asked for. ``completions``: how many of the rows have their prompt, and
        after it a completion of which the server has the log-probabilities of `exact`. ``difference``: between the
        trainer's log-probability of a token and the server's, the largest one.
    """
    client, answers = trainer.vllm_client, []
    theirs = type(client).generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        answers.append((kwargs["prompts"], theirs(client, *args, **kwargs)))
        return answers[-1][1]

    client.generate = generate
    prompt_ids, prompt_mask, completion_ids, completion_mask = trainer._generate_vllm(list(PROMPTS))
    ((asked, answer),) = answers
    scores = {
        tuple(tokens): [each[0] for each in logprobs]
        for tokens, logprobs in zip(answer["completion_ids"], answer["logprobs"], strict=True)
    }
    with torch.no_grad():
        trained = trainer._forward(trainer.model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    encoded, right, differences = small.tokenizer()(list(PROMPTS))["input_ids"], 0, [0.0]
    for row, (mask, tokens) in enumerate(zip(completion_mask, completion_ids.tolist(), strict=True)):
        prompt, tokens = encoded[row % len(PROMPTS)], tokens[: int(mask.sum())]
        sampled = scores.get(tuple(tokens))
        if sampled is None or prompt_ids[row].tolist()[-len(prompt) :] != prompt:
            continue
        of_the_row = vllm_on_cpu.exact(exact, prompt, tokens)
        right += max(abs(one - other) for one, other in zip(sampled, of_the_row, strict=True)) < TOLERANCE
        differences += [abs(one - other) for one, other in zip(sampled, trained[row].tolist(), strict=False)]
    return {"prompts": len(asked), "rows": len(trained), "completions": right, "difference": max(differences)}


def main() -> None:
    """Write the report."""
    out: Path = states.parser().parse_args().out
    found: dict[str, Any] = {"version": trl.__version__}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = vllm_on_cpu.checkpoint(Path(folder))
        exact = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        with trl_server.serving(checkpoint, max_model_len=64, dtype="float32") as (port, _):
            trl_server.send_no_weights()
            made = trainer(checkpoint, port, out)
            for state, names in STATES.items():
                rows: Any = rlhf_patches.apply(only=names) if names else {}
                found["status"] = {name: rows[name].status.value for name in names}
                found[state] = observe(made, exact)
                rlhf_patches.revert()
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
