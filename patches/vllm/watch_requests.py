"""vLLM: a trainer's adapter is loaded, and no request is for it."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

NAME = "vllm-watch-requests"
LIMIT = 2
BASE_MODEL = ("swift-async-rollout-lora",)
_HERE = f"{__package__}._watched_requests"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"

WATCH = Watch(
    name=NAME,
    summary="an engine is looked at for adapters of a trainer that no request asks for, which is said once",
    symptom=f"""\
One line for each engine, or each of its pipeline's stages, at level warning:

    vllm-watch-requests: the trainer has sent 3 adapters, and every request since the first was for the base model
    at request 1025 (limit {LIMIT}). ...""",
    cause="""\
Rollouts come from the base model: whoever asks the engine for them does not say that the adapter is to be used, so what
the trainer has learned is never sampled from. Rewards do not move, and the engine's log-probabilities are further
from the trainer's with each step.""",
    looks_at="""\
In the worker, of each adapter that is loaded whether it came as tensors (`lora_tensors` of a `LoRARequest`, by which
verl and ms-swift hand over the policy's), and of each request that begins whether it names an adapter. Both are plain
objects that the worker is called with.

Not looked at are adapters from a folder, since a server for users may well have some that nobody asks for, nor the
warm-up's own, nor batches without a request, which ranks without work compute. The first request that is for any
adapter ends it for this engine. Nor are engines looked at whose steps go past that worker: vLLM's V0, those on Ray's
executor (verl and ms-swift choose another one), and hardware that has a worker of its own (GPUs, CPUs and XPUs
share one).""",
    limits=f"""\
`unused-adapters`: how many adapters have come from the trainer and were followed by requests, while not one request
since the first of them was for an adapter: above {LIMIT}. One is not enough: requests may have waited in the engine's
queue since before it came, or be an evaluation of the base model, or a teacher's log-probabilities. A trainer that
sends its third has made two updates from rollouts, and where none of those was sampled with an adapter, it
trains on those of the base model. Requests are not counted, because a queue may be of any length.""",
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
                    signature_suffices="it reads an attribute of the argument, and says nothing where there is none",
                ),
                Wrap(
                    target=f"{_WORKER}.execute_model",
                    implementation=f"{_HERE}:around_execute_model",
                    signature="(self, scheduler_output)",
                    signature_suffices="it reads which requests are new, and says nothing where that is another thing",
                ),
            ),
        ),
    ),
    obsolete_when="when vLLM itself says that an adapter is loaded and not used",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
