"""transformers-accumulation-scale on real releases of transformers, from the first that it repairs to the newest.

A few are in the session ``exhaustive``. Where EVERY_TRANSFORMERS is set, the last of each minor release is fetched and
run as well, and both sides of what changed within one: 43 wheels, 3 GB unpacked.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import pytest
from packaging.version import Version

from tests.harness import unpacked
from tests.harness.forkserver import TORCH, Level

pytestmark = pytest.mark.exhaustive
WORKER = "tests.patches.transformers.accumulation_scale_release"
LEVELS = (*TORCH, Level("tests.harness.loading:packages_below_transformers"))
#: float32 against float64; seen are 2e-6.
TOLERANCE = 1e-5
STEPS = 8

EVERY = bool(os.environ.get("EVERY_TRANSFORMERS"))
#: One for each way in which the patch changes them; both sides of the Accelerator's second division.
FEW = ("4.48.3", "4.54.1", "5.0.0", "5.5.3", "5.23.0")
OTHERS = (
    *("4.48.1", "4.49.0", "4.50.3", "4.51.3", "4.52.4", "4.53.3", "4.55.4", "4.56.2", "4.57.6", "5.1.0", "5.2.0"),
    *("5.3.0", "5.4.0", "5.5.4", "5.6.2", "5.7.0", "5.8.1", "5.9.0", "5.10.4", "5.11.0", "5.12.1", "5.13.1", "5.14.1"),
    *("5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2"),
)
#: The last that is right, and those that divide nothing, or what they should not.
EARLIER = ("4.45.2", "4.46.0", "4.46.1", "4.46.3", "4.47.0", "4.47.1", "4.48.0")
#: The first release that takes the loss of a model's forward for divided, and the first in which it is, if any.
BELIEVED = {
    "Llama, classes": ("4.54", None),
    "Llama, a number": ("4.54", None),
    "BERT, classes": ("5.0", None),
    "BERT, masked words": ("5.0", None),
    "T5": ("5.0", None),
    "Llama, words": ("4.46", "4.46"),
    "Llama, smoothed": ("4.46", "5.15"),
    "Llama, spans": ("4.46", "4.53"),
}
#: The first release whose Accelerator divides every loss, whatever Trainer does, and the first again in which not.
DIVIDED_AGAIN = (Version("5.2"), Version("5.5.4"))
each_case = pytest.mark.parametrize("case", BELIEVED)


def beside(version: Version) -> list[str]:
    """That release, with releases of what it insists on."""
    needed = [f"transformers=={version}"]
    for before, tokenizers in (("4.47", "0.20.3"), ("4.56", "0.21.4"), ("5.16", "0.22.2")):
        if version < Version(before):
            needed.append(f"tokenizers=={tokenizers}")
            break
    if version < Version("5.18"):
        needed.append(f"huggingface-hub=={'0.36.2' if version.major < 5 else '1.33.0'}")
    return needed


def report_of(release: str, run_ranks: Any) -> dict[str, Any]:
    installed = release == importlib.metadata.version("transformers")
    path = "" if installed else unpacked.folders(*beside(Version(release)))
    (report,) = run_ranks(WORKER, "--first", path, levels=LEVELS, ranks=1)
    assert report["version"] == release
    return report


@pytest.fixture(scope="module", params=sorted((*FEW, *OTHERS) if EVERY else FEW, key=Version))
def found(request, run_ranks):
    """The version, and the report."""
    return Version(request.param), report_of(request.param, run_ranks)


def released(case: str, version: Version) -> tuple[float, float]:
    """How many times too large the gradient is and the loss that is logged, of one sample after the other."""
    since, until = BELIEVED[case]
    undivided = Version(since) <= version and (until is None or version < Version(until))
    again = DIVIDED_AGAIN[0] <= version < DIVIDED_AGAIN[1]
    times = STEPS if undivided else 1
    return times / (STEPS if again else 1), times


def check(found: dict[str, Any], gradient: float, logged: float) -> None:
    assert found["gradient"] == pytest.approx(gradient, rel=TOLERANCE)
    assert found["beside"] < TOLERANCE
    assert found["logged"] == pytest.approx(logged, rel=TOLERANCE)


@each_case
def test_without_it_the_gradient_grows_with_the_steps(found, case):
    """Of some models; and in some releases that of the others shrinks."""
    version, report = found
    for state in ("before", "reverted"):
        check(report[state][case]["at once"], 1, 1)
        check(report[state][case]["one by one"], *released(case, version))
    assert report["before"][case] == report["reverted"][case]


@each_case
def test_with_it_the_gradient_is_that_of_all_samples_at_once(found, case):
    _, report = found
    assert report["status"] == "applied"
    for how in ("at once", "one by one"):
        check(report["after"][case][how], 1, 1)


@each_case
def test_what_was_right_is_so_bit_for_bit(found, case):
    version, report = found
    assert report["after"][case]["at once"] == report["before"][case]["at once"]
    if released(case, version) == (1, 1):
        assert report["after"][case]["one by one"] == report["before"][case]["one by one"]


@pytest.mark.parametrize("release", EARLIER if EVERY else EARLIER[-1:])
def test_earlier_releases_are_left_alone(run_ranks, release):
    report = report_of(release, run_ranks)
    assert report["status"] == "unaffected"
    assert report["before"] == report["after"] == report["reverted"]
