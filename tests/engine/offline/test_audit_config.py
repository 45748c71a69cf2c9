"""``rlhf-patches audit --config``: a bug is folded away only where the files say for certain that it cannot be."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_patches import DefinitionError, cli
from rlhf_patches.definitions import registry
from rlhf_patches.definitions.changes import Shape
from rlhf_patches.offline.run_config import RunConfig
from rlhf_patches.offline.run_yaml import RunConfigError

PATCHES = {item.patch.name: item.patch for item in registry.load()[0]}
ZERO2, ZERO1, OFFLOAD = (
    "deepspeed-zero2-accumulation",
    "deepspeed-zero1-last-micro-batch",
    "deepspeed-offload-accumulation",
)
CHUNKED, DAPO, GDPO, RLOO = (
    "trl-chunked-nll-zero3",
    "trl-grpo-dapo-scale",
    "verl-gdpo-whitening",
    "verl-rloo-singletons",
)
DEADLOCK = "trl-metrics-deadlock"
POSITION, UPCAST, FSDP1 = "accelerate-fsdp2-load-by-position", "accelerate-fsdp2-upcast", "peft-disable-adapter-fsdp"
MEGATRON, DISTILLATION, GATHER = (
    "skyrl-bf16-logits",
    "verl-padding-only-micro-batch",
    "megatron-core-forward-pre-hook-reentry",
)


MOE, PACKED, LOGITS = "transformers-moe-aux-loss", "transformers-packed-documents", "trl-logit-scaling"
RESUME, EVALUATION, DISPATCHED = "trl-resume-order", "transformers-eval-loss", "accelerate-resume-dispatched"
PEFT, LIGER, EOS, DISTILLED = (
    "peft-lora-merge-drift",
    "trl-grpo-liger-tools",
    "trl-dpo-second-eos",
    "trl-distillation-scale",
)
QWEN = "model_name_or_path: Qwen/Qwen2.5-1.5B"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The configuration of these files, given as texts by name; all of them, or those that are named."""
    monkeypatch.chdir(tmp_path)

    def read(files, *given):
        for name, text in files.items():
            Path(name).write_text(text if isinstance(text, str) else json.dumps(text))
        return RunConfig(given or list(files))

    return read


def zero(**settings):
    return {"zero_optimization": settings}


ACCELERATE = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: 'bf16'
num_processes: 8
tpu_env: []
"""
FSDP = """distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: no
  fsdp_use_orig_params: true
  fsdp_version: 1
