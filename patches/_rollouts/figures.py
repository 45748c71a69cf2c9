"""The figures of rollouts: the meaning of each, its limit, and the reason for the limit."""

from __future__ import annotations

from rlhf_patches.watching import Figure

_LARGEST_DIFFERENCE = 0.1
_TIMES_USUAL = 3.0
_FLOOR = 0.03
_LEAST_CHANCE = 30.0

LOG_PROBABILITIES = f"""\
`log-probabilities`: the mean over a batch's sampled tokens of |trainer - engine|, in nats. The watch warns above
{_LARGEST_DIFFERENCE:g}. It also warns above {_FLOOR:g} if the value exceeds {_TIMES_USUAL:g} times the median of the
run's first ten. Kernels that round differently give 0.001 to 0.03 in bfloat16, more with mixtures of experts and FP8,
so a value below {_FLOOR:g} may be rounding. A policy other than the trained one gives 0.2 and more."""

DROPOUT = f"""\
If dropout is active when the trainer computes log-probabilities, they differ without an error. With GPT-2's own dropout
they differ by 0.32 nats. With LoRA's the difference grows, because adapters add 0 when training begins. The warning
names the dropout first. With LoRA's dropout only the limit applies. With the model's own, a value counts if it is above
both the limit and {_TIMES_USUAL:g} times the median of the run's first ten, so an error that these ten have, too, is
not detected. A limit that you set applies alone. A model without dropout, or with `disable_dropout`, is checked from
its first batch."""

LENGTHS = """\
`short-completions`: the share of completions with one token. The watch warns above 0.99, if at least one of these
tokens does not end a text, and a longer prompt of the run shows that the engine's context was not full.

`long-completions`: the number of tokens by which the longest completion exceeds the limit. The watch warns above 0."""

PROMPTS = """\
`other-prompts`: rows of a batch for which the engine reports another prompt than the row's own. The watch warns above
0."""

EQUAL = f"""\
`equal-completions`: for groups whose completions are all equal, the negative logarithm of the probability of this, in
nats, from the engine's log-probabilities, less ln 2 for each group: of many groups, some are equal by chance. The watch
warns above {_LEAST_CHANCE:g}. A policy that has become certain repeats itself with a probability near 1. Engines that
share a seed do so with a probability below 1e-13."""

SAMPLES = f"{EQUAL}\n\n{LENGTHS}"


def log_probabilities(watch: str, points_to: tuple[str, ...], local: bool = False) -> Figure:
    """For a number that all ranks have; ``local``: for a number that one rank, not always the first, notes."""
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
    """For this rank's groups."""
    return Figure(
        watch,
        "equal-completions",
        "all completions of a group are equal; the chance of this is e^-{}",
        _LEAST_CHANCE,
        points_to=points_to,
        local=True,
    )


def short_completions(watch: str, points_to: tuple[str, ...]) -> Figure:
    """For this rank's completions."""
    return Figure(
        watch,
        "short-completions",
        "completions end after one token that does not end a text: a share of {}",
        0.99,
        points_to=points_to,
        local=True,
    )


def long_completions(watch: str, points_to: tuple[str, ...]) -> Figure:
    """For this rank's completions."""
    return Figure(
        watch, "long-completions", "a completion is {} tokens beyond the limit", 0.0, points_to=points_to, local=True
    )


def other_prompts(watch: str, points_to: tuple[str, ...]) -> Figure:
    """For this rank's rows."""
    return Figure(
        watch,
        "other-prompts",
        "the engine did not receive the row's own prompt in {} rows of a batch",
        0.0,
        points_to=points_to,
        local=True,
    )
