"""ms-swift's rollout server: a weight update that failed is an error of the next rollout."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_BEFORE = {"BEFORE_CALL": f"{__package__}._rollout_worker_failures:before_call"}
_AFTER = {"AFTER_FAILURE": f"{__package__}._rollout_worker_failures:after_failure"}
_CATCHES = "logger.error(f'Method execution failed: {method_name}\\n{traceback.format_exc()}')"
_ENGINE = "rollout_engine = $$$OF"  # until 3.9 the asynchronous worker calls it engine


def _loop(target: str, call: str) -> tuple[Rewrite, ...]:
    return (
        Rewrite(
            target=target,
            pattern=call,
            replacement=f"$BEFORE_CALL(rollout_engine, method_name, kwargs); {call}",
            alongside=(_CATCHES, _ENGINE),
            uses=_BEFORE,
        ),
        Rewrite(
            target=target,
            pattern="result = None",
            replacement="result = $AFTER_FAILURE(rollout_engine, method_name, kwargs)",
            alongside=(_CATCHES, _ENGINE),
            uses=_AFTER,
        ),
    )


def _worker(module: str) -> tuple[Rewrite, ...]:
    return _loop(f"{module}:llm_worker", "result = method(*args, **kwargs)")


def _async_worker(module: str) -> tuple[Rewrite, ...]:
    return _loop(f"{module}:async_llm_worker", "result = await method(*args, **kwargs)")


_MODULE, _MODULE_4 = "swift.llm.infer.rollout", "swift.pipelines.infer.rollout"

PATCH = Patch(
    name="swift-rollout-update-failed",
    summary="a weight update that fails in the rollout server ends the run, instead of rollouts from old weights",
    harm="wrong data",
    affects_rollouts=True,
    bug="rollouts are sampled from old or partly updated weights, after a line in the server's log",
    when="swift rollout, and an update of vLLM's weights that raises",
    excluded_by=("vllm_mode=colocate", "use_vllm=false|absent"),
    symptom="""\
The log of `swift rollout` says `Method execution failed: collective_rpc`, once for each update or each part of one, and
training goes on: completions come from the weights that vLLM had, or from some of the new ones. The trainer, whose
request was answered before, knows nothing of it.""",
    cause="""\
The loop of the server's workers logs what a call raises, and goes on with None for its result. Updates of weights have
no result that anybody reads: the server sends them and does not wait.""",
    repair="""\
A worker in which an update has failed (`update_*`, `process_weights_after_loading`) samples no more: the next request
for rollouts is answered at once, with status 500 and the reason, and the trainer raises with it. So it is with what
`infer` itself raises, which the trainer saw as `Internal Server Error`. A new trainer that connects to the server
starts anew. Where nothing raises nothing changes, nor does what other calls that raise are answered with.

Not repaired: an update that raises before its broadcast, for which the trainer waits; and the asynchronous worker of
3.6.0 to 3.9.3, which hides failures as well.""",
    references=(
        "https://github.com/modelscope/ms-swift/blob/v4.6.0/swift/pipelines/infer/rollout.py",
        "https://github.com/huggingface/trl/pull/6628",
    ),
    variants=(
        Variant(Guard("ms-swift", ">=3.10.0,<4.0.0"), (*_worker(_MODULE), *_async_worker(_MODULE))),
        Variant(Guard("ms-swift", ">=4.0.0,<=4.6.0"), (*_worker(_MODULE_4), *_async_worker(_MODULE_4))),
    ),
    obsolete_when="when a failed update is an error of ms-swift's own; 4.6.0, the newest, has none",
)