"""
SCRIPT = """#!/bin/bash
# What it's for: --loss_type dapo
set -x
export NAME='a b'
A=1 B=$NAME
mkdir -p --mode=7 x
cd $HOME/run && python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$HOME/x.parquet" +distillation.enabled=False 2>&1 > log.txt
"""
CERTAIN = [
    ({"a.json": zero(stage=3)}, {ZERO2, ZERO1, OFFLOAD}, {CHUNKED}),
    ({"a.json": zero(stage=2, offload_optimizer={"device": "none"})}, {ZERO1, OFFLOAD, CHUNKED}, {ZERO2}),
    # DeepSpeed takes its older `cpu_offload` still, so what is not there may be on.
    ({"a.json": zero(stage=2, cpu_offload=True)}, {ZERO1, CHUNKED}, {ZERO2, OFFLOAD}),
    ({"a.json": zero(stage=2)}, {OFFLOAD, CHUNKED, ZERO1}, {ZERO2}),
    ({"a.json": zero()}, {ZERO2, OFFLOAD, CHUNKED}, {ZERO1}),
    ({"a.json": zero(stage=2, offload_optimizer={"device": "cpu"})}, {ZERO1}, {ZERO2, OFFLOAD}),
    ({"a.yaml": ACCELERATE}, {ZERO1, OFFLOAD, CHUNKED}, {ZERO2}),
    ({"a.yaml": FSDP}, {POSITION, UPCAST}, {FSDP1, ZERO2}),
    ({"a.yaml": "loss_type: grpo\n"}, {DAPO}, {CHUNKED}),
    ({"a.json": {"loss_type": "nll"}}, {CHUNKED}, {DAPO}),
    ({"a.sh": "trl grpo --loss-type=dr_grpo --lr -1\n"}, {DAPO, CHUNKED}, {DEADLOCK}),
    ({"a.sh": "trl grpo --loss_type grpo 2>&1 | tee -a log"}, {DAPO}, {DEADLOCK}),
    ({"a.txt": "python train.py --zero_stage 2 --loss_type 'bnpo' --bf16"}, {DAPO, CHUNKED}, {ZERO2, OFFLOAD}),
    ({"a.sh": SCRIPT}, {GDPO, RLOO, DISTILLATION}, {DAPO}),
    ({"a.yaml": "algorithm:\n  adv_estimator: gae\ntrainer:\n  strategy: fsdp2\n"}, {GDPO, MEGATRON}, {DISTILLATION}),
    (
        {"overrides.yaml": "- algorithm.adv_estimator=rloo_vectorized\n- 'distillation.enabled=false'\n"},
        {DISTILLATION},
        {RLOO},
    ),
    ({"a.yaml": "overlap_param_gather: false\n"}, {GATHER}, set()),
    ({"a.yaml": "x: &x grpo\nloss_type: *x\n"}, {DAPO}, set()),
    ({"a.yaml": "x: &x {loss_type: grpo}\n<<: *x\n"}, {DAPO}, set()),
    ({"a.yaml": "x: &x {loss_type: dapo}\n<<: *x\nloss_type: grpo\n"}, {DAPO}, set()),
    ({"a.yaml": "algorithm: {adv_estimator: gae,\n  'x': 1}\n"}, {GDPO}, set()),
    ({"a.yaml": "deepspeed: a.json\n", "a.json": zero(stage=2)}, {CHUNKED}, {ZERO2}),
    ({"a.json": zero(stage=2), "b.json": zero(stage=1)}, {CHUNKED}, {ZERO1, ZERO2}),
    ({"a.yaml": f"{QWEN}\n"}, {MOE, PACKED, LOGITS}, {RESUME, EVALUATION, PEFT}),
    ({"a.sh": "python a.py --model meta-llama/Llama-3.1-8B-Instruct"}, {MOE, PACKED, LOGITS}, {RESUME}),
    ({"a.sh": "python -m verl actor_rollout_ref.model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}, {MOE}, {RESUME}),
    ({"a.yaml": f"{QWEN}\nteacher_model_name_or_path: Qwen/Qwen3-8B\n"}, {MOE}, {RESUME}),
    ({"a.yaml": f"{QWEN}\nhub_model_id: me/mine\n", "b.yaml": ACCELERATE}, {MOE, UPCAST, ZERO1}, {ZERO2, RESUME}),
    ({"a.yaml": f"{QWEN}\nloss_type: dr_grpo\n"}, {EOS, DISTILLED, EVALUATION, DAPO}, {RESUME, DEADLOCK}),
    ({"a.yaml": f"{QWEN}\nscale_rewards: true\nnum_generations: 8\n"}, {EOS, DISTILLED, EVALUATION}, {DAPO, DEADLOCK}),
    ({"a.yaml": f"{QWEN}\nnum_generations: 8\n"}, {EOS}, {DISTILLED, EVALUATION, DEADLOCK}),
    ({"a.yaml": "use_peft: false\nuse_liger_loss: false\n"}, {PEFT, LIGER}, {RESUME}),
    ({"a.yaml": "accelerator_config:\n  dispatch_batches: false\n"}, {DISPATCHED}, {RESUME}),
    ({"a.yaml": "dispatch_batches: false\n", "b.yaml": "num_processes: 1\n"}, {DISPATCHED, MOE, DEADLOCK}, {RESUME}),
    # TRL's own script has no option that is not given.
    ({"a.sh": "trl grpo --lr 1"}, {DISPATCHED, PEFT, LIGER, EOS}, {MOE, DEADLOCK, ZERO2, UPCAST}),
    ({"a.sh": "trl grpo --config a.yaml", "a.yaml": "use_peft: true\n"}, {DISPATCHED, LIGER}, {PEFT}),
]


@pytest.mark.parametrize(("files", "excluded", "left"), CERTAIN)
def test_what_is_certain_is_excluded(run, files, excluded, left):
    config = run(files)
    assert {name for name in excluded | left if config.excludes(PATCHES[name])} == excluded
    assert not config.notes
    assert all(config.undecided(PATCHES[name]) for name in left)


OTHER_MODELS = (
    *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen2-57B-A14B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen1.5-MoE-A2.7B"),
    *("./Qwen/Qwen2.5-1.5B", "/data/Qwen/Qwen2.5-1.5B", "~/Qwen2.5-1.5B", "Qwen2.5-1.5B", "me/Qwen2.5-1.5B"),
    *("meta-llama/Llama-4-Scout-17B-16E", "meta-llama/Llama-3.2-11B-Vision", "mistralai/Mixtral-8x7B-v0.1", "auto"),
)

# What could be read as if it excluded the bug.
NOT_CERTAIN = [
    ({"a.json": zero(stage="auto", offload_optimizer={"device": "auto"})}, ZERO2),
    ({"a.json": {"zero_optimization": True}}, ZERO2),
    ({"a.json": zero(stage=2, cpu_offload=True)}, OFFLOAD),
    ({"a.json": zero(stage=2, offload_optimizer="auto")}, OFFLOAD),
    ({"a.json": zero(stage=2, offload_optimizer={"device": "nvme"})}, OFFLOAD),
    ({"a.json": {"train_micro_batch_size_per_gpu": 1}}, ZERO2),
    ({"a.json": zero(stage=2.5)}, ZERO1),
    ({"a.json": zero(stage=float("inf"))}, ZERO1),
    ({"a.json": zero(stage=3), "b.json": zero(stage=2)}, ZERO2),
    ({"a.json": zero(stage=3), "a.yaml": ACCELERATE}, ZERO2),
    ({"a.json": zero(stage=3), "a.sh": "accelerate launch --zero_stage 2 train.py"}, ZERO2),
    ({"a.json": zero(stage=3), "a.sh": "accelerate launch train.py --deepspeed other.json"}, ZERO2),
    ({"a.json": zero(stage=3), "a.sh": "accelerate launch train.py --deepspeed $CONFIG"}, ZERO2),
    ({"a.json": zero(stage=3), "a.yaml": "deepspeed: zero2\n"}, ZERO2),
    ({"a.json": zero(stage=3), "b.json": {"deepspeed": zero(stage=2)}}, ZERO2),
    ({"a.yaml": FSDP, "b.yaml": "fsdp: full_shard\nfsdp_config:\n  version: 2\n"}, UPCAST),
    ({"a.yaml": FSDP, "a.sh": "accelerate launch --fsdp_version 2 train.py"}, UPCAST),
    ({"a.yaml": "loss_type: Mine\n"}, DAPO),
    ({"a.yaml": "loss_type: [grpo]\n"}, DAPO),
    ({"a.yaml": "loss_type: ${oc.env:LOSS}\n"}, DAPO),
    ({"a.yaml": "loss_type: !mine grpo\n"}, DAPO),
    ({"a.yaml": "other:\n  loss_type: grpo\n"}, DAPO),
    ({"a.yaml": "x: &x {loss_type: grpo}\n<<: *x\nloss_type: dapo\n"}, DAPO),
    ({"a.yaml": "loss_type: grpo\n  or dapo\n"}, DAPO),
    ({"a.yaml": "prompt: |\n  x\n\n  loss_type: grpo\n# x\nlr: 1e-6\n"}, DAPO),
    ({"a.yaml": "x:\n- y\n- loss_type: grpo\n  loss_type: grpo\nz: 1\n"}, DAPO),
    ({"a.yaml": "# loss_type: grpo\nx: 'loss_type: grpo' # y\n"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo\ntrl grpo --lr 1\n"}, DAPO),
    ({"a.sh": "trl sft --loss_type grpo; trl grpo --lr 1"}, DAPO),
    ({"a.sh": "trl sft --loss_type grpo && trl grpo --lr 1"}, DAPO),
    ({"a.sh": "trl sft --loss_type grpo\npython grpo.py"}, DAPO),
    ({"a.sh": "if x; then trl grpo --loss_type grpo; else python grpo.py; fi"}, DAPO),
    ({"a.sh": "loss_type=grpo\ntrl grpo --lr 1"}, DAPO),
    ({"a.sh": "trl grpo --loss_type $LOSS"}, DAPO),
    ({"a.sh": "trl grpo --loss_type=$LOSS"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo $@"}, DAPO),
    ({"a.sh": 'trl grpo --loss_type grpo "${MORE[@]}"'}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo --bf16 $MORE"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo $(cat more.txt)"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo `cat more.txt`"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo @more.txt"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo --name run#1 $@"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo # isn't\n  $@ '"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo --loss_type dapo"}, DAPO),
    ({"a.sh": "trl grpo --loss_type grpo", "a.yaml": "loss_type: dapo\n"}, DAPO),
    ({"a.sh": "run algorithm.adv_estimator=grpo,gdpo"}, GDPO),
    ({"a.sh": "run algorithm.adv_estimator=my_own"}, GDPO),
    ({"a.sh": "run distillation.enabled=False $@"}, DISTILLATION),
    ({"a.yaml": "algorithm:\n  adv_estimator: null\n"}, GDPO),
    *(({"a.yaml": f"model_name_or_path: {name}\n"}, MOE) for name in OTHER_MODELS),
    ({"a.yaml": f"{QWEN}\nreward_model_path: me/mine\n"}, MOE),
    ({"a.yaml": f"{QWEN}\nteacher_model: me/mine\n"}, LOGITS),
    ({"a.yaml": f"{QWEN}\n", "b.yaml": "model_name_or_path: me/mine\n"}, MOE),
    ({"a.yaml": f"{QWEN}\n", "a.sh": "python a.py --config a.yaml --model_name_or_path $1"}, MOE),
    ({"a.sh": "python a.py --model_name_or_path ${MODEL:-Qwen/Qwen2.5-1.5B}"}, MOE),
    ({"a.sh": "python a.py --model_name_or_path Qwen/Qwen2.5-1.5B $@"}, MOE),
    ({"a.yaml": "loss_type: dr_grpo\n"}, EOS),  # of TRL's arguments?
    ({"a.yaml": f"{QWEN}\nloss_type: dr_grpo\nrlhf_type: dpo\n"}, EOS),
    ({"a.yaml": f"{QWEN}\nloss_type: sigmoid\n"}, EOS),
    ({"a.yaml": f"{QWEN}\nbeta: 0.1\n"}, EOS),
    ({"a.yaml": f"{QWEN}\nloss_type: dr_grpo\n", "b.yaml": f"{QWEN}\n"}, EOS),
    ({"a.json": {"model_name_or_path": "x", "loss_type": "dapo"}, "b.json": {"model_name_or_path": "x"}}, EOS),
    ({"a.yaml": f"{QWEN}\nloss_type: dr_grpo\n", "a.sh": "trl dpo --config a.yaml"}, EOS),
    ({"a.sh": "python a.py --model_name_or_path x\npython b.py --model_name_or_path x --num_generations 8"}, EOS),
    ({"a.sh": "trl grpo --config a.yaml"}, PEFT),
    ({"a.sh": "trl grpo $@"}, PEFT),
    ({"a.sh": "trl grpo --lr 1\npython grpo.py"}, PEFT),
    ({"a.sh": "trl grpo --use_peft"}, PEFT),
    ({"a.sh": "trl grpo --use_liger_loss"}, LIGER),
    ({"a.sh": "trl grpo --accelerator_config '{\"dispatch_batches\": true}'"}, DISPATCHED),
    ({"a.yaml": f"{QWEN}\nfsdp: full_shard\n", "b.yaml": ACCELERATE}, UPCAST),
    ({"a.sh": "accelerate launch --config_file b.yaml --use_fsdp a.py --lr 1", "b.yaml": ACCELERATE}, UPCAST),
    ({"b.yaml": ACCELERATE}, UPCAST),
    ({"a.yaml": "trl: sft\nmodel_family: qwen2\n"}, DAPO),
    ({"a.yaml": "trl: grpo\nmodel_family: qwen2\n"}, PEFT),
    ({"a.yaml": "trl: grpo\nmodel_family: qwen2\n"}, MOE),
    ({"a.sh": "python a.py --model_family qwen2"}, MOE),
]  # fmt: skip


@pytest.mark.parametrize(("files", "name"), NOT_CERTAIN)
def test_what_is_not_certain_excludes_nothing(run, files, name):
    config = run(files)
    assert config.excludes(PATCHES[name]) == ""
    assert config.undecided(PATCHES[name])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "a.json is not valid JSON"),
        ("a.json", '{"zero_optimization": {"stage": 3, "stage": 2}}', "a key occurs twice"),
        ("a.json", "[" * 5000, "a.json contains no settings"),
        ("a.json", '{"a":' * 100_000, "a.json is not valid JSON"),
        ("a.yaml", "x: 1\n<<: *base\n", "a.yaml:2: invalid YAML: found undefined alias"),
        ("a.yaml", "x: 1\n<<: 2\n", "a.yaml:2: invalid YAML: expected a mapping"),
        ("a.yaml", "x: &x\n  y: *x\n", "a.yaml:1: an alias refers to the mapping that contains it"),
        ("a.yaml", "loss_type: grpo\nloss_type: dapo\n", "a.yaml:2: the key occurs twice"),
        ("a.yaml", "x:\n  y: 1\n? [z]\n: 1\n", "a.yaml:3: a key is not plain text"),
        ("a.yaml", "x: 'some words\n  go on\n", "a.yaml:"),
        ("a.yaml", "x: 1\n--- \nx: 2\n", "a.yaml:3: a second YAML document begins"),
        ("a.yaml", "x: 1\n\ty: 2\n", "a.yaml:2: "),
        (
            "a.yaml",
            "a: &a {x: 1, y: 2, z: 3}\n"
            + "".join(
                f"{new}: &{new} {{x: *{old}, y: *{old}, z: *{old}}}\n" for old, new in itertools.pairwise("abcdefghijk")
            ),
            "a.yaml has more than 10000 settings",
        ),
        ("a.yaml", "[" * 100_000, "a.yaml"),
        ("a.yaml", "", "a.yaml contains no settings"),
        ("a.sh", "echo 'x", "a.sh:1: not a valid shell command"),
        ("a.txt", "trl==1.5.1\n", "a.txt contains no settings: expected DeepSpeed's JSON"),
        ("a.txt", None, "a.txt cannot be read"),
        ("a.txt", "\0" * (2**20 + 1), "a.txt has more than 1 MiB"),
        ("a.txt", "'\n" + "x\n" * 60_000, "a.txt:1: not a valid shell command"),
        ("a.txt", "x '\n' \\\n" * 2_000, "a.txt contains no settings"),
        ("a.sh", "x\n" * 2**16 + "x", "a.sh has more than 128 KiB, the limit for a script"),
        ("a.sh", "a=(" * 1001, "a.sh has more than 1000 arrays"),
        ("a.sh", "if x; then " * 3000 + "y" + "; fi" * 3000, "a.sh is nested too deeply"),
        ("a.yaml", "x: " + '"\\"' * 50_000, "a.yaml:1: "),
        ("a.yaml", "\n" * 100_000 + "x", "a.yaml:100001: expected a YAML mapping"),
    ],
)
def test_what_is_not_understood_is_an_error(tmp_path, monkeypatch, capsys, name, text, said):
    monkeypatch.chdir(tmp_path)
    Path("pins").write_text("trl==1.5.1\n")
    if text is not None:
        Path(name).write_text(text)
    assert cli.main(["audit", "pins", "--config", name]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), said in err) == ("", 1, True), err


COUNT = "trl-grpo-truncated-count"
PINS = "trl==1.5.1\nverl==0.9.1\n"


def test_what_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pins").write_text(PINS)
    Path("args.yaml").write_text("loss_type: grpo\nfsdp: ''\n")
    Path("run.sh").write_text("run --bf16 $MORE\n")

    def said(*options):
        assert cli.main(["audit", "pins", *options]) == 1
        return capsys.readouterr()

    out = said("--config", "args.yaml").out
    assert f"{DAPO} (trl 1.5.1) cannot affect this run: loss_type is grpo (args.yaml:1)\n" in out
    assert f"The configuration excludes 2 known bugs: {DAPO}, {COUNT}.\n" in out
    assert "this run: zero_optimization.stage is not set; loss_type is grpo (args.yaml:1)\n" in out
    assert "this run: no setting decides whether the bug affects it\n" in out
    assert f"  {DAPO}  " not in out
    assert DAPO not in said("--quiet", "--config", "args.yaml").err
    both = said("--config", "args.yaml", "run.sh").out
    assert "run.sh: $MORE may add options: replace it by its value, or give the options that the run has saved " in both
    assert "The configuration excludes no known bug." in both
    assert f"  {DAPO}  " in both

    document = json.loads(said("--json", "--config", "args.yaml").out)
    trl, _ = document["dependencies"]
    assert trl["excluded"] == [{"id": name, "reason": "loss_type is grpo (args.yaml:1)"} for name in (DAPO, COUNT)]
    assert DAPO not in [bug["id"] for bug in trl["vulns"]]
    assert all(bug["this_run"] for bug in trl["vulns"])
    assert (document["summary"]["excluded"], document["config_not_clear"]) == (2, [])

    (sarif,) = json.loads(said("--format", "sarif", "--config", "args.yaml").out)["runs"]
    suppressed = [each for each in sarif["results"] if "suppressions" in each]
    assert [each["ruleId"] for each in suppressed] == [DAPO, COUNT]
    assert suppressed[0]["suppressions"] == [
        {"kind": "external", "justification": "cannot affect this run: loss_type is grpo (args.yaml:1)"}
    ]
    markdown = said("--format", "markdown", "--config", "args.yaml").out
    assert f"- **{DAPO}** cannot affect this run: <code>loss&#95;type is grpo" in markdown
    github = said("--format", "github", "--config", "args.yaml", "run.sh").out
    assert "::notice title=configuration::run.sh: $MORE may add options" in github


def test_what_was_not_looked_up_stays_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pins").write_text("x==1\ntrl>=1\ntrl==999\n")
    Path("args.yaml").write_text("loss_type: grpo\n")
    assert cli.main(["audit", "pins", "--json"]) == 1
    without = json.loads(capsys.readouterr().out)
    assert cli.main(["audit", "pins", "--json", "--config", "args.yaml"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [row | {"excluded": []} for row in without["dependencies"]] == document["dependencies"]
    assert document["summary"] == without["summary"] | {"excluded": 0}


def test_all_that_there_is_may_be_excluded(tmp_path, monkeypatch, capsys, framework):
    monkeypatch.chdir(tmp_path)
    framework.write("mod", "def f(x):\n    return x - 1\n")
    advice = framework.advice(Shape(framework.path("mod:f"), "$A - 1"), versions="<2")
    advice = replace(advice, excluded_by=("fast=false",))
    monkeypatch.setattr(registry, "load", lambda: ([registry.Registered(advice, "tests")], []))
    Path("pins").write_text(f"{framework.distribution}==1.0\n")
    Path("args.yaml").write_text("fast: off\n")
    assert cli.main(["audit", "pins"]) == 1
    capsys.readouterr()
    assert cli.main(["audit", "pins", "--config", "args.yaml"]) == 0
    out = capsys.readouterr().out
    assert "No known bugs" not in out
    assert f"excludes 1 known bug: {advice.name}." in out


def test_a_folder_with_the_name_of_a_model_tells_nothing(run, tmp_path):
    (tmp_path / "Qwen" / "Qwen2.5-1.5B").mkdir(parents=True)
    assert run({"a.yaml": f"{QWEN}\n"}).excludes(PATCHES[MOE]) == ""


GRPO = f"""{QWEN}-Instruct
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 2048
loss_type: dr_grpo
use_vllm: true
vllm_mode: colocate
"""
VERSIONS = {
    "new": "trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 peft==0.21.2 deepspeed==0.19.8",
    "old": "trl==0.24.0 transformers==4.57.1 accelerate==1.11.0 peft==0.17.1 deepspeed==0.18.1",
}


@pytest.mark.parametrize(
    ("pins", "least", "files", "most"),
    [
        ("new", 22, {"a.yaml": GRPO, "b.yaml": ACCELERATE}, 8),
        ("new", 22, {"a.yaml": GRPO, "b.yaml": ACCELERATE.replace("stage: 2", "stage: 3")}, 9),
        ("new", 22, {"a.yaml": GRPO, "b.yaml": ACCELERATE, "c.sh": "trl grpo --config a.yaml"}, 4),
        ("old", 34, {"a.yaml": GRPO, "b.yaml": ACCELERATE}, 14),
        ("old", 34, {"a.yaml": GRPO, "b.yaml": ACCELERATE, "c.sh": "trl grpo --config a.yaml"}, 9),
    ],
)
def test_how_many_bugs_are_left_of_a_usual_run(run, capsys, pins, least, files, most):
    """GRPO of a dense model on eight GPUs, without offload."""
    run(files)
    Path("pins.txt").write_text(VERSIONS[pins].replace(" ", "\n"))

    def left(*options):
        assert cli.main(["audit", "pins.txt", "--json", *options]) == 1
        return {bug["id"] for row in json.loads(capsys.readouterr().out)["dependencies"] for bug in row["vulns"]}

    bugs = left()
    assert len(bugs) >= least
    # More bugs may become known; these were counted when the test was written.
    assert len(left("--config", *files)) <= most + len(bugs) - least


@pytest.mark.parametrize("wrong", ["stage", "=1", "stage=", "Stage=1", "stage=A", "a b=1", "stage=1||2", "stage=1, 2"])
def test_settings_are_checked(wrong):
    with pytest.raises(DefinitionError, match=r"excluded_by has .* expected 'key=value\|value' in lower case"):
        replace(PATCHES[DAPO], excluded_by=(wrong,))


def test_files_of_a_run_are_of_a_kind(run):
    with pytest.raises(RunConfigError, match="contains no settings"):
        run({"README.txt": "Read me.\n"})


@pytest.mark.parametrize("form", ["text", "sarif", "github", "markdown"])
def test_names_that_are_made_to_do_harm(tmp_path, monkeypatch, capsys, form):
    """Of what is excluded, and of what is not clear, the file is named."""
    monkeypatch.chdir(tmp_path)
    Path("pins").write_text("trl==1.5.1\n")
    names = ["a\n::error::|<b>%\x1b[2J{0}.yaml", "b\n::error::|<b>%\x1b[2J](x).yaml"]
    Path(names[0]).write_text("loss_type: grpo\n")
    Path(names[1]).write_text("deepspeed: '|<b>::error::](x)'\n")
    assert cli.main(["audit", "pins", "--format", form, "--config", *names]) == 1
    out = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in out)
    assert not [line for line in out.splitlines() if line.startswith("::error")]
    if form == "markdown":
        assert "<b>" not in out
        assert "](" not in out
    if form == "sarif":
        json.loads(out)
