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
