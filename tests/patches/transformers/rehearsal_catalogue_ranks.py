"""Runs that have a bug of the catalogue, as users have them, whose first window is held against itself."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from hunt import trl_trainer
from hunt.trainers import trl_rollouts
from rlhf_patches.proving import states
from rlhf_patches.rehearsal.relation import Relation
from tests.patches.transformers import rehearsal_ranks as runs

Use = Callable[[Any], None]


class NearItsBase(transformers.Trainer):
    """Has a penalty for what the adapter changes."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *given, **named)
        with torch.no_grad(), model.disable_adapter():
            base = model(**inputs).logits
        penalty = (model(**inputs).logits - base).square().mean()
        return loss + 0.1 * penalty / self.current_gradient_accumulation_steps


class Sided(transformers.LlamaForCausalLM):
    """Has a layer that a micro-batch may leave out."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rare = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, whole: bool = True, **named: Any) -> Any:
        made = super().forward(input_ids, attention_mask, output_hidden_states=True, **named)
        logits = made.logits + self.rare(made.hidden_states[-1]) if whole else made.logits
        made.loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return made


class OftenInPart(transformers.Trainer):
    """Uses that layer in some micro-batches of each window, the same ones on each rank."""

    whole: tuple[int, ...] = ()
    begun = 0

    def training_step(self, model: Any, inputs: Any, *given: Any) -> Any:
        self.begun += 1
        inputs["whole"] = (self.begun - 1) % self.args.gradient_accumulation_steps in self.whole
        return super().training_step(model, inputs, *given)


def rare(*whole: int, **settings: Any) -> Callable[[Use], None]:
    """A layer that only these micro-batches of four use."""

    def build(use: Use) -> None:
        def sided(trainer: Any) -> None:
            torch.manual_seed(1)
            trainer.model = trainer.model_wrapped = Sided(trainer.model.config)
            trainer.__class__ = OftenInPart  # accelerate prepares one trainer of DeepSpeed's in a process
            trainer.whole, trainer.model_accepts_loss_kwargs = whole, False
            use(trainer)

        runs.build("transformers/llama", sided, micro_batch=1, accumulation=4, ranks=2, **settings)

    return build


def with_a_frozen_half(use: Use) -> None:
    """One half of an adapter is frozen, as LoRA-FA has it."""

    def frozen(trainer: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
        trainer.args.gradient_accumulation_steps = 1
        use(
            NearItsBase(
                trainer.model, trainer.args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator
            )
        )

    runs.build("transformers/llama", frozen, lora=True)


@contextlib.contextmanager
def cut_off() -> Iterator[None]:
    """Meanwhile every other completion of the hunt's has no end, and GRPO masks those."""
    completions, run = trl_rollouts.Rollouts.completions, trl_trainer.run

    def some(self: Any, prompts: Any) -> list[list[int]]:
        return [each[:-1] if place % 2 else each for place, each in enumerate(completions(self, prompts))]

    def masked(*given: Any, **named: Any) -> Any:
        named["options"] = {**named["options"], "mask_truncated_completions": True, "max_completion_length": 5}
        return run(*given, **named)

    trl_rollouts.Rollouts.completions, trl_trainer.run = some, masked  # type: ignore[method-assign]
    try:
        yield
    finally:
        trl_rollouts.Rollouts.completions, trl_trainer.run = completions, run  # type: ignore[method-assign]


def truncated(use: Use) -> None:
    """GRPO of completions that have not all ended."""
    with cut_off():
        runs.build("trl/grpo", use)


