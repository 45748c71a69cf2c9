"""``rlhf-patches audit --config SCRIPT``: a script's options are those that a shell would pass to the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.offline import run_script, shell
from rlhf_patches.offline.run_config import RunConfig

PATCHES = {item.patch.name: item.patch for item in registry.load()[0]}
DAPO, ANSWER, ZERO2, OFFLOAD = (
    "trl-grpo-dapo-scale",
    "verl-reward-on-answer",
    "deepspeed-zero2-accumulation",
    "deepspeed-offload-accumulation",
)


@pytest.fixture
def excluded(tmp_path, monkeypatch):
    """Whether files, given as texts by name, exclude a bug; and what is said about them."""
    monkeypatch.chdir(tmp_path)

    def read(name, files):
        for file, text in files.items():
            Path(file).write_text(text)
        run = RunConfig([file for file in files if not file.startswith("other")])
        return run.excludes(PATCHES[name]), run.notes

    return read


OPENRLHF = "openrlhf.cli.train_dpo \\\n  --save ./x --zero_stage $Z \\\n  --bf16\n"
MODULE = "if [[ ${1} != slurm ]]; then\n  deepspeed --module $training_commands\nfi\n"
SLIME = """pkill -9 sglang
MODEL_ARGS=(
   --num-layers 28
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
GRPO_ARGS=(
   --advantage-estimator reinforce_plus_plus
   # --kl-loss-coef 0.00
   --eps-clip 0.2
)
export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{\\"env_vars\\": {\\"PYTHONPATH\\": \\"/root/Megatron-LM/\\"}}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py --actor-num-gpus-per-node $((8 / NODES)) --load ${BASE}/Qwen3-4B/ \\
   ${MODEL_ARGS[@]} ${GRPO_ARGS[@]}
"""

# What the shell passes to the run, in scripts as people have them.
CERTAIN = {
    "a comment within": (DAPO, "trl grpo --loss_type grpo  # --loss_type dapo\n"),
    "a comment line": (DAPO, "# trl grpo --loss_type dapo\ntrl grpo --loss_type grpo\n"),
    "a constant": (DAPO, "LOSS=grpo\ntrl grpo --loss_type $LOSS --bf16\n"),
    "an exported one, in braces": (DAPO, "export LOSS='grpo'\ntrl grpo --loss_type=${LOSS}\n"),
    "an array": (DAPO, 'A=(\n  --loss_type grpo  # it\n  # --loss_type dapo\n)\ntrl grpo "${A[@]}"\n'),
    "an array that grows": (DAPO, "A=(--bf16)\nA+=(--loss_type grpo)\ntrl grpo ${A[@]}\n"),
    "words in a constant": (DAPO, 'ARGS="--loss_type grpo --bf16"\ntrl grpo $ARGS\n'),
    "a constant that grows": (DAPO, 'A=--bf16\nA+=" --loss_type grpo"\ntrl grpo $A\n'),
    "words that grow": (DAPO, 'ARGS=--bf16\nARGS="$ARGS --loss_type grpo"\ntrl grpo $ARGS\n'),
    "a quoted value of the environment": (DAPO, 'trl grpo --loss_type grpo --output_dir "$OUT"\n'),
    "a default that is not needed": (DAPO, "LOSS=grpo\ntrl grpo --loss_type ${LOSS:-dapo}\n"),
    "before the run": (
        DAPO,
        "source .venv/bin/activate\nconda activate x\nwandb login $KEY\ncd /x && export A=1\ntrl grpo --loss_type grpo",
    ),
    "a here-document": (DAPO, "cat > x.txt <<EOF\ntrl grpo --loss_type dapo\nEOF\ntrl grpo --loss_type grpo\n"),
    "two branches that agree": (
        DAPO,
        "if [ $N -gt 1 ]; then\n  trl grpo --loss_type grpo --n 2\nelse\n  trl grpo --loss_type bnpo\nfi\n",
    ),
    "a function of its own": (DAPO, "run() {\n  trl grpo --loss_type grpo\n}\nrun\n"),
    "bash -c": (DAPO, "bash -lc 'trl grpo --loss_type grpo'\n"),
    "a job": (DAPO, "sbatch <<EOF\ntrl grpo --loss_type grpo\nEOF\n"),
    "a backslash at the end": (DAPO, "trl grpo --loss_type grpo \\\n"),
    "ray": (ANSWER, "ray job submit -- python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n"),
    "OpenRLHF's newer names": (ZERO2, "deepspeed --module openrlhf.cli.train_ppo_ray --ds.zero_stage 3\n"),
    "OpenRLHF's estimator": ("openrlhf-k3-gradient", "python -m openrlhf.cli.train_ppo_ray --algo.kl.estimator k1\n"),
    "TRL's command": ("trl-vllm-nan-logprob", "trl sft --bf16\n"),
    "a number": ("skyrl-rollout-temperature", "python x.py generator.sampling_params.temperature=1.0\n"),
    "ms-swift's preset": (ZERO2, "swift rlhf --rlhf_type grpo --deepspeed zero3\n"),
    "ms-swift's preset without offload": (OFFLOAD, "swift sft --deepspeed zero2\n"),
    "a document that is read": (ZERO2, f"set -x\nZ=3\nread -r -d '' training_commands <<EOF\n{OPENRLHF}EOF\n{MODULE}"),
    "a path of the environment": (DAPO, "A=(--out $HOME/x --loss_type grpo)\ntrl grpo ${A[@]} --x ${Y}/z\n"),
    "a default that is a word": (DAPO, "A=(--lr ${LR:-1e-6} --loss_type grpo)\ntrl grpo ${A[@]} --tp ${TP:-2}\n"),
    "numbers": (
        DAPO,
        "A=(--n $((B*C)) $(seq 1 9))\ntrl grpo ${A[@]} --g $(expr 16 / $N) --loss_type grpo --m $((D+1))\n",
    ),
    "slime's": ("slime-uneven-groups", SLIME),
}


@pytest.mark.parametrize("case", CERTAIN)
def test_what_the_run_gets_counts(excluded, case):
    name, text = CERTAIN[case]
    reason, _ = excluded(name, {"a.sh": text})
    assert reason


# What would hide a bug that the run has.
NOT_CERTAIN = {
    "verl's default, and a comment": (ANSWER, "python3 -m verl.trainer.main_ppo x.y=8  # algorithm.adv_estimator=grpo"),
    "a comment that ends the command": (DAPO, "trl grpo --bf16 \\\n  # one more \\\n  --loss_type grpo\n"),
    "one branch sets the constant": (DAPO, "LOSS=grpo\nif x; then LOSS=dapo; fi\ntrl grpo --loss_type $LOSS\n"),
    "a condition sets it": (DAPO, "LOSS=grpo\n[ $X ] && LOSS=dapo\ntrl grpo --loss_type $LOSS\n"),
    "a loop sets it": (DAPO, "LOSS=grpo\nfor LOSS in dapo; do trl grpo --loss_type $LOSS; done\n"),
    "a function sets it": (DAPO, "LOSS=grpo\nf() { LOSS=dapo; }\nf\ntrl grpo --loss_type $LOSS\n"),
    "read sets it": (DAPO, "LOSS=grpo\nread LOSS\ntrl grpo --loss_type $LOSS\n"),
    "printf sets it": (DAPO, "LOSS=grpo\nprintf -v LOSS x\ntrl grpo --loss_type $LOSS\n"),
    "an element": (DAPO, 'A=(--loss_type grpo)\nA[1]=dapo\ntrl grpo "${A[@]}"\n'),
    "a file that is not there sets it": (DAPO, "LOSS=grpo\nsource settings.sh\ntrl grpo --loss_type $LOSS\n"),
    "eval": (DAPO, "LOSS=grpo\neval $X\ntrl grpo --loss_type $LOSS\n"),
    "a default": (DAPO, "trl grpo --loss_type ${LOSS:-grpo}\n"),
    "a default of a constant": (DAPO, "LOSS=${LOSS:-grpo}\ntrl grpo --loss_type $LOSS\n"),
    "an array's part": (DAPO, 'A=(--loss_type grpo)\ntrl grpo "${A[@]:1}"\n'),
    "what a command prints": (DAPO, "LOSS=$(cat loss)\ntrl grpo --loss_type $LOSS\n"),
    "later": (DAPO, "trl grpo --loss_type $LOSS\nLOSS=grpo\n"),
    "in another process": (DAPO, "(LOSS=grpo)\ntrl grpo --loss_type $LOSS\n"),
    "for another command": (DAPO, "LOSS=grpo true\ntrl grpo --loss_type $LOSS\n"),
    "in single quotes": (DAPO, "LOSS=grpo\ntrl grpo --loss_type '$LOSS'\n"),
    "braces": (DAPO, "trl grpo --loss_type {grpo,dapo}\n"),
    "a default that is an option": (DAPO, "trl grpo --loss_type grpo ${MORE:---loss_type dapo}\n"),
    "a default of nothing": (DAPO, "trl grpo --loss_type grpo ${MORE:-}\n"),
    "a default of words": (DAPO, 'trl grpo --loss_type grpo ${MORE:-"--loss_type dapo"}\n'),
    "two that may be more": (DAPO, "trl grpo --loss_type grpo $A$B\n"),
    "a document that a condition reads": (
        ZERO2,
        f"if x; then read -r -d '' training_commands <<EOF\n{OPENRLHF.replace('$Z', '3')}EOF\nfi\n{MODULE}",
    ),
    "a document with more": (ZERO2, f"read -r -d '' training_commands <<EOF\n{OPENRLHF} $MORE\nEOF\n{MODULE}"),
    "words that may be more": (DAPO, "trl grpo --loss_type grpo $MORE\n"),
    "words of a constant that may be more": (DAPO, 'ARGS="--loss_type grpo $MORE"\ntrl grpo $ARGS\n'),
    "all arguments in quotes": (DAPO, 'trl grpo --loss_type grpo "$@"\n'),
    "a function's arguments": (DAPO, 'f() { trl grpo --loss_type grpo "$@"; }\nf --loss_type dapo\n'),
    "a command that lacks it": (DAPO, "trl grpo --loss_type grpo\ntrl grpo --lr 1\n"),
    "bash -c": (DAPO, "bash -c 'trl grpo --loss_type grpo --loss_type dapo'\n"),
    "no shell": (DAPO, "trl grpo --loss_type grpo\nif x; then y 'z\n"),
    "a word of IFS": (DAPO, "IFS=,\nA='--loss_type grpo,--loss_type dapo'\ntrl grpo --loss_type grpo $A\n"),
    "the penalty alone would do": (
        "trl-vllm-raw-logprobs",
        "trl grpo --use_vllm --temperature 1.0 --repetition_penalty 1.1\n",
    ),
    "a preset's offload": (OFFLOAD, "swift sft --deepspeed zero2_offload\n"),
    "TRL's own": ("trl-vllm-nan-logprob", "trl grpo --bf16\n"),
    "TRL's own and another": ("trl-vllm-nan-logprob", "trl sft --bf16\ntrl grpo --bf16\n"),
    "a program of that name": ("trl-vllm-nan-logprob", "python trl.py sft --bf16\n"),
    "one process of each machine": ("trl-metrics-deadlock", "torchrun --nproc_per_node 1 x.py --num_processes 1\n"),
    "another k": ("deepspeed-topk-drops", "python train.py --k 1\n"),
}


@pytest.mark.parametrize("case", NOT_CERTAIN)
def test_a_script_excludes_only_what_is_certain(excluded, case):
    name, text = NOT_CERTAIN[case]
    assert excluded(name, {"a.sh": text})[0] == ""


@pytest.mark.parametrize(("kind", "certain"), [("MULTI_GPU", True), ("FSDP", True), ("DEEPSPEED", False)])
def test_accelerate_without_deepspeed(excluded, kind, certain):
    files = {"a.yaml": f"distributed_type: {kind}\nnum_processes: 1\n"}
    assert excluded(ZERO2, files)[0] == "", "the trainer's own arguments may name a DeepSpeed file"
    assert bool(excluded(ZERO2, files | {"b.yaml": "learning_rate: 1e-5\n"})[0]) == certain
    assert excluded("trl-metrics-deadlock", files)[0] == "num_processes is 1 (a.yaml:2)"
    assert excluded(ZERO2, files | {"b.yaml": "deepspeed: zero2.json\n"})[0] == ""
    both = {"c.yaml": "distributed_type: MULTI_GPU\n", "c.json": '{"zero_optimization": {"stage": 2}}'}
    assert excluded(ZERO2, both)[0] == ""


def test_a_script_that_is_sourced_is_read(excluded):
    script = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "$D/other.sh"\n'
    files = {"a.sh": script + 'trl grpo "${ARGS[@]}"\n', "other.sh": "# x\nARGS=(\n --loss_type grpo)\n"}
    assert excluded(DAPO, files) == ("loss_type is grpo (a.sh:2)", [])
    Path("other.sh").unlink()
    reason, notes = excluded(DAPO, {"a.sh": files["a.sh"]})
    assert (reason, len(notes)) == ("", 1)
    assert notes[0].startswith("a.sh: ${ARGS[@]} may add options: replace it by its value")


def test_lines_are_the_scripts(excluded):
    reason, _ = excluded(DAPO, {"a.sh": "# é\nX='é'\ntrl grpo --out \"é$X é\" \\\n  --loss_type grpo\n"})
    assert reason == "loss_type is grpo (a.sh:4)"


def test_what_the_user_should_know_is_said_once(excluded):
    _, notes = excluded(DAPO, {"a.sh": "trl grpo --a 1 \\\n  # x \\\n  --bf16 \\\n  --loss_type grpo\ntrl sft $A $A\n"})
    assert notes[0].startswith("a.sh:3: --bf16 begins a command of its own, so the run does not get it: a comment ")
    assert notes[1] == "a.sh has 2 commands (lines 1, 5): a setting counts if each of them has it"
    assert len(notes) == 3


@pytest.mark.parametrize(
    ("run", "word", "file"),
    [
        ("python3 -m verl.trainer.main_ppo x.y=1 $@", "$@", "the `.hydra/overrides.yaml` of the run's output"),
        ("swift rlhf --rlhf_type grpo $MORE", "$MORE", "the options that the run has saved as YAML or JSON"),
    ],
)
def test_the_next_step_where_options_are_not_known(excluded, run, word, file):
    said = f"a.sh: {word} may add options: replace it by its value, or give {file}; no bug is excluded"
    assert excluded(ANSWER, {"a.sh": run}) == ("", [said])


def test_words_are_those_of_the_shell():
    text = 'X=\'a  b\' Y=\nx=c\nrun \'$x\' "$x"d\\ e {f} ${x}s "a\\"b\\n" $\'g\' $x$x --k="$x y" >z 2>&1 <<<w &\n'
    (command,) = shell.read(text).commands
    assert [word.text for word in command.words] == [
        "run",
        "$x",
        "cd e",
        "{f}",
        "cs",
        'a"b\\n',
        "$'g'",
        "cc",
        "--k=c y",
    ]
    assert [word.text for word in command.words if not word.known] == ["$'g'"]


@pytest.mark.parametrize(
    "words", ["pip install x", "uv pip install x", "python -m pip install x", "trl vllm-serve --model x"]
)
def test_commands_that_start_no_run(words):
    options = run_script.read(f"{words} --loss_type dapo\ntrl grpo --loss_type grpo\n", "a.sh", None)
    assert [value for key, value, _ in options.settings if key == "loss_type"] == ["grpo"]
