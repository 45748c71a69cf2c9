"""More steps with continuous batching, whose completions are made from the prompts: ``--out FOLDER CASE...``.

`generate_batch` takes a second and a half per step on a CPU, and samples. The proof's worker runs it; here another
function stands in its place, so that two runs have the same completions. All else is the release's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import torch
import torch.distributed as dist
import transformers

from rlhf_patches.patches.trl.proofs import continuous_batching_weights_ranks as proof
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SEEN: list[dict[str, Any]] = []
"""What each generation had."""


class Own(transformers.Qwen2ForCausalLM):
    """A class that is not the release's."""


def in_bf16(buffers: bool = True) -> Any:
    """A model in bf16, with or without its rotary frequencies."""
    made = small.model()
    kept = made.model.rotary_emb.inv_freq
    made.to(torch.bfloat16)
    if not buffers:
        made.model.rotary_emb.inv_freq = kept
    return made


def with_adapters() -> Any:
    """LoRA's adapters in float32 on a base in bf16, as PEFT makes them."""
    made = peft.get_peft_model(in_bf16(buffers=False), LORA)
    torch.manual_seed(7)
    for name, each in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.1)
    return made


def own() -> Any:
    made = Own(small.model().config)
    made.load_state_dict(small.model().state_dict())
    return made


proof.CASES |= {
    "tied": ("GRPO", {"policy": lambda: small.model(tied=True)}),
    "head in float32": ("GRPO", {"cast_lm_head_to_fp32": True}),
    "adapters": ("GRPO", {"policy": with_adapters, "beta": 0.1}),
    "accumulated": ("GRPO", {"gradient_accumulation_steps": 2, "steps_per_generation": 1}),
    "in bf16": ("GRPO", {"policy": in_bf16}),
    "in bf16 but rotary": ("GRPO", {"policy": lambda: in_bf16(buffers=False)}),
    "float32": ("GRPO", {"bf16": False}),
    "regular": ("GRPO", {name: False for name in proof.paged()}),
    "Online DPO": ("OnlineDPO", proof.paged()),
    "own class": ("GRPO", {"policy": own}),
}
REGULAR = ("GRPO", "RLOO", "tied", "adapters", "accumulated", "Online DPO")
"""Cases that are run with TRL's other way to generate, too."""
proof.CASES |= {
    f"{case}, regular": (kind, {**settings, **dict.fromkeys(proof.paged(), False)})
    for case, (kind, settings) in proof.CASES.items()
    if case in REGULAR
}


def online_dpo(case: str) -> Any:
    """Online DPO's trainer, which has the setting in 0.23.0 to 1.1.0."""
    try:
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    except ModuleNotFoundError:
        from trl import OnlineDPOConfig, OnlineDPOTrainer
    words = small.tokenizer()
    words.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    return OnlineDPOTrainer(
        model=small.model(),
        ref_model=small.model(),
        reward_funcs=proof.rewards,
        args=OnlineDPOConfig(
            states.folder(),
            per_device_train_batch_size=4,
            max_steps=2,
            learning_rate=proof.RATE,
            lr_scheduler_type="constant",
            max_new_tokens=3,
            max_length=32,
            missing_eos_penalty=None,
            **{**small.STEPS, "bf16": True, **proof.CASES[case][1]},
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in small.PROMPTS * 2]),
        processing_class=words,
    )


def made(case: str, others: Any = proof.made) -> Any:
    return online_dpo(case) if proof.CASES[case][0] == "OnlineDPO" else others(case)


proof.made = made


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(each.detach().double().numpy().tobytes() for each in tensors)).hexdigest()


def completion(place: int, prompt: list[int], rank: int) -> list[int]:
    """Three tokens, which depend on the prompt, the place in the batch and the rank."""
    return [5 + (7 * place + 11 * step + sum(prompt) + 3 * rank) % 90 for step in range(3)]