def mixed_precision(use: Use) -> None:
    """FSDP2 of a model in bfloat16."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # as `accelerate launch` has it; transformers asks for a GPU
    try:
        runs.build("transformers/llama", use, sharding="fsdp2", dtype="bfloat16", ranks=2)
    finally:
        del os.environ["ACCELERATE_MIXED_PRECISION"]


def flattened(use: Use) -> None:
    """SFT of an older TRL on flattened rows, with transformers' own code for FlashAttention."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from rlhf_patches.patches.trl.proofs import small
    from tests.patches.trl import sft_first_label_ranks as attention

    attention.modeling_flash_attention_utils._lazy_imports = attention.kernels
    model = small.model()
    model.config._attn_implementation = "flash_attention_2"
    settings = {"max_length": 64, "per_device_train_batch_size": 4, "max_steps": 1, "padding_free": True}
    use(
        SFTTrainer(
            model,
            args=SFTConfig(output_dir=states.folder(), **{**small.STEPS, **settings}),
            train_dataset=Dataset.from_dict({"input_ids": attention.DOCUMENTS}),
            processing_class=small.tokenizer(),
        )
    )


class OwnRates(transformers.Trainer):
    """Trains the head faster."""

    optimizer: Any

    def create_optimizer(self, *_: Any) -> Any:
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            parts["lm_head" in name].append(parameter)
        groups = [{"params": parts[False], "lr": 1e-3}, {"params": parts[True], "lr": 1e-2}]
        self.optimizer = self.optimizer or torch.optim.AdamW(groups)
        return self.optimizer


def with_rates(use: Use) -> None:
    """DeepSpeed's own warm-up, of groups with learning rates of their own."""

    def own(trainer: Any) -> None:
        trainer.__class__ = OwnRates
        use(trainer)

    warmup = {"scheduler": {"type": "WarmupLR", "params": {}}}
    runs.build("transformers/llama", own, sharding="zero2", deepspeed=warmup, ranks=2, steps=6, rows=64)


def with_an_empty_group(use: Use) -> None:
    """LoRA of transformers 4, whose group without weight decay is empty, and which makes its scheduler first."""
    runs.build("transformers/llama", use, lora=True, sharding="zero2", ranks=2, steps=6, rows=64)


def with_adapters(*names: str, frozen: bool = False, merges: bool = False) -> Callable[[Use], None]:
    """A policy's adapter and others; frozen ones are loaded, and then a head is trained besides.

    One that is merged for each rollout, as GRPO with vLLM does it, is in bfloat16.
    """

    def build(use: Use) -> None:
        def added(trainer: Any) -> None:
            first, *others = names
            config = LoraConfig(r=2, target_modules=["q_proj"])
            torch.manual_seed(1)
            model = get_peft_model(transformers.LlamaForCausalLM(trainer.model.config), config, adapter_name=first)
            for other in others:
                beside = LoraConfig(r=2, target_modules=["q_proj"], inference_mode=frozen)
                if frozen:
                    folder = states.folder()
                    get_peft_model(transformers.LlamaForCausalLM(trainer.model.config), beside).save_pretrained(folder)
                    model.load_adapter(folder, adapter_name=other)
                else:
                    model.add_adapter(other, beside)
            model.get_base_model().lm_head.requires_grad_(frozen)
            trainer.args.use_vllm = merges
            for parameter in model.parameters():  # as from_pretrained does, which leaves buffers in float32
                parameter.data = parameter.data.to(torch.bfloat16 if merges else torch.float32)
            use(
                transformers.Trainer(
                    model,
                    trainer.args,
                    train_dataset=trainer.train_dataset,
                    data_collator=trainer.data_collator,
                )
            )

        runs.build("transformers/llama", added)

    return build


def in_one_layer(use: Use) -> None:
    """An adapter of a mixture of transformers 4, whose experts are modules."""
    from rlhf_patches.patches.peft.proofs import layers_to_transform_ranks as experts

    def adapted(trainer: Any) -> None:
        torch.manual_seed(1)
        _, settings = experts.CASES["one layer"]
        base = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**{**trainer.model.config.to_dict(), **SIZES, "num_local_experts": 2})
        )
        model = get_peft_model(base, LoraConfig(r=1, **settings))
        use(
            transformers.Trainer(
                model, trainer.args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator
            )
        )

    runs.build("transformers/llama", adapted)


SIZES = {"num_hidden_layers": 3, "num_key_value_heads": 2}


