"""TransformerEngine's fused cross-entropy, its own kernels interpreted on the CPU: the worker of the tests."""

from __future__ import annotations

from collections.abc import Iterator

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import transformer_engine

PATCH = "transformer-engine-cross-entropy-backward"
# As tests/patches/transformer_engine/cross_entropy_backward_ranks.py names them.
CASES = {
    "2.7": {
        "masked": Case("transformer-engine", PATCH, "first token masked", "fused cross-entropy, first token masked"),
    },
    "2.10": {
        "megatron": Case(
            "transformer-engine", PATCH, "Megatron, 2 sequences", "the same as Megatron calls it, micro batch of 2"
        ),
    },
}


def row(runner: Runner, release: str) -> Iterator[Row]:
    """The norm of the gradient, and how far it is from float64's, of which it is a fraction."""
    worker = "tests.patches.transformer_engine.cross_entropy_backward_ranks"
    (report,) = runner.forked(worker, *CASES[release], levels=transformer_engine(release), ranks=1)
    for name, case in CASES[release].items():
        before, after = (report[state][name] for state in ("before", "after"))
        without = f"norm {before['norm']:.3f}, off by {before['gradient']:.0%}"
        with_it, exact = f"norm {after['norm']:.3f}", f"float64 {after['exact norm']:.3f}"
        yield Row(
            case,
            report["version"],
            without,
            with_it,
            exact,
            before["gradient"] > 0.1 and after["gradient"] < 1e-6,
            (f"gradient: {without}", f"{with_it}, off by {after['gradient']:.0e}", exact),
        )


GROUPS = tuple(
    Group(tuple(cases.values()), lambda runner, release=release: row(runner, release))
    for release, cases in CASES.items()
)
