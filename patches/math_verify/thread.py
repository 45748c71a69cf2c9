"""Math-Verify's timeouts off the main thread: no signal, so no error, and no reward of 0 in its place."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Signature, Variant, Wrap

PATCH = Patch(
    name="math-verify-thread",
    summary="Math-Verify works, with its timeouts, off the main thread: no rewards of 0 from verl, no error from TRL",
    harm="wrong data",
    bug="Math-Verify fails off the main thread: with verl every reward is 0, with TRL an error",
    when="a reward function that uses Math-Verify and is called in a thread",
    symptom="""\
A reward function that uses Math-Verify, called off the main thread of its process:

- verl to 0.7.1, whose reward loop calls reward functions in an executor:
  `verl.utils.reward_score.math_verify.compute_score` swallows the error, and **every reward is 0**, in silence;
- TRL to 0.29.1, `accuracy_reward` and `reasoning_accuracy_reward` in a thread: `ValueError: Math-Verify 'parse'
  function doesn't support threaded environment due to usage of signal.alarm() in timeout mechanism`;
- a reward function of your own, in any framework: the same `ValueError`, or `signal only works in main thread of the
  main interpreter`, or, in Math-Verify to 0.7.0, nothing but a parse without a result and a comparison that
  is false.""",
    cause="""\
`timeout` in `math_verify.utils` sets an alarm by `signal.signal`, which Python allows on the main thread only. verl
catches every `Exception` and returns 0. verl 0.8.0 starts processes for Math-Verify; TRL 1.0.0 runs it without a
timeout where it is not on the main thread, so an answer that takes for ever stops the training
([verl had that](https://github.com/verl-project/verl/pull/5839), and took it back).""",
    repair="""\
Off the main thread a timer takes the place of the alarm: when the seconds are over, it raises in that very thread the
exception that the alarm would raise. It arrives between two steps of Python code: what Math-Verify computes ends in
time, with the results of the main thread. An alarm also interrupts a sleep, a lock, or input and output, in a function
of your own under `timeout`; the timer's exception comes when these are over. Neither interrupts a long call of C code.

One thread of a process computes at a time. That costs nothing, since Python runs one at a time anyway; but each
computation has its seconds to itself, and sympy and mpmath, which share a precision between threads, are not entered
twice. No thread waits for its turn longer than for the seconds that it has itself, nor for one that is a second past
its own: then it computes beside the others. So answers that never end hold others up once, however many they are, and a
function under `timeout` may wait for threads that call Math-Verify. On the main thread nothing changes.

All frameworks that call Math-Verify are repaired by this, wherever the reward function comes from. Where a timeout is
switched off (`parsing_timeout=None`), it stays so. Math-Verify before 0.6.1 is left alone.""",
    references=(
        "https://github.com/verl-project/verl/issues/3407",
        "https://github.com/verl-project/verl/pull/5635",
        "https://github.com/verl-project/verl/pull/5839",
        "https://github.com/huggingface/trl/pull/5281",
        "https://github.com/huggingface/Math-Verify/issues/55",
    ),
    signatures=(
        Signature(
            "ValueError",
            "doesn't support threaded environment due to usage of signal.alarm()",
            frames=("math_verify.parser:parse", "math_verify.grader:verify.compare_single_extraction_wrapper"),
        ),
        Signature(
            "ValueError",
            "signal only works in main thread of the main interpreter",
            frames=("math_verify.utils:timeout.decorator.wrapper",),
            specific=False,
        ),
    ),
    variants=(
        Variant(
            Guard("math-verify", ">=0.6.1,<=0.9.0"),
            (
                Wrap(
                    target="math_verify.utils:timeout",
                    implementation=f"{__package__}._deadline:around_timeout",
                    fingerprints={
                        "af56c71d84b209f1": "0.6.1 to 0.7.0",
                        "6413991f6aceb8ec": "0.8.0 to 0.9.0: can be switched off",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when Math-Verify's timeouts work in threads",
)