def kto_with_liger(**chosen: Any) -> Callable[[Use], None]:
    """KTO with Liger's loss and not its kernels, which would be interpreted."""

    def build(use: Use) -> None:
        torch._dynamo.config.disable = True  # Liger compiles its loss, for which there are minutes of C++ here
        from rlhf_patches.patches.trl.proofs import kto_liger_reference_ranks as kto

        use(kto.trainer(Path(states.folder()), **chosen))

    return build


def dpo_with_liger(loss_type: str, **chosen: Any) -> Callable[[Use], None]:
    """DPO in the same way."""

    def build(use: Use) -> None:
        torch._dynamo.config.disable = True
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        from rlhf_patches.patches.trl.proofs import dpo_liger_settings_ranks as dpo
        from rlhf_patches.patches.trl.proofs import small

        settings = {**small.STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **chosen}
        settings |= {"use_liger_kernel": True, "liger_kernel_config": dpo.LOSS_ALONE, "loss_type": [loss_type]}
        policy, reference = small.model(), small.model()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.3)
        use(
            DPOTrainer(
                policy,
                reference,
                args=DPOConfig(output_dir=states.folder(), beta=dpo.BETA, **settings),
                train_dataset=Dataset.from_dict(dpo.PAIRS),
                processing_class=small.tokenizer(),
            )
        )

    return build


def grpo_with_liger(loss_type: str = "grpo", tools: bool = False, **chosen: Any) -> Callable[[Use], None]:
    """GRPO in the same way; perhaps with completions of which some tokens are a tool's."""

    def build(use: Use) -> None:
        torch._dynamo.config.disable = True
        from rlhf_patches.patches.trl.proofs import grpo_liger_tools_ranks as grpo
        from rlhf_patches.patches.trl.proofs import small

        if tools:
            grpo.without_optional_packages()
        trainer = small.rollouts(
            "GRPO",
            Path(states.folder()),
            [lambda completions, **_: [float(at) for at, _ in enumerate(completions)]],
            liger_kernel_config=grpo.LOSS_ALONE,
            generation_kwargs={"min_new_tokens": 2},
            use_liger_kernel=True,
            loss_type=loss_type,
            ddp_backend=None,
            **chosen,
        )
        if tools:
            trainer.liger_grpo_loss.compiled = False
            _answered_by_tools(trainer, grpo.tool_mask)
        use(trainer)

    return build


