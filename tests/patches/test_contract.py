"""What holds for every patch, by itself: on the real text of each release at hand, and on the loaded framework.

The checks are those that a plugin's author inherits (rlhf_patches/testing). A release is at hand if it is installed or
lies beside the environment (tests/environments/side-by-side); for what is not on PyPI, the stand-ins. What else a patch
does is in the tests of its own folder.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.definitions.guard import NEWER, OLDER, Guard
from rlhf_patches.definitions.patch import Patch
from rlhf_patches.definitions.variant import Variant
from rlhf_patches.guards import memory, versions
from rlhf_patches.testing import cases, checks
from rlhf_patches.testing.cases import UNKNOWN
from tests.conftest import NEEDS
from tests.harness import forkserver, side_by_side
from tests.harness.forkserver import MEGATRON, PACKAGES, TORCH, TRL, Level, Levels

ROOT = Path(__file__).parents[2]
PATCHES = [item.patch for item in registry.load()[0] if isinstance(item.patch, Patch)]
READ = tomllib.loads((ROOT / "release_record" / "reviewed.toml").read_text())["accepted"]
STANDINS = ROOT / "tests" / "harness" / "standins"
ENVIRONMENTS = ROOT / "tests" / "environments"


def _pinned(files: Iterable[Path]) -> dict[str, set[str]]:
    pins = [re.findall(r"^([\w-]+)==([\w.]+)", file.read_text(), re.MULTILINE) for file in files]
    found = defaultdict(set)
    for name, version in itertools.chain(*pins):
        found[name].add(version)
    return found


BY_TRL = _pinned([ENVIRONMENTS / "trl.txt", *(ENVIRONMENTS / "side-by-side-trl").glob("*.txt")])
"""By distribution, its releases in the environment of the session trl-newest, and beside it."""


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """That of a release at hand."""

    folder: Path = Path()
    """Where the release's packages are."""
    beside: str | None = None
    """The folder's name beside the environment; None for the environment itself, or a stand-in."""

    __str__ = cases.Case.__str__

    @property
    def shape(self) -> tuple[str, int]:
        """The patch's name, and the number of the variant."""
        return self.patch.name, self.patch.variants.index(self.variant)


def at_hand(patch: KnownBug, variant: Variant, version: str, folder: Path, beside: str | None) -> Case:
    """The case of a release."""

    def read(module: str) -> str:
        return file_of(folder, module).read_text()

    return Case(patch, variant, version, read, folder=folder, beside=beside)


