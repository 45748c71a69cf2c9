"""ms-swift's asynchronous rollouts use the adapter that the trainer has sent, not the base model."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TASKS = "tasks = [self.infer_async(infer_request, request_config, **kwargs) for infer_request in infer_requests]"
_BEFORE_4, _SINCE_4 = "swift.llm.infer.infer_engine", "swift.infer_engine"
_USES = {"CURRENT_ADAPTER": f"{__package__}._rollout_adapter:current_adapter"}


def _functions(package: str) -> tuple[str, str, str]:
    """GRPO's engine, and the functions that sample for one request and for a batch."""
    engine = f"{package}.grpo_vllm_engine:GRPOVllmEngine"
    return engine, f"{package}.vllm_engine:VllmEngine.infer_async", f"{engine}.async_infer"


def _with_the_adapter(versions: str, package: str) -> Variant:
    """The variant of releases whose engines are in ``package``."""
    engine, of_one, of_batch = _functions(package)
    return Variant(
        Guard("ms-swift", versions),
        (
            Rewrite(
                target=of_one,
                pattern="self.set_default_max_tokens(request_config, inputs)",
                replacement=(
                    "self.set_default_max_tokens(request_config, inputs); "
                    "adapter_request = await $CURRENT_ADAPTER(self, adapter_request)"
                ),
                alongside=("return await self._infer_full_async(**kwargs)",),
                uses=_USES,
            ),
            # One query for all requests of a batch.
            Rewrite(
                target=of_batch,
                pattern=_TASKS,
                replacement=(
                    f"kwargs['adapter_request'] = await $CURRENT_ADAPTER(self, kwargs.get('adapter_request')); {_TASKS}"
                ),
                uses=_USES,
            ),
        ),
        # These releases send adapters to the rollout server, and only its `infer` samples with them.
        where_defined=(f"{engine}._add_adapter",),
        unless_defined=(f"{engine}.infer_async",),
    )


PATCH = Patch(
    name="swift-async-rollout-lora",
    summary="a rollout server with vLLM's asynchronous engine samples with the adapter that the trainer sends",
    harm="wrong data",
    affects_rollouts=True,
    bug="rollouts come from the base model, without the trained adapter",
    when="swift rollout with vllm_use_async_engine and vllm_enable_lora",
    excluded_by=("vllm_enable_lora=false|absent", "vllm_use_async_engine=false|absent", "vllm_mode=colocate"),
    symptom="""\
`swift rollout` with `--vllm_use_async_engine true` and `--vllm_enable_lora true`, which includes multi-turn rollouts
with LoRA: the trainer's adapter arrives at the server, but every completion comes from the base model. The reward does
not improve, and importance ratios drift away from 1 as the adapter learns. No error is raised.""",
    cause="""\
`GRPOVllmEngine.infer` looks up the loaded adapter and adds it to its requests. With the asynchronous engine, the server
and the schedulers of multi-turn rollouts call `infer_async`, which was not changed and uses an adapter only if its
caller requests one.""",
    repair="""\
`infer_async` of GRPO's engine asks vLLM which adapter is loaded, as `infer` and 4.5.0 do, and samples with it. An
adapter that the caller names is kept. Before the first update, results are as before. Other engines (`swift deploy`,
`swift infer`) and engines without LoRA are not affected. The patch sends one query to the engine per batch, or per
turn.""",
    changes_numbers="""\
Since ms-swift 3.10.0, asynchronous rollouts with `vllm_enable_lora` were samples of the base model, so GRPO trained
off-policy, with a growing difference. With the patch, they are samples of the policy. Retrain an adapter that was
trained without the patch.""",
    references=(
        "https://github.com/modelscope/ms-swift/issues/9855",
        "https://github.com/modelscope/ms-swift/pull/9856",
    ),
    variants=(
        _with_the_adapter(">=3.10.0,<4.0.0", _BEFORE_4),
        _with_the_adapter(">=4.0.0,<4.5.0", _SINCE_4),
    ),
    obsolete_when="when the oldest ms-swift in use is 4.5.0",
    conditions=tuple(Condition(target) for package in (_BEFORE_4, _SINCE_4) for target in _functions(package)[1:]),
)
