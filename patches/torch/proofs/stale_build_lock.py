"""A C++ extension whose build was killed, with a real compiler and SIGKILL."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

SECONDS = 5
KILLED = Case(
    "torch",
    "torch-stale-build-lock",
    "a build was killed",
    "cpp_extension.load after the build of the same extension was killed",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Whether the next process that needs the extension loads it, or still waits after some seconds."""
    (report,) = reports
    found = report["killed"]
    waits, answer = found["without"].get("waits", False), found["with"].get("answer")
    without = f"waits, {SECONDS} s and more" if waits else "does not wait"
    after = f"built in {found['with']['seconds']:.1f} s" if answer else "NOT built"
    verdict = "it is loaded" if answer == 42 else "NO"
    yield Row(KILLED, report["version"], without, after, verdict, waits and answer == 42, (without, after, verdict))


PROOF = Proof((KILLED,), rows, seconds=40, arguments=("--short", str(SECONDS), "killed"), needs=("ninja",))
