"""ms-swift's rollout server: a failed weight update is an error of the next rollout."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_BEFORE = {"BEFORE_CALL": f"{__package__}._rollout_worker_failures:before_call"}
_AFTER = {"AFTER_FAILURE": f"{__package__}._rollout_worker_failures:after_failure"}
_CATCHES = "logger.error(f'Method execution failed: {method_name}\\n{traceback.format_exc()}')"
_ENGINE = "rollout_engine = $$$OF"  # until 3.9 the variable of the asynchronous worker is named engine


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
    summary="a weight update that fails in the rollout server ends the run; no rollouts come from old weights",
    harm="wrong data",
    affects_rollouts=True,
    bug="rollouts are sampled from old or partly updated weights, with only a line in the server's log",
    when="swift rollout, and an update of vLLM's weights that raises",
    excluded_by=("vllm_mode=colocate", "use_vllm=false|absent"),
    symptom="""\
`swift rollout` logs `Method execution failed: collective_rpc`, once for each update or each part of one, and training
continues: completions come from the weights that vLLM had, or from some of the new ones. The trainer, whose request was
answered before, does not detect it.""",
    cause="""\
The loop of the server's workers logs what a call raises, and continues with None as its result. Nothing reads the
result of a weight update: the server sends the update and does not wait.""",
    repair="""\
A worker with a failed update (`update_*`, `process_weights_after_loading`) samples no more. The server answers the next
request for rollouts at once, with status 500 and the reason, and the trainer raises with it. The same holds for errors
of `infer` itself, which the trainer saw as `Internal Server Error`. A new trainer that connects to the server clears
the failure. If no call raises, nothing changes. The answers to other calls that raise are unchanged.

The patch does not repair an update that raises before its broadcast, for which the trainer waits, or the asynchronous
worker of 3.6.0 to 3.9.3, which hides failures as well.""",
    references=(
        "https://github.com/modelscope/ms-swift/blob/v4.6.0/swift/pipelines/infer/rollout.py",
        "https://github.com/huggingface/trl/pull/6628",
    ),
    variants=(
        Variant(Guard("ms-swift", ">=3.10.0,<4.0.0"), (*_worker(_MODULE), *_async_worker(_MODULE))),
        Variant(Guard("ms-swift", ">=4.0.0,<=4.6.0"), (*_worker(_MODULE_4), *_async_worker(_MODULE_4))),
    ),
    obsolete_when="when ms-swift itself raises for a failed update; 4.6.0, the newest, does not",
)
