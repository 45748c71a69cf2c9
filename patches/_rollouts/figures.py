"""The figures of rollouts: what each is, its limit, and why that limit."""

from __future__ import annotations

from rlhf_patches.watching import Figure

_LARGEST_DIFFERENCE = 0.1
_TIMES_USUAL = 3.0
_FLOOR = 0.03
_LEAST_CHANCE = 30.0

LOG_PROBABILITIES = f"""\
`log-probabilities`: the mean over the sampled tokens of |trainer - engine|, in nats, of each batch of rollouts: above
{_LARGEST_DIFFERENCE:g}, or above {_FLOOR:g} and {_TIMES_USUAL:g} times the median of the run's first ten. Kernels that
round differently give 0.001 to 0.03 in bfloat16, more with mixtures of experts and FP8; another policy than the one
that is trained gives 0.2 and more. Three times as much is still rounding where that is below {_FLOOR:g}."""

DROPOUT = f"""\
Dropout that is active where the trainer computes its log-probabilities makes them differ with nothing wrong: 0.32 nats
with GPT-2's own, more and more with LoRA's, whose adapters add nothing when training begins. The line names it first.
With LoRA's the limit alone counts. With the model's own a value counts where it is above both, the limit and
{_TIMES_USUAL:g} times the median of the run's first ten, so a fault that is there in all of these is not seen; a limit
that is set counts by itself. A model without dropout, or with `disable_dropout`, is looked at from its first batch."""

LENGTHS = """\
`short-completions`: the share of completions that are one token, where one of these is not the end of a text, and a
longer prompt of the run shows that the engine's context was not full with it: above 0.99.

`long-completions`: the tokens of the longest completion beyond the limit: above 0."""

PROMPTS = """\
`other-prompts`: rows of a batch in which the prompt that the engine says it answered is not the row's own: above 0."""

EQUAL = f"""\
`equal-completions`: in groups whose completions are all the same, -log of the chance of that, in nats, by the
log-probabilities that the engine gave: above {_LEAST_CHANCE:g}. A policy that has become certain repeats itself,
with a chance near 1; engines that share a seed do so with one below 1e-13."""

SAMPLES = f"{EQUAL}\n\n{LENGTHS}"


def log_probabilities(watch: str, points_to: tuple[str, ...], local: bool = False) -> Figure:
    """Of a number that all ranks have; ``local``: that is noted on one rank alone, which need not be the first."""
    return Figure(
        watch,
        "log-probabilities",
        "trainer and engine differ by {} nats per sampled token",
        _LARGEST_DIFFERENCE,
        times=_TIMES_USUAL,
        floor=_FLOOR,
        points_to=points_to,
        local=local,
    )


def equal_completions(watch: str, points_to: tuple[str, ...]) -> Figure:
    """Of this rank's groups."""
    return Figure(
        watch,
        "equal-completions",
        "all completions of a group are the same, of which the chance is e^-{}",
        _LEAST_CHANCE,
        points_to=points_to,
        local=True,
    )


def short_completions(watch: str, points_to: tuple[str, ...]) -> Figure:
    """Of this rank's completions."""
    return Figure(
        watch,
        "short-completions",
        "completions end after one token, which is no end of a text: a share of {}",
        0.99,
        points_to=points_to,
        local=True,
    )


def long_completions(watch: str, points_to: tuple[str, ...]) -> Figure:
    """Of this rank's completions."""
    return Figure(
        watch, "long-completions", "a completion is {} tokens beyond the limit", 0.0, points_to=points_to, local=True
    )


def other_prompts(watch: str, points_to: tuple[str, ...]) -> Figure:
    """Of this rank's rows."""
    return Figure(
        watch,
        "other-prompts",
        "the engine was given something else than the row's own prompt, in {} rows of a batch",
        0.0,
        points_to=points_to,
        local=True,
    )
