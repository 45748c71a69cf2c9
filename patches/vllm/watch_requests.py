"""vLLM: detect an adapter that a trainer has loaded and no request uses."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

NAME = "vllm-watch-requests"
LIMIT = 2
BASE_MODEL = ("swift-async-rollout-lora",)
_HERE = f"{__package__}._watched_requests"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"

WATCH = Watch(
    name=NAME,
    summary="logs once if no request uses the adapters that a trainer sends to an engine",
    symptom=f"""\
One line for each engine, or each of its pipeline stages, at level warning:

    vllm-watch-requests: the trainer has sent 3 adapters, and every request since the first was for the base model
    at request 1025 (limit {LIMIT}). ...""",
    cause="""\
Rollouts come from the base model: requests to the engine do not name the adapter, so the engine never samples from what
the trainer has learned. Rewards do not improve, and the engine's log-probabilities diverge from the trainer's with each
step.""",
    looks_at="""\
In the worker: for each loaded adapter, whether it was sent as tensors (`lora_tensors` of a `LoRARequest`, with which
verl and ms-swift send the policy's adapter), and for each request that begins, whether it names an adapter. Both are
plain objects that the worker receives as arguments.

The watch ignores the warm-up's own adapters, batches without a request, which ranks without work compute, and adapters
from a folder, because a server for users may have adapters that no request uses. The first request for any adapter ends
the watch for this engine. The watch does not cover engines whose steps bypass that worker: vLLM's V0, engines on Ray's
executor (verl and ms-swift choose another one), and hardware that has a worker of its own (GPUs, CPUs and XPUs share
one).""",
    limits=f"""\
`unused-adapters`: the number of adapters that the trainer has sent and that were followed by requests. The watch warns
above {LIMIT}, if none of these requests was for an adapter. One adapter is not enough: requests may have waited in the
engine's queue since before the adapter, or be an evaluation of the base model, or a teacher's log-probabilities. A
trainer that sends its third adapter has made two updates from rollouts. If no rollout was sampled with an adapter, the
trainer trains on rollouts of the base model. The watch does not count requests, because a queue may have any
length.""",
    points_to=BASE_MODEL,
    references=(
        "https://github.com/modelscope/ms-swift/issues/9855",
        "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_worker.py",
    ),
    variants=(
        Variant(
            Guard("vllm", ">=0.7.3"),
            (
                Wrap(
                    target=f"{_WORKER}.add_lora",
                    implementation=f"{_HERE}:around_add_lora",
                    signature="(self, lora_request)",
                    signature_suffices="it reads an attribute of the argument, and logs nothing where there is none",
                ),
                Wrap(
                    target=f"{_WORKER}.execute_model",
                    implementation=f"{_HERE}:around_execute_model",
                    signature="(self, scheduler_output)",
                    signature_suffices="it reads which requests are new, and logs nothing where the attribute differs",
                ),
            ),
        ),
    ),
    obsolete_when="when vLLM itself reports that an adapter is loaded and not used",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
