"""Ranks for tests of patches on real frameworks."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from rlhf_patches.definitions.patch import Patch
from rlhf_patches.testing import PatchContract
from rlhf_patches.testing.cases import INSTALLED
from tests.harness import torchrun
from tests.harness.forkserver import ForkServer, Levels, skyrl, trainer
from tests.harness.once import once
from tests.harness.torchrun import Reports

OF_RELEASES = 2
"""Of the releases that a patch's contract names, `make test` takes the installed one and the first."""
OF_ALL = (
    *("test_its_fields_are_complete", "test_what_it_waits_for_has_a_bound"),
    *("test_it_has_no_side_effects", "test_it_knows_and_does_not_infer"),
)
"""Of a patch's contract what test_each_patch.py says of every patch."""
OF_INSTALLED = (
    *("test_it_applies_to_the_text", "test_it_is_refused_where_the_text_is_another"),
    *("test_it_stays_away_from_versions_outside_its_range", "test_it_leaves_a_release_without_the_bug_alone"),
    "test_it_is_applied_reverted_and_disabled_in_this_process",
)
"""And what test_contract.py says of every patch on the installed release, but in the environment with vLLM."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """The others are exhaustive; the record of all releases says the same of each (tests/record)."""
    contract = getattr(item, "cls", None)
    if isinstance(contract, type) and issubclass(contract, PatchContract):
        name = getattr(item, "originalname", "")
        called = getattr(item, "callspec", None)
        release = called.params.get("release", INSTALLED) if called else INSTALLED
        again = name in OF_ALL or (name in OF_INSTALLED and release == INSTALLED and not find_spec("vllm"))
        again = again and isinstance(contract.patch, Patch)
        if again or release not in (INSTALLED, *contract.releases)[:OF_RELEASES]:
            item.add_marker(pytest.mark.exhaustive)


ROLLOUTS = "tests.harness.rollout_training"


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> None:
    """accelerate collects garbage after each run: half a second for all that frameworks have imported."""
    gc.freeze()


@pytest.fixture(scope="session")
def run_ranks(forkserver: ForkServer, of_the_session: Path) -> Callable[..., Reports]:
    """Run a worker on forks of a fork server; returns each rank's report.

    Runs with the same arguments happen once a session: they are deterministic.
    """
    done: dict[str, str] = {}

    def run(worker: str, *arguments: str, levels: Levels, ranks: int = 2, **settings: str) -> Reports:
        key = repr((worker, arguments, levels, ranks, sorted(settings.items())))
        if key not in done:
            reports = once(
                of_the_session / "ranks",
                key,
                lambda out: forkserver.run(worker, arguments, out, levels, ranks=ranks, settings=settings),
            )
            done[key] = json.dumps(reports)
        return json.loads(done[key])

    return run


@pytest.fixture(scope="session")
def run_with_torchrun(of_the_session: Path) -> Callable[..., Reports]:
    """The same through torchrun, in fresh interpreters of ``python``."""

    def run(worker: str, *arguments: str, python: str = sys.executable, ranks: int = 2, **settings: str) -> Reports:
        key = ("torchrun", worker, arguments, python, ranks, sorted(settings.items()))
        return once(
            of_the_session / "ranks",
            key,
            lambda out: torchrun.launch(worker, arguments, out, python, settings, ranks),
        )

    return run


@pytest.fixture(scope="session")
def train(run_ranks: Callable[..., Reports]) -> Callable[..., Reports]:
    """Run tests/harness/rollout_training.py on two ranks."""

    def run(*arguments: str, **settings: str) -> Reports:
        entry = arguments[arguments.index("--entry") + 1] if "--entry" in arguments else ""
        return run_ranks(ROLLOUTS, *arguments, levels=trainer(entry), **settings)

    return run


@pytest.fixture(scope="session")
def skyrl_ranks(run_ranks: Callable[..., Reports]) -> Callable[..., Reports]:
    """Run a worker of tests/patches/skyrl on two ranks with a release of SkyRL."""

    def run(release: str, *arguments: str, worker: str, **options: Any) -> Reports:
        # What SkyRL compiles is one product and sum; compiling it would take a GPU, or a minute.
        options = {"levels": skyrl(release), "TORCHDYNAMO_DISABLE": "1", **options}
        return run_ranks(f"tests.patches.skyrl.{worker}", *arguments, **options)

    return run


@pytest.fixture(scope="session")
def gathers_per_chunk() -> bool:
    """Whether the installed release of TRL gathers within each chunk (1.6.0 and later), or not at all."""
    return Version(importlib.metadata.version("trl")) >= Version("1.6.0")
