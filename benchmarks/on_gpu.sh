#!/usr/bin/env bash
# All that only a GPU can tell, in commands of at most nine minutes: `bash benchmarks/on_gpu.sh WHAT...`.
#   carry     here, with an index: what the machine with the GPU lacks, as wheels of Linux and Python 3.12, into .gpu
#   setup     there, before anything else: these installed into /tmp/site, TRL 1.5.1 into /tmp/old
#   kernels   the Triton kernels against float64, on one rank and on two
#   logprob   benchmarks/logprob_on_gpu.py
#   fuzz      random programs against the in-place gradient
#   prove     `prove --gpu` of each patch whose proof computes on a GPU
#   tests     tests/gpu, with the rehearsal of right runs in bf16
# The machine brings torch for CUDA, Triton, transformers and pytest.
set -u
cd "$(dirname "$0")/.."
LINUX="--no-deps --only-binary=:all: --python-version 3.12 --implementation cp"
for tag in 2_28_x86_64 2_27_x86_64 2_17_x86_64 2014_x86_64 1_x86_64; do
    LINUX+=" --platform manylinux${tag/#2_/_2_}"
done
WHEELS="transformers==5.23.0 tokenizers==0.23.3 safetensors==0.8.0 huggingface-hub==1.33.0 accelerate==1.15.0 trl==1.16.0
    peft==0.21.2 datasets==5.2.0 dill multiprocess megatron-core==0.16.1 liger-kernel==0.8.5"
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1

carry() {
    mkdir -p .gpu/wheels .gpu/old .gpu/side-by-side
    # shellcheck disable=SC2086
    python3 -m pip download -q $LINUX -d .gpu/wheels $WHEELS && python3 -m pip download -q $LINUX -d .gpu/old trl==1.5.1
    python3 -m pip wheel -q --no-deps -w .gpu/wheels .
    for folder in .nox/environment/side-by-side/skyrl-0.[23]; do
        for part in skyrl-*.dist-info skyrl/backends/skyrl_train/distributed/megatron/model_utils.py; do
            (cd "$folder/.." && cp -r --parents "$(basename "$folder")"/$part ../../../.gpu/side-by-side)
        done
    done
    du -sh .gpu
}

setup() {
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site .gpu/wheels/*.whl
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/old .gpu/old/*.whl
    rm -rf /tmp/site/rlhf_patches  # the checkout's own
    ln -sfn ../patches rlhf_patches/patches
    ln -sfn "$PWD/.gpu/side-by-side" "$(python3 -c 'import sys; print(sys.prefix)')/side-by-side"
}

kernels() { python3 -m pytest -q -p no:cacheprovider tests/gpu/test_fused.py; }

logprob() {
    python3 benchmarks/logprob_on_gpu.py --rounds 7 --sequences 8192
    # Of the others, 80 GB hold Liger's alone.
    python3 benchmarks/logprob_on_gpu.py --rounds 7 --sequences 32768 --only Liger "ours, operators" ours
    python3 benchmarks/logprob_on_gpu.py --rounds 7 --sequences 8192 --dtype float32 --only torch ours
}

fuzz() { python3 tests/patches/vocab_parallel/fuzz_ownership.py --seed 1 --seconds 40 --device cuda; }

prove() {
    local names="transformers-accumulation-scale transformers-eval-loss transformers-first-token-count
        transformers-smoothed-labels transformers-moe-aux-loss transformers-packed-documents peft-lora-merge-drift"
    for name in $names; do python3 -m rlhf_patches prove --gpu "$name" >"/tmp/prove-$name" 2>&1 & done
    # TRL 1.5.1, with the machine's own transformers
    PYTHONPATH=/tmp/old:$PYTHONPATH python3 -m rlhf_patches prove --gpu trl-grpo-dapo-scale trl-grpo-truncated-count \
        >/tmp/prove-trl 2>&1 &
    wait
    tail -n +2 -q /tmp/prove-*
}

tests() { python3 -m pytest -q -p no:cacheprovider -n 8 tests/gpu; }

for what in "$@"; do
    echo "== $what, after $SECONDS s"
    "$what"
done
echo "== done, after $SECONDS s"