def instead(_: Any) -> Any:
    def generate_batch(self: Any, inputs: list[list[int]], *_: Any, **__: Any) -> dict[str, Any]:
        parameters = list(self.parameters())
        SEEN.append(
            {
                "weights": sorted({str(each.dtype) for each in parameters}),
                "values": digest(parameters),
                "buffers": sorted({str(each.dtype) for each in self.buffers()}),
                "tied": self.get_input_embeddings().weight is self.get_output_embeddings().weight,
                "head": str(self.get_output_embeddings().weight.dtype),
                "gradients": sum(each.grad is not None for each in parameters),
            }
        )
        rank = dist.get_rank() if dist.is_initialized() else 0
        return {
            str(place): SimpleNamespace(generated_tokens=completion(place, prompt, rank))
            for place, prompt in enumerate(inputs)
        }

    return generate_batch


def regular(self: Any, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
    """The same completions from `generate`, after prompts that are padded."""
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
    rank = dist.get_rank() if dist.is_initialized() else 0
    made = [completion(place, prompt, rank) for place, prompt in enumerate(prompts)]
    return torch.cat([input_ids, torch.tensor(made)], dim=1)


def more(case: str) -> dict[str, Any]:
    """A case's report, and what the generations had."""
    SEEN.clear()
    found = proof.observed(case)
    return {**found, "generations": list(SEEN), "objects": objects(case)}


def objects(case: str) -> dict[str, bool]:
    """Whether a generation leaves the same parameters, gradients and buffers, also if it raises."""
    trainer = proof.made(case)
    if not hasattr(trainer, "_generate_single_turn"):
        return {}
    for each in trainer.model.parameters():
        each.grad = torch.ones_like(each)
    before = held(trainer.model)
    generate(trainer)
    same = {"returns": held(trainer.model) == before}
    with proof.generating(lambda _: raising), contextlib.suppress(FloatingPointError):
        generate(trainer)
    return {**same, "raises": held(trainer.model) == before}


def held(model: Any) -> dict[str, Any]:
    """Each parameter with its gradient, and each buffer: the object, its memory and its type."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    gradients = {f"{name}.grad": each.grad for name, each in tensors.items() if each.grad is not None}
    return {name: (id(each), each.data_ptr(), each.dtype) for name, each in {**tensors, **gradients}.items()}


def raising(self: Any, *_: Any, **__: Any) -> Any:
    raise FloatingPointError("a kernel failed")


def generate(trainer: Any) -> None:
    """One generation, by the release's own method."""
    turn = trainer._generate_single_turn
    takes = turn.__func__.__code__.co_varnames[: turn.__func__.__code__.co_argcount]
    turn([[5, 6], [7, 8, 9]] * 2, None, {}, *([4] if "num_generations" in takes else []))


def ranks(case: str) -> dict[str, Any]:
    """A case on several ranks: whether these have the same weights, and what the first one has."""
    trainer, _, gradients = proof.trained(case)
    weights = torch.cat([each.detach().double().flatten() for each in trainer.model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    steps = torch.cat([each.flatten() for found in gradients for each in found if each is not None])
    of_all = [torch.empty_like(steps) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, steps)
    return {
        "equal": all(bool((each == weights).all()) for each in everyone),
        "gradients": all(bool((each == steps).all()) for each in of_all),
        "found": digest([weights]),
    }


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without a process group, and so without DDP, with which Online DPO's continuous batching raises."""
    left = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(left)


def main() -> None:
    parser = states.parser()
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    transformers.Qwen2ForCausalLM.generate = regular
    observe = ranks if options.ranks else more

    def observed(cases: list[str]) -> dict[str, Any]:
        with alone() if options.alone else contextlib.nullcontext():
            return {**{case: observe(case) for case in cases}, "messages": list(messages)}

    with proof.generating(instead), states.heard() as messages:
        states.report_cases(proof.NAME, observed, options.cases, options.out)