def file_of(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def releases(distribution: str) -> Iterator[tuple[str, Path, str | None]]:
    """Version and place of each release at hand."""
    try:
        installed = importlib.metadata.distribution(distribution)
        yield installed.version, Path(str(installed.locate_file(""))), None
    except importlib.metadata.PackageNotFoundError:
        pass
    for folder in sorted(side_by_side.ROOT.glob("*")):
        for metadata in folder.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
            yield metadata.name.removesuffix(".dist-info").rpartition("-")[2], folder, folder.name
    if distribution == "slime":
        yield UNKNOWN, STANDINS, None


def affected() -> Iterator[Case]:
    for patch in PATCHES:
        for variant in patch.variants:
            for version, folder, beside in releases(patch.distribution):
                there = all(file_of(folder, module).is_file() for module in variant.modules)
                verdict = versions.judge(variant.guard, version).verdict
                if there and (version == UNKNOWN or verdict is versions.Verdict.AFFECTED):
                    yield at_hand(patch, variant, version, folder, beside)
        if patch.name == "megatron-lm-no-sync-reentry":
            for name in ("megatron_lm", "megatron_lm_newer"):
                yield at_hand(patch, patch.variants[0], UNKNOWN, STANDINS / name, None)
        for name, standin in {
            "slime-context-parallel-whitening": "slime_loss",
            "slime-linear-attention-gradient": "slime_linear_attention",
        }.items():
            if patch.name == name:
                yield at_hand(patch, patch.variants[0], UNKNOWN, STANDINS / standin, None)


def fixed() -> Iterator[Case]:
    """Releases at hand whose modules are there and that no variant is for; the modules are those of the last one."""
    for patch in PATCHES:
        for version, folder, beside in releases(patch.distribution):
            verdicts = {versions.judge(variant.guard, version).verdict for variant in patch.variants}
            variant = patch.variants[-1]
            there = all(file_of(folder, module).is_file() for module in variant.modules)
            noted = READ.get(patch.name, {})
            if any(fnmatch.fnmatchcase(version, each) for each in noted):  # has the code, and not the bug
                continue
            if there and verdicts == {versions.Verdict.OUTSIDE}:
                yield at_hand(patch, variant, version, folder, beside)


def each_of(found: list[Any]) -> pytest.MarkDecorator:
    """One test for each; where there is none, a skip that says where there are."""
    reason = "no such release is in this environment; `make test` or `.cache/tools/bin/nox -s frameworks` runs these"
    return pytest.mark.parametrize(
        "case", found or [pytest.param(None, marks=pytest.mark.skip(reason=reason))], ids=str, scope="module"
    )


CASES = list(affected())


def at_an_end(case: Case) -> bool:
    """Whether its variant is the patch's first or last."""
    return case.variant in (case.patch.variants[0], case.patch.variants[-1])


def is_by_trl(*variants: Variant) -> bool:
    """Whether this is the other environment, and the one with DeepSpeed has a release of a shape, and its test."""
    if importlib.util.find_spec("deepspeed") is not None:
        return False
    return any(
        versions.judge(variant.guard, each).verdict is versions.Verdict.AFFECTED
        for variant in variants
        for each in BY_TRL.get(variant.guard.distribution, ())
    )


def one_for_each_end(found: list[Case]) -> list[Any]:
    """Further releases and shapes are among the exhaustive tests. One worker has all tests of a release."""
    seen: set[tuple[str, int]] = set()
    chosen = []
    for case in found:
        marks = [pytest.mark.xdist_group(f"{case.patch.distribution} {case.version}")]
        dear = case.shape in seen or not at_an_end(case) or is_by_trl(case.variant)
        chosen.append(pytest.param(case, marks=[*marks, pytest.mark.exhaustive] if dear else marks))
        seen.add(case.shape)
    return chosen


each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
each_case = each_of(one_for_each_end(CASES))


@pytest.fixture(scope="module")
def parsed() -> Iterator[None]:
    """Texts are parsed once for all patches of a release."""
    with memory.parsed_once(kept=40):
        yield


@pytest.fixture(scope="module")
def folder(case: Case, parsed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For copies of a case's text: one name for each release."""
    path = tmp_path_factory.getbasetemp() / f"{case.patch.distribution}-{case.version}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@each_case
def test_it_applies_to_the_text_of_the_release(folder, case):
    checks.applies(case, folder)


@each_case
def test_it_is_refused_where_the_text_is_another(folder, case):
    checks.refused_where_edited(case, folder)


@each_case
@pytest.mark.parametrize("version", [OLDER, NEWER])
def test_it_stays_away_from_versions_outside_its_range(folder, case, version):
    checks.stays_away_outside(case, folder, version)


@each_of(list(fixed()))
def test_it_leaves_a_release_without_the_bug_alone(folder, case):
    has_it = [other.version for other in CASES if other.patch == case.patch and other.version != UNKNOWN]
    checks.leaves_alone(case, folder, has_it[0] if has_it else None)


# ------------------------------------------------------------------------------------- on the loaded framework


def levels(case: Case) -> Levels:
    """What has to be loaded before the modules of a case can be imported."""
    (module, *_) = case.variant.modules
    folder = str(side_by_side.folder(case.beside)) if case.beside else None
    if stands_in(case):
        return (*MEGATRON, Level("tests.harness.loading:torch", str(case.folder)))
    if module.startswith(("accelerate.", "deepspeed.", "math_verify.", "openrlhf.")):
        return forkserver.beside(case.beside, module.partition(".")[0])
    if module.startswith("torch."):
        return TORCH
    if module.startswith("trl."):
        if importlib.util.find_spec("deepspeed") is None:  # beside ms-swift
            return forkserver.beside(case.beside, "trl_grpo")
        return TRL if folder is None else (*TORCH, Level("tests.harness.loading:trl", folder))
    if module.startswith("transformers."):
        return forkserver.beside(case.beside, "trainer")
    if module.startswith("peft."):
        return forkserver.peft(case.beside)
    if module.endswith(".worker_dispatch"):
        return (*PACKAGES, Level("tests.harness.loading:skyrl_dispatch", folder))
    if module.startswith("transformer_engine."):
        return forkserver.transformer_engine(str(case.beside).removeprefix("transformer-engine-"))
    if module.startswith("skyrl.") and case.patch.name == "skyrl-rollout-temperature":
        return forkserver.skyrl_inference(str(case.beside).removeprefix("skyrl-"))
    if module.startswith("skyrl."):
        release = str(case.beside).removeprefix("skyrl-")
        if module.endswith((".trainer", ".ppo_utils")):
            return forkserver.skyrl_trainer(release)
        found = forkserver.skyrl(release, "0.3") if release == "0.4" else forkserver.skyrl(release)
        return (*found, forkserver.SKYRL_WORKERS) if module.endswith(".worker") else found
    if module == "verl.workers.engine_workers":
        return forkserver.verl_workers()
    if module.endswith("sft_trainer"):
        return forkserver.verl_sft(str(case.beside).removeprefix("verl-") if case.beside else None)
    if module == "verl.trainer.ppo.ray_trainer":
        engine = forkserver.verl_engine(str(case.beside).removeprefix("verl-") if case.beside else None)
        return (*engine, Level("tests.harness.loading:verl_driver"))
    if module.startswith(("verl.trainer.ppo.v1.", "verl.trainer.main_ppo_sync")):
        workers = forkserver.verl_workers(str(case.beside).removeprefix("verl-") if case.beside else None)
        return (*workers, Level("tests.harness.loading:verl_v1_trainer"))
    if module.startswith("verl.experimental.agent_loop."):
        return forkserver.verl_agent_loop(str(case.beside).removeprefix("verl-") if case.beside else None)
    if module.startswith("verl.workers.rollout.vllm_rollout."):
        return forkserver.verl_engine(str(case.beside).removeprefix("verl-") if case.beside else None)
    if module.startswith("verl.") and case.patch.name != "verl-no-sync-reentry":
        return forkserver.verl(str(case.beside).removeprefix("verl-") if case.beside else None)
    if module.startswith("swift.megatron.") and folder is not None:
        trainers = {"kto_trainer": "swift_kto", "grpo_trainer": "swift_megatron_rollouts"}
        return forkserver.swift(case.beside, trainers.get(module.rpartition(".")[2], "swift_megatron"))
    affects_rollouts = (".vllm_engine", ".rollout", ".rollout_mixin")
    # 4.0's GRPO trainer cannot be imported without vLLM, Megatron's or not.
    if module.startswith("swift.") and module.endswith(
        (*affects_rollouts, *[".grpo_trainer"] * (case.beside == "swift-4.0"))
    ):
        return forkserver.swift(case.beside, "swift_engine")
    if module.startswith("swift.") and not module.endswith("trainers.base"):
        return forkserver.swift(case.beside, "swift_megatron" if ".megatron." in module else "swift_transformers")
    if module == "megatron.core.extensions.transformer_engine":
        return forkserver.megatron_with_transformer_engine("2.13", *([case.beside] if case.beside else []))
    if module.startswith("megatron.core") and folder is not None:
        return (*TORCH, Level("tests.harness.loading:megatron", folder))
    return forkserver.trainer("_".join(module.split(".")[: 1 + module.startswith("megatron.")]))


def stands_in(case: Case) -> bool:
    return case.folder.is_relative_to(STANDINS)


def live() -> list[Case]:
    """One release for each variant; a stand-in where the release's own module needs more than can be installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    chosen: dict[tuple[str, int], Case] = {}
    for case in sorted(CASES, key=stands_in):
        if stands_in(case) and importlib.util.find_spec("megatron") is None:
            continue
        if case.shape not in chosen or stands_in(case):
            chosen[case.shape] = case
    return list(chosen.values())


def on_what_is_installed(found: list[Case]) -> list[Any]:
    """Each patch once, in one environment; to load another release takes seconds, so those are exhaustive.

    A patch that is for none of what is installed has its newest.
    """
    first = {case.patch.name: case for case in sorted(found, key=lambda case: case.beside is None or stands_in(case))}
    return [
        case
        if case is first[case.patch.name] and not is_by_trl(*case.patch.variants)
        else pytest.param(case, marks=pytest.mark.exhaustive)
        for case in found
    ]


@each_of(on_what_is_installed(live()))
def test_applied_reverted_and_disabled_on_the_loaded_framework(run_ranks, case):
    arguments = map(str, case.shape)
    (found,) = run_ranks(
        "tests.patches.contract_ranks", *arguments, levels=levels(case), ranks=1, TORCHDYNAMO_DISABLE="1"
    )
    if has_what_is_beside(case):
        checks.lives_as_it_should(case.patch, found)
        return
    assert found["applied"]["status"] == "unaffected"
    name = case.variant.guard.co_installed.distribution
    reason = found["applied"]["reason"]
    assert f"is not affected with {name} " in reason or f" has the defect only with {name}, " in reason
    assert all(all(found[state]["own code"]) for state in ("applied", "reverted", "disabled"))


def has_what_is_beside(case: Case) -> bool:
    """Whether the release of another distribution that counts is one beside which the bug shows."""
    other = case.variant.guard.co_installed
    if other is None:
        return True
    folders = [folder for level in levels(case) if level.path for folder in level.path.split(os.pathsep)]
    found = next(iter(importlib.metadata.distributions(name=other.distribution, path=[*folders, *sys.path])), None)
    if found is None:  # it is optional
        return False
    guard = Guard(other.distribution, other.versions)
    return versions.judge(guard, found.version).verdict is versions.Verdict.AFFECTED


@each_patch
def test_a_release_is_at_hand(patch):
    """Else nothing above has been said of it."""
    if not any(case.patch == patch for case in CASES):
        top = patch.modules[0].partition(".")[0]
        _, session = NEEDS.get(f"patches/{top}", ("", "frameworks"))
        command = f".cache/tools/bin/nox -s {session}"
        pytest.skip(f"no release of {patch.distribution} is here; `make test` or `{command}` runs these")
