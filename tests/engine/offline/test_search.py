"""``rlhf-patches explain WORDS``: known bugs by what a user sees."""

from __future__ import annotations

import pytest

from rlhf_patches.definitions import registry, search

PHRASES = {
    "identical completions": "verl-rollout-seed",
    "all samples of a prompt are the same": "verl-rollout-seed",
    "rollout server returns the same responses on every worker": "swift-rollout-worker-seed",
    "reward 0": "math-verify-thread",
    "reward always zero with math_verify": "math-verify-thread",
    "sleep mode": "trl-vllm-sleep-weights",
    "mergekit": "trl-optional-packages",
    "No module named vllm": "trl-optional-packages",
    "OOM": "verl-logprob-entropy",
    "out of memory computing entropy verl megatron": "verl-logprob-entropy",
    "duplicate samples after resume": "accelerate-resume-dispatched",
    "KL nan": "openrlhf-k3-gradient",
    "loss is nan with masked tokens openrlhf": "openrlhf-masked-nan",
    "learning rate of second parameter group wrong": "deepspeed-group-learning-rates",
    "gradient accumulation wrong with zero2 offload": "deepspeed-offload-accumulation",
    "eval_loss depends on number of gpus": "transformers-eval-loss",
    "loss too large with gradient accumulation t5": "transformers-accumulation-scale",
    "label smoothing model repeats input": "transformers-smoothed-labels",
    "packed sequences attend to each other": "transformers-packed-documents",
    "experts not restored after resume": "transformers-resume-weights",
    "hang at start torch extensions": "torch-stale-build-lock",
    "stuck loading cpu_adam": "torch-stale-build-lock",
    "log_metric hang grpo": "trl-metrics-deadlock",
    "vllm-serve hangs after worker died": "trl-vllm-serve-dead-worker",
    "lora not applied in rollouts swift": "swift-async-rollout-lora",
    "rollouts from base model verl lora": "verl-merged-lora",
    "base weights drift after merge adapter": "peft-lora-merge-drift",
    "disable_adapter makes parameters trainable": "peft-disable-adapter-restore",
    "second adapter freezes first": "peft-adapter-freeze",
    "no_sync_func assertion": "verl-no-sync-reentry",
    "warnings_issued": "trl-warnings-issued",
    "Dr.GRPO length bias": "verl-dr-grpo-length-bias",
    "tool results trained on": "trl-grpo-tool-overflow",
    "eos token twice dpo": "trl-dpo-second-eos",
    "liger kto reference model ignored": "trl-kto-liger-reference",
    "critic gradient too large": "verl-critic-loss-scale",
    "grad norm wrong with tensor parallel attention sink": "megatron-core-attention-sink-norm",
    "aux loss too small with context parallel": "megatron-core-moe-auxiliary-context",
    "expert bias bf16 counts": "megatron-core-expert-bias-counts",
    "rollout temperature ignored logprobs skyrl": "skyrl-rollout-temperature",
    "prefix cache stale after weight update": "nemo-rl-async-prefix-cache",
    "eps_clip_c has no effect": "slime-eps-clip-c",
    "dropped prompts async rollout": "slime-async-dropped-groups",
    "padding included in advantage mean": "skyrl-advantage-padding",
    "megatron dpo loss_type ignored": "swift-megatron-dpo-loss-type",
    "dropout in reference model": "swift-null-ref-context-hf",
    "last samples never seen": "swift-sampler-tail",
    "cross entropy gradient same for all tokens": "transformer-engine-cross-entropy-backward",
    "mixed precision fsdp2 updates lost bf16": "accelerate-fsdp2-upcast",
    "resume order of epoch": "trl-resume-order",
    # Written later, from the bugs' descriptions in one line: all 50 found theirs before any change.
    "all ranks stuck loading checkpoint with fsdp2 cpu_ram_efficient_loading": "accelerate-fsdp2-load-by-position",
    "WarmupLR lr wrong after frozen param group": "deepspeed-empty-groups",
    "zero2 only last microbatch gradient used": "deepspeed-zero2-accumulation",
    "zero1 gradient not averaged across gpus": "deepspeed-zero1-last-micro-batch",
    "moe experts drop tokens below capacity": "deepspeed-topk-drops",
    "pipeline parallel gradients too small gradient_accumulation_steps": "deepspeed-pipeline-accumulation",
    "zero3 moe stale gradients for unused experts": "deepspeed-zero3-rare-parameters",
    "grad norm differs with tensor parallel moe experts": "megatron-core-grouped-experts-norm",
    "router load balancing loss too strong with padding": "megatron-core-moe-auxiliary-padding",
    "optimizer cpu offload loses loaded checkpoint": "megatron-core-offloaded-weights",
    "optimizer state wrong after resharding checkpoint": "megatron-core-reshardable-buckets",
    "decoupled lr after resume": "megatron-core-resume-groups",
    "disable_forward_pre_hook KeyError": "megatron-core-forward-pre-hook-reentry",
    "adapter enabled in reference model megatron bridge": "megatron-bridge-disable-adapter",
    "sampling params shared between samples": "openrlhf-own-sampling",
    "cannot import HybridCache": "peft-hybrid-cache",
    "clear_device_cache import error": "peft-clear-device-cache",
    "lora applied to wrong layers moe layers_to_transform": "peft-layers-to-transform",
    "saved adapter contains weights of another adapter": "peft-save-adapter-prefix",
    "fp8 sequence length not divisible": "skyrl-fp8-alignment",
    "skyrl out of memory float32 logits": "skyrl-bf16-logits",
    "loss_fn_outputs wrong order": "skyrl-loss-outputs-packed",
    "partial rollout response longer than max length": "slime-partial-rollout-budget",
    "normalize advantages context parallel slime": "slime-context-parallel-whitening",
    "lora adapter merged twice after resume vllm": "swift-lora-counted-twice",
    "bf16 gradient accumulation megatron swift": "swift-fp32-gradients",
    "GRPO first completion token never trained": "swift-megatron-grpo-mask",
    "vllm server weight update failed but training continues": "swift-rollout-update-failed",
    "ms-swift GKD ImportError trl": "swift-gkd-trl-imports",
    "router aux loss multiplied by number of gpus": "transformers-moe-aux-loss",
    "chunked nll loss zero3 hang": "trl-chunked-nll-zero3",
    "gold loss depends on gradient accumulation": "trl-distillation-scale",
    "robust dpo label smoothing liger": "trl-dpo-liger-settings",
    "multi turn tool calls get other prompts completions": "trl-grpo-tool-turns",
    "mask_truncated_completions loss scale": "trl-grpo-truncated-count",
    "online dpo generates only one token": "trl-online-dpo-server",
    "last token predicts next example padding free": "trl-sft-first-label",
    "vllm logprobs temperature importance sampling ratio": "trl-vllm-raw-logprobs",
    "got an unexpected keyword argument tokenizer": "trl-tokenizer-argument",
    "get_train_sampler takes 1 positional argument": "trl-grpo-train-sampler",
    "GRPO loss nan logprob vllm RuntimeError": "trl-vllm-nan-logprob",
    "AutoModelForVision2Seq import error verl": "verl-vision2seq",
    "newline missing after assistant turn": "verl-tool-separator",
    "agent loop trajectory no reward when last message is from tool": "verl-reward-on-answer",
    "rloo single response advantage zero": "verl-rloo-singletons",
    "only lm_head gets gradients fused kernels": "verl-fused-logprob-contiguity",
    "gmpo loss scale micro batch": "verl-gmpo-micro-batches",
    "different replicas produce the same rollouts": "verl-replica-seed",
    "AutoModelForCausalLMWithValueHead ImportError": "verl-trl-value-head",
    "empty micro batch all tokens masked crash": "verl-padding-only-micro-batch",
}


