"""Math-Verify's timeouts off the main thread: use no signal, so there is no error and no reward of 0."""

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

- verl up to 0.7.1, whose reward loop calls reward functions in an executor:
  `verl.utils.reward_score.math_verify.compute_score` swallows the error, and **every reward is 0**, without a message;
- TRL up to 0.29.1, `accuracy_reward` and `reasoning_accuracy_reward` in a thread: `ValueError: Math-Verify 'parse'
  function doesn't support threaded environment due to usage of signal.alarm() in timeout mechanism`;
- a custom reward function, in any framework: the same `ValueError`, or `signal only works in main thread of the main
  interpreter`, or, in Math-Verify up to 0.7.0, only a parse without a result and a comparison that is false.""",
    cause="""\
`timeout` in `math_verify.utils` sets an alarm by `signal.signal`, which Python allows on the main thread only. verl
catches every `Exception` and returns 0. verl 0.8.0 starts processes for Math-Verify. TRL 1.0.0 runs Math-Verify without
a timeout off the main thread, so an answer that never ends stops the training ([verl had this
change](https://github.com/verl-project/verl/pull/5839), and reverted it).""",
    repair="""\
Off the main thread a timer replaces the alarm: when the seconds are over, it raises in that thread the exception that
the alarm would raise. The exception arrives between two steps of Python code: Math-Verify's computations end in time,
with the results of the main thread. An alarm also interrupts a sleep, a lock, or input and output, in your own function
under `timeout`; the timer's exception arrives when these are over. Neither interrupts a long call of C code.

One thread of a process computes at a time. This costs nothing, since Python runs one thread at a time anyway. Each
computation has its seconds to itself, and sympy and mpmath, which share a precision between threads, are not entered
twice. No thread waits for its turn longer than its own seconds, or for a thread that is a second past its limit: then
it computes concurrently. So answers that never end, however many, hold others up once, and a function under `timeout`
may wait for threads that call Math-Verify. On the main thread nothing changes.

The patch repairs all frameworks that call Math-Verify, with any reward function. Where a timeout is switched off
(`parsing_timeout=None`), it stays so. The patch does not change Math-Verify before 0.6.1.""",
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
