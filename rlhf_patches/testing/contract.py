"""The contract of a patch, as a test class to inherit from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest

from ..definitions import ranges
from ..definitions.bug import KnownBug
from ..definitions.guard import NEWER, OLDER
from ..definitions.patch import Advice
from ..offline import download, members
from . import checks, in_process, rules
from .cases import INSTALLED, Case, NoCase, case_of


class PatchContract:
    """The requirements of every patch and advice. Inherit from it and set the patch:

        class TestContract(PatchContract):
            patch = PATCH

    The tests run on the installed release and on those in ``releases``. A test that needs a release with the bug, or
    one without it, is skipped if there is none; the message has what to install or to name.

    Attributes:
        patch: the `Patch` or the `Advice`.
        releases: further releases, with and without the bug: each a wheel, an sdist, a directory (relative to pytest's
            working directory), or ``NAME==VERSION``, which pip downloads once, into a cache.
        open_range: why the range of the patch may be open at an end; None if it must be closed.
        held: the tests for each rule in docs/writing-a-patch.md ("minimal scope", "no side effects", "backward
            compatible", "no new blocking"), and for each claim of its texts ("bit for bit", "as before"; words of the
            text): the name of a test of this module, or ``FILE.py::name``, several of them, or a reason that begins
            with "because ". None skips the test, with a message on what to write.
    """

    patch: ClassVar[KnownBug]
    releases: ClassVar[tuple[str, ...]] = ()
    open_range: ClassVar[str | None] = None
    held: ClassVar[rules.Held | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on each release."""
        name, patch = type(self).__name__, getattr(self, "patch", None)
        if not isinstance(patch, KnownBug):
            pytest.fail(f"{name}.patch is {patch!r}: expected a rlhf_patches.Patch, or an Advice", pytrace=False)
        if not isinstance(self.releases, (tuple, list)):
            pytest.fail(f"{name}.releases is {self.releases!r}: expected a tuple of releases", pytrace=False)
        if not isinstance(self.held, (Mapping, type(None))):
            pytest.fail(f"{name}.held is {self.held!r}: expected a dictionary of tests by rule", pytrace=False)
        if "release" in metafunc.fixturenames:
            metafunc.parametrize("release", (INSTALLED, *self.releases))

    def test_its_fields_are_complete(self) -> None:
        """Summary, symptom, cause, references and the other texts are written."""
        checks.fields_are_complete(self.patch)

    def test_what_it_waits_for_has_a_bound(self) -> None:
        """No lock, queue, thread or future without a timeout, in its implementations and the code that they use."""
        checks.waits_have_bounds(self.patch)

    def test_it_has_no_side_effects(self) -> None:
        """No assignment to arguments of its implementations, and no call that is known to write."""
        checks.side_effects(self.patch)

    def test_it_knows_and_does_not_infer(self) -> None:
        """No decision by a name, signature, stack or autograd graph without a comment that justifies it."""
        checks.it_knows(self.patch)

    def test_what_holds_it_is_named(self) -> None:
        """Each rule, and each sentence that promises no change, names a test."""
        if isinstance(self.patch, Advice):
            pytest.skip("an advice changes no code")
        by = self.held
        if by is None:
            named = ", ".join(f'"{rule}": ...' for rule in rules.RULES)
            sentences = "".join(f"\n- {sentence}" for sentence in rules.claims(self.patch))
            claims = " and, with words of it as the key, for each sentence that promises no change:"
            claims = f"{claims}{sentences}" if sentences else ""
            pytest.skip(
                f"{type(self).__name__}.held is None: write held = {{{named}}}, with the tests of each, or a "
                f'reason that begins with "because ",{claims}'.rstrip(",")
            )
        tests = rules.tests_by_file(by, Path(str(sys.modules[type(self).__module__].__file__)))
        tests[""] |= {name for name in dir(self) if name.startswith("test")}
        checks.is_held([self.patch], by, tests)

    def test_it_applies_to_the_text(self, release: str, tmp_path: Path) -> None:
        """It recognizes the release's code, also without a known version."""
        checks.applies(self._with_the_bug(release), tmp_path)

    def test_it_is_refused_where_the_text_is_another(self, release: str, tmp_path: Path) -> None:
        """It is refused if any function that it changes is edited."""
        checks.refused_where_edited(self._with_the_bug(release), tmp_path)

    @pytest.mark.parametrize("version", [OLDER, NEWER])
    def test_it_stays_away_from_versions_outside_its_range(self, release: str, version: str, tmp_path: Path) -> None:
        """It does not apply to the same code with the oldest and the newest possible version."""
        if self.open_range and checks.is_open_at(self.patch, version):
            pytest.skip(f"its range is open: {self.open_range}")
        checks.stays_away_outside(self._with_the_bug(release), tmp_path, version)

    @pytest.mark.parametrize("version", [OLDER, NEWER])
    def test_it_stays_away_beside_other_releases(self, release: str, version: str, tmp_path: Path) -> None:
        """If it requires another distribution: the same code with the oldest and the newest version of that."""
        case = self._with_the_bug(release)
        other = case.variant.guard.co_installed
        if other is None:
            pytest.skip("it requires no other distribution")
        if self.open_range and ranges.parsed(other.versions).contains(version, prereleases=True):
            pytest.skip(f"its range is open: {self.open_range}")
        checks.stays_away_beside(case, tmp_path, version)

    def test_it_leaves_a_release_without_the_bug_alone(self, release: str, tmp_path: Path) -> None:
        """Whatever version the release claims to be."""
        case = self._case(release)
        if case.affected:
            self._skip(case, "has the bug", "name a release that does not have it")
        guards = [variant.guard for variant in self.patch.variants]
        checks.leaves_alone(case, tmp_path, guards[-1].shares_a_version_with(guards[-1]))

    def test_it_is_applied_reverted_and_disabled_in_this_process(self) -> None:
        """Other code while applied; the original code objects after a revert, and under RLHF_PATCHES_DISABLE."""
        case = self._with_the_bug(INSTALLED)
        try:
            in_process.import_all(case.variant.modules)
        except ImportError as error:
            pytest.skip(f"{case}: it cannot be imported here ({type(error).__name__}: {error})")
        checks.lives_as_it_should(self.patch, in_process.life(self.patch, case.variant))

    def _case(self, release: str) -> Case:
        try:
            return case_of(self.patch, release)
        except NoCase as error:
            pytest.skip(str(error))
        except (members.ReleaseError, download.DownloadError) as error:
            pytest.fail(f"{type(self).__name__}.releases names {release!r}: {error} (in {Path.cwd()})", pytrace=False)

    def _with_the_bug(self, release: str) -> Case:
        case = self._case(release)
        if not case.affected:
            self._skip(case, f"does not have the bug ({self.patch.versions})", "install or name a release that has it")
        return case

    def _skip(self, case: Case, why: str, what_to_do: str) -> NoReturn:
        """Skip a test that is for the other kind of releases; the message has what to do if there is none of these."""
        for release in (INSTALLED, *self.releases):
            try:
                if case_of(self.patch, release).affected != case.affected:
                    what_to_do = f"this test runs on {'the installed release' if release == INSTALLED else release}"
                    break
            except (NoCase, AssertionError, members.ReleaseError, download.DownloadError):
                continue
        else:
            what_to_do += f", in {type(self).__name__}.releases"
        pytest.skip(f"{case.patch.distribution} {case.version} {why}; {what_to_do}")
