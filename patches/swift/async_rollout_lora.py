"""ms-swift's asynchronous rollouts: with the adapter that the trainer has sent, not the base model."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_TASKS = "tasks = [self.infer_async(infer_request, request_config, **kwargs) for infer_request in infer_requests]"
_USES = {"CURRENT_ADAPTER": f"{__package__}._rollout_adapter:current_adapter"}


def _with_the_adapter(versions: str, package: str) -> Variant:
    """Of releases whose engines are in ``package``."""
    affects_rollouts = f"{package}.grpo_vllm_engine:GRPOVllmEngine"
    return Variant(
        Guard("ms-swift", versions),
        (
            Rewrite(
                target=f"{package}.vllm_engine:VllmEngine.infer_async",
                pattern="self.set_default_max_tokens(request_config, inputs)",
                replacement=(
                    "self.set_default_max_tokens(request_config, inputs); "
                    "adapter_request = await $CURRENT_ADAPTER(self, adapter_request)"
                ),
                alongside=("return await self._infer_full_async(**kwargs)",),
                uses=_USES,
            ),
            # Asked once for all requests of a batch.
            Rewrite(
                target=f"{affects_rollouts}.async_infer",
                pattern=_TASKS,
                replacement=(
                    f"kwargs['adapter_request'] = await $CURRENT_ADAPTER(self, kwargs.get('adapter_request')); {_TASKS}"
                ),
                uses=_USES,
            ),
        ),
        # Adapters are sent to the rollout server, and only its `infer` samples with them.
        where_defined=(f"{affects_rollouts}._add_adapter",),
        unless_defined=(f"{affects_rollouts}.infer_async",),
    )


PATCH = Patch(
    name="swift-async-rollout-lora",
    summary="a rollout server with vLLM's asynchronous engine samples with the adapter that the trainer sends",
    harm="wrong data",
    affects_rollouts=True,
    bug="rollouts are the base model's, whatever the adapter has learned",
    when="swift rollout with vllm_use_async_engine and vllm_enable_lora",
    excluded_by=("vllm_enable_lora=false|absent", "vllm_use_async_engine=false|absent", "vllm_mode=colocate"),
    symptom="""\
`swift rollout` with `--vllm_use_async_engine true` and `--vllm_enable_lora true`, and so multi-turn rollouts with LoRA:
the trainer's adapter arrives at the server, and every completion is still the base model's. The reward does not move;
importance ratios drift away from 1 as the adapter learns. No error.""",
    cause="""\
`GRPOVllmEngine.infer` looks for the adapter that was loaded and adds it to its requests. With the asynchronous engine
the server, and the schedulers of multi-turn rollouts, call `infer_async`, which was not changed and asks for an adapter
only where its caller does.""",
    repair="""\
`infer_async` of GRPO's engine asks vLLM which adapter is loaded, as `infer` and 4.5.0 do, and samples with that. An
adapter that the caller names is kept, before the first update everything is as before, and so are other engines
(`swift deploy`, `swift infer`) and engines without LoRA. It is one question to the engine for a batch, or
for each turn.""",
    changes_numbers="""\
Since ms-swift 3.10.0 asynchronous rollouts with `vllm_enable_lora` were samples of the base model, so GRPO trained off
policy, ever further. With the patch they are samples of the policy. An adapter that was trained so should be trained
again.""",
    references=(
        "https://github.com/modelscope/ms-swift/issues/9855",
        "https://github.com/modelscope/ms-swift/pull/9856",
    ),
    variants=(
        _with_the_adapter(">=3.10.0,<4.0.0", "swift.llm.infer.infer_engine"),
        _with_the_adapter(">=4.0.0,<4.5.0", "swift.infer_engine"),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.5.0",
)