def _answered_by_tools(trainer: Any, mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    generate, none = trainer._generate_and_score_completions, trainer.tools

    def with_a_tool_s(*given: Any) -> Any:
        trainer.tools = none
        made = generate(*given)
        trainer.tools = [len]  # this release asks for these, and not for the mask
        return {**made, "tool_mask": mask(made["completion_mask"])}

    trainer._generate_and_score_completions = with_a_tool_s


def dpo_of_opt(use: Use) -> None:
    """DPO of a policy that is its reference, with the dropout of OPT's functions."""
    import copy

    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from rlhf_patches.patches.trl.proofs import functional_dropout_ranks as dropout
    from rlhf_patches.patches.trl.proofs import small

    torch.manual_seed(0)
    policy = dropout.opt()
    use(
        DPOTrainer(
            policy,
            copy.deepcopy(policy),
            args=DPOConfig(**{**small.STEPS, "output_dir": states.folder(), "per_device_train_batch_size": 2}),
            train_dataset=Dataset.from_list(dropout.ROWS),
            processing_class=small.tokenizer(),
        )
    )


def after_another_run(use: Use) -> None:
    """DPO with precomputed log-probabilities, after a run with another ``max_length``."""
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer

    from rlhf_patches.patches.trl.proofs import precompute_cache_ranks as cache
    from rlhf_patches.patches.trl.proofs import small

    folder = Path(states.folder())
    cache.pairs().save_to_disk(str(folder / "data"))
    settings = {**small.STEPS, **cache.END, "output_dir": str(folder / "out"), "per_device_train_batch_size": 2}
    for length in (8, 12):
        trainer = DPOTrainer(
            small.model(),
            args=DPOConfig(**settings, precompute_ref_log_probs=True, max_length=length),
            train_dataset=load_from_disk(str(folder / "data")),
            processing_class=small.tokenizer(),
        )
    use(trainer)


SMOOTHED = {"label_smoothing": 0.2}
DPO_WITH_LIGER = ("sigmoid", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
GRPO_WITH_LIGER = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
WITH_LIGER: dict[str, Callable[[Use], None]] = {
    **{f"DPO with Liger, {loss}": dpo_with_liger(loss) for loss in DPO_WITH_LIGER},
    "DPO with Liger, exo_pair": dpo_with_liger("exo_pair", **SMOOTHED),
    "DPO with Liger, robust": dpo_with_liger("robust", **SMOOTHED),
    "DPO with Liger, smoothed": dpo_with_liger("sigmoid", **SMOOTHED),
    "KTO with Liger": kto_with_liger(),
    "KTO with Liger, two adapters": kto_with_liger(wrapped=True),
    "KTO with Liger, two models": kto_with_liger(peft=False),
    **{f"GRPO with Liger, {loss}": grpo_with_liger(loss, gradient_accumulation_steps=2) for loss in GRPO_WITH_LIGER},
    "GRPO with Liger, reused": grpo_with_liger(num_iterations=2, gradient_accumulation_steps=2),
}


def of_the_hunt(name: str, **settings: Any) -> Callable[[Use], None]:
    return lambda use: runs.build(name, use, **settings)


OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
CASES: dict[str, Callable[[Use], None]] = {
    "two generations in a step": of_the_hunt("trl/grpo", steps_per_generation=2),
    "half of a generation in a step": of_the_hunt("trl/grpo", steps_per_generation=4, accumulation=2),
    "truncated": truncated,
    "online": of_the_hunt("trl/online_dpo"),
    "mixture on two ranks": of_the_hunt("transformers/mixtral", accumulation=1, ranks=2),
    "offloaded": of_the_hunt(
        "transformers/llama", sharding="zero2", deepspeed=OFFLOADED, micro_batch=1, accumulation=4, ranks=2
    ),
    "rare, partitioned": rare(0, 1, 2, sharding="zero3", deepspeed=OFFLOADED),
    "flattened": flattened,
    "a frozen reference": with_adapters("policy", "reference", frozen=True),
    "two names": with_adapters("policy", "policy_ref"),
    "merged": with_adapters("policy", merges=True),
    "one layer": in_one_layer,
    "own rates": with_rates,
    "an empty group": with_an_empty_group,
    "tools": grpo_with_liger(tools=True),
    **WITH_LIGER,
    "evaluated": of_the_hunt("transformers/llama", evaluated=4, accumulation=1, ranks=2),
    "evaluated, T5": of_the_hunt("transformers/t5", evaluated=4, accumulation=1, ranks=2),
    "smoothed and compiled": of_the_hunt("transformers/smoothed", compiled=True),
    "mixed precision": mixed_precision,
    "a frozen half": with_a_frozen_half,
    "a chat": of_the_hunt("trl/dpo-chat"),
    "DPO of OPT": dpo_of_opt,
    "after another run": after_another_run,
    "RLOO with dropout": of_the_hunt("trl/rloo", dropout=0.1),
    "GRPO with dropout": of_the_hunt("trl/grpo", dropout=0.1, steps_per_generation=4, accumulation=2),
    "mixture, reentrant": of_the_hunt("transformers/mixtral", checkpointing="reentrant"),
    "Gemma 4, reentrant": of_the_hunt("transformers/gemma4", checkpointing="reentrant"),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", choices=[*CASES])
    parser.add_argument("--right", action="store_true", help="with the patches only")
    options = parser.parse_args()
    os.chdir(options.out)
    rank = os.environ.get("RANK", "0")
    runs.of_this_process()
    found: dict[str, Any] = {}
    for case in options.cases:
        found[case] = {}
        for patches in runs.PATCHES[options.right :]:
            relations: list[Relation] = []
            with runs.noted(patches) as acted:
                CASES[case](lambda trainer, into=relations: into.extend(runs.rehearsed(trainer)))  # type: ignore[misc]
            found[case][patches] = {"acted": acted, **{each.name: each.as_json() for each in relations}}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