@pytest.fixture(scope="module")
def index():
    return search.Index(item.patch for item in registry.load()[0])


def names(words, index):
    return [patch.name for patch in index.find(words)]


def test_nine_phrases_of_ten_find_their_bug(index):
    found = {words: names(words, index) for words in PHRASES}
    assert max(map(len, found.values())) <= 10
    assert sum(bug in found[words] for words, bug in PHRASES.items()) >= 0.9 * len(PHRASES)
    assert sum(found[words][:1] == [bug] for words, bug in PHRASES.items()) >= 0.7 * len(PHRASES)


@pytest.mark.parametrize("words", ["", "-", "the and of", "xylophone", "zebra quokka xylophone loss"])
def test_words_that_fit_nothing(index, words):
    assert names(words, index) == []


def test_a_name_counts_most_and_more_words_narrow(index):
    assert names("dapo", index)[0] == "trl-grpo-dapo-scale"
    assert set(names("null-ref", index)[:2]) == {"swift-null-ref-context", "swift-null-ref-context-hf"}
    assert names("AttributeError: object has no attribute 'warnings_issued'", index)[0] == "trl-warnings-issued"


@pytest.mark.parametrize(
    ("words", "bug"),
    [("OOM", "verl-logprob-entropy"), ("stuck", "torch-stale-build-lock"), ("KL nan", "openrlhf-k3-gradient")],
)
def test_words_that_users_have_and_pages_have_not(index, words, bug):
    assert bug in names(words, index)


def test_what_explain_says(said):
    status, out, err = said("explain", "identical", "completions")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "Known bugs that fit 'identical completions', best first:"
    assert lines[-1] == "Next: `rlhf-patches explain NAME` shows a page."
    assert 3 <= len(lines) <= 12
    assert any(line.startswith("verl-rollout-seed: samples of one prompt are equal") for line in lines)
    assert said("explain", "identical completions")[1] == out
    # Several names have this part: all of them, and no page.
    assert said("explain", "null-REF")[1].count("\nswift-null-ref-context") == 2
    status, out, err = said("explain", "xylophone")
    assert (status, out, err.count("\n")) == (2, "", 3)
    assert err.startswith("rlhf-patches: no known bug fits 'xylophone'\n")
