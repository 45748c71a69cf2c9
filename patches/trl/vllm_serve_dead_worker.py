"""`trl vllm-serve` notices that a worker has died, instead of waiting for its answer."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="trl-vllm-serve-dead-worker",
    summary="`trl vllm-serve` answers with an error if a worker has died",
    harm="hang",
    affects_rollouts=True,
    bug="the server waits forever for the answer of a worker that has died",
    when="trl vllm-serve, if vLLM raises or is killed in a worker: out of memory, a prompt too long, a failed update",
    excluded_by=(
        "vllm_mode=colocate",
        "use_vllm=false|absent",
    ),
    symptom="""\
A rank of the trainer waits forever in `VLLMClient.generate` or in a weight update, and the other ranks wait in a
collective until NCCL's timeout. The server's log ends with a traceback of `Process-1` (or with none, if the worker was
killed), and the server process keeps running.""",
    cause="""\
`llm_worker` has no `except`, so its process ends. The server reads the worker's answers from a pipe, and also holds
the worker's end of it: `recv()` never reaches the end of the file.""",
    repair="""\
The server closes its copy of the worker's end once the worker has started. `recv()` then raises `EOFError` when the
worker is gone: the server logs it and answers requests with status 500, which `VLLMClient` raises in the trainer. A
server whose worker dies while it loads does not start. The worker is not restarted: with weights that nobody has
updated it would sample from the checkpoint.""",
    references=(
        "https://github.com/huggingface/trl/issues/3433",
        "https://github.com/huggingface/trl/pull/6628",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.17.0,<1.11.0"),
            (
                Rewrite(
                    target="trl.scripts.vllm_serve:main",
                    pattern="connections.append(parent_connection)",
                    replacement="child_connection.close(); connections.append(parent_connection)",
                    alongside=(
                        "parent_connection, child_connection = Pipe()",
                        "process = Process(target=llm_worker, $$$ARGUMENTS)",
                        "connection.recv()",
                    ),
                    unless=("child_connection.close()",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.11.0",
)
