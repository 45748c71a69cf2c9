"""Full runs of TRL's SFTTrainer under real ZeRO-3, on each of two ranks; see chunked_nll_zero3_ranks.py.

No two examples have the same number of chunks, so ranks never do either. With ``torch_compile`` a recent DeepSpeed does
not see that the head's weight is read (it discovers "external parameters" in eager mode only), and TRL's own gather
is at work.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.harness import zero3_on_cpu as zero3
from tests.harness.timeouts import wait_at_most

RANK, COMMUNICATION = zero3.start()

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

import rlhf_patches
from rlhf_patches.patches.trl.proofs import small

NAME = "trl-chunked-nll-zero3"
CHUNK, EXAMPLES = 4, 8
sft_trainer._CHUNKED_LM_HEAD_CHUNK_SIZE = CHUNK

RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": True},
    "tied": {"tied": True},
    "compiled": {"compiled": True},
    "compiled-lora": {"compiled": True, "lora": True},
}


def examples() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(1, EXAMPLES + 1):
        ids = torch.randint(3, 99, (CHUNK * EXAMPLES + 4,), generator=generator).tolist()
        completion = CHUNK * number
        rows.append({"input_ids": ids, "completion_mask": [0] * (len(ids) - completion) + [1] * completion})
    return Dataset.from_list(rows)


def train(out: Path, lora: bool = False, tied: bool = False, compiled: bool = False) -> dict[str, Any]:
    """Train a tiny model from the same start; numbers as hexadecimal, so that equal means bit for bit."""
    forget_earlier_runs()
    model = small.model(tied)
    config = SFTConfig(
        output_dir=str(out / "trainer"),
        loss_type="chunked_nll",
        completion_only_loss=True,
        accelerator_config={"use_configured_state": True},
        deepspeed={
            # Small buckets: DeepSpeed's default takes 2 GB per rank.
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
        },
        per_device_train_batch_size=1,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        torch_compile=compiled,
        **({"torch_compile_backend": "eager"} if compiled else {}),
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None
    with COMMUNICATION.during() as seen:
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=examples(),
            processing_class=small.tokenizer(),
            peft_config=adapter,
        )
        trainer.train()
    final = digest(trainer)
    trainer.model_wrapped.destroy()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    keys = ("loss", "entropy", "mean_token_accuracy", "grad_norm")
    return {
        "logged": [{key: float(entry[key]).hex() for key in keys} for entry in logged],
        "final": final,
        "collectives": [name for name, _ in seen],
    }


def forget_earlier_runs() -> None:
    """Accelerate and transformers keep one configuration a process."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state()
    GradientState._reset_state()
    unset_hf_deepspeed_config()  # it would partition the next model while it is being made
    torch._dynamo.reset()


def digest(trainer: Any) -> list[str]:
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return [safe_get_full_fp32_param(parameter).double().pow(2).sum().item().hex() for parameter in parameters]


def attempt(out: Path, **arguments: Any) -> dict[str, Any]:
    started = time.monotonic()
    try:
        report = train(out, **arguments)
    except Exception as error:
        report = {"failed": f"{type(error).__name__}: {error}"}
    return report | {"seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("runs", nargs="*", help="such as patched:full, unpatched:compiled", default=[])
    options = parser.parse_args()
    report: dict[str, Any] = {"versions": {"trl": trl.__version__}}
    for run in options.runs:
        how, _, what = run.partition(":")
        if how == "patched":
            rlhf_patches.apply(only=NAME)
        else:
            rlhf_patches.revert()
        if run == options.runs[-1]:  # it may end with one rank waiting for the other
            wait_at_most(15)
        report[run] = attempt(options.out, **RUNS[what])
        print(run, report[run], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"rank{RANK}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    # A rank that is done waits for the other's report, or torchrun would end that one.
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"reported-{RANK}", "")
    store.wait([f"reported-{1 - RANK}"])
    os._exit(0)
