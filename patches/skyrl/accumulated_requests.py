"""An advice for SkyRL's Tinker API on Megatron, where only the last request before an optimizer step counts."""

from __future__ import annotations

from rlhf_patches import Advice, Guard, Shape, Variant

_WORKER = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker:MegatronPolicyWorkerBase"
_API = "skyrl.backends.skyrl_train_backend:SkyRLTrainBackend"

ADVICE = Advice(
    name="skyrl-accumulated-requests",
    summary="on Megatron, each forward_backward request clears the gradients of the requests before it",
    harm="wrong gradient",
    bug="of several forward_backward requests before an optimizer step, only the last one is trained",
    when="SkyRL's Tinker API with --backend megatron, and a batch that the client sends as several requests",
    symptom="""\
A client of SkyRL's Tinker API calls `forward_backward` several times before `optim_step`, or Tinker's client splits a
large batch into several requests (more than 1,024 rows, or about 5 MB). With `--backend megatron` the optimizer step
has the gradient of the last request only. Requests that wait in the server together are run as one, so the result
depends on timing. No error.""",
    cause="""\
`MegatronPolicyWorkerBase.forward_backward` clears the gradient buffers when it starts. SkyRL's own trainers call it
once per optimizer step, so they are not affected. FSDP's workers accumulate.""",
    what_to_do="""\
Use SkyRL 0.4.0 or later, or `--backend fsdp`. Otherwise send the data of each optimizer step in one request that is
below the client's limits, with smaller batches if necessary.

The server's process logs this once, if it uses Megatron; whether a client sends several requests is not known to it. A
repair needs more than one line: the same call also reduces the gradients over ranks, and must not do so twice.""",
    references=("https://github.com/NovaSky-AI/SkyRL/pull/2008",),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<0.4.0"),
            (
                Shape(f"{_WORKER}.forward_backward", "chunk.zero_grad_buffer()"),
                Shape(
                    f"{_WORKER}.optim_step",
                    'self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler, name="actor")',
                    unless=("chunk.zero_grad_buffer()",),
                ),
                Shape(f"{_API}.optim_step", "self._dispatch.optim_step($$$)"),  # trainers do not import this
            ),
        ),
    ),
    obsolete_when="when the oldest SkyRL in use is 0.4.0",
)
