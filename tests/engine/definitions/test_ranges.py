"""Ranges that are told without packaging: as packaging tells them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from rlhf_patches import DefinitionError, Guard
from rlhf_patches.definitions import ranges
from rlhf_patches.patches.catalogue import LISTED

RELEASES = ("0", "0.9", "1", "1.0.0", "1.0.1", "1.10", "2.0")
SUFFIXES = ("", "a1", "rc1", ".post0", ".post1", ".dev0", "rc1.dev1", "+cu128", "-1", "c1")
VERSIONS = [release + suffix for release in RELEASES for suffix in SUFFIXES]


@pytest.mark.parametrize("sign", [">=", "<=", "==", "!=", ">", "<", "~=", "===", ""])
def test_they_are_as_packaging_has_them(sign):
    told = 0
    for specifier in [*(sign + each for each in VERSIONS), f" {sign} 1.0 ,", f"{sign}1.0.*", f"{sign}1.0.1,>0.9,<1.10"]:
        for version in VERSIONS:
            found = ranges.plainly_contains(specifier, version)
            if found is not None:
                told += 1
                assert found == SpecifierSet(specifier).contains(Version(version), prereleases=True), (
                    specifier,
                    version,
                )
    assert (told > 200) == (sign in ranges._COMPARED)


SIGNS = (">=", "<=", "==", "!=", ">", "<")
ENDS = [sign + version for sign in SIGNS for version in ("0.9", "1.0", "1.0rc1", "1.0.post1", "1.0.dev0", "1.0.1")]


def test_ranges_that_are_apart_have_no_version_in_common():
    """With any version that packaging can tell apart from a bound: none is in both."""
    near = [Version(f"{release}{suffix}") for release in ("0.9", "1.0", "1.0.0.1", "1.0.1") for suffix in SUFFIXES[:8]]
    contained = {
        text: {version for version in near if SpecifierSet(text).contains(version, prereleases=True)}
        for text in [*ENDS, ">=0.9,<1.0", ">=1.0,<1.0.1", ">0.9,<=1.0,!=0.9.5"]
    }
    told = 0
    for one, of_one in contained.items():
        for other, of_other in contained.items():
            if ranges.plainly_apart(one, other):
                told += 1
                assert of_one.isdisjoint(of_other), (one, other)
    assert told > 100
    assert ranges.plainly_apart("<1.0", ">=1.0")
    assert ranges.plainly_apart("==1.0.1", ">=0.9,<1.0.1")
    assert not ranges.plainly_apart("<=1.0", ">=1.0")
    assert not ranges.plainly_apart("<1.0rc1", ">=1.0.dev0")  # 1.0.dev1


def test_no_built_in_patch_needs_packaging_for_its_variants():
    for listed in LISTED:
        for one, other in itertools.combinations(listed.variants, 2):
            assert ranges.plainly_apart(one.versions, other.versions), listed.name


@given(
    st.text("0123456789.<>=!~, *abrcpostdev+-v\n\u0663", max_size=12), st.text("0123456789.\n v+a\u0663", max_size=6)
)
@settings(max_examples=300, deadline=None)
def test_of_what_packaging_does_not_take_nothing_is_told(specifier, version):
    try:
        expected = SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        assert ranges.plainly_contains(specifier, version) is None
    else:
        assert ranges.plainly_contains(specifier, version) in (None, expected)


@pytest.mark.parametrize(
    "version",
    ["1.0rc1", "1.0.post1", "1.0+CU128", "1.0+", "1.0+a\n", "1.0rc1+cu1", "1!1.0", "v1.0", "head", "1" * 5000],
)
def test_a_version_that_is_not_plain_is_left_to_packaging(version):
    assert ranges.plainly_contains(">=0.1,<2", version) is None


@pytest.mark.parametrize("sign", ["<", "<=", "==", "!=", ">", ">=", "~=", "==="])
@pytest.mark.parametrize("bound", ["1.9", "2.0", "2.0.1", "2.0rc1", "2.0.post1", "2.0+cu1", "3"])
@pytest.mark.parametrize("version", ["2.0+cu1", "2.0.0+cu1.2", "2.0+cpu", "3.0+x"])
def test_a_build_of_a_release_is_that_release(sign, bound, version):
    try:
        expected = SpecifierSet(f"{sign}{bound}").contains(Version(version), prereleases=True)
    except InvalidSpecifier:
        return
    assert ranges.plainly_contains(f"{sign}{bound}", version) in (None, expected)
    if sign in ("<", "<=", "==", ">=") and bound in ("1.9", "2.0", "2.0rc1"):
        assert ranges.plainly_contains(f"{sign}{bound}", version) is expected


BOUNDS = ("<=1.0", "<=1.0.1", "<1.0", "==1.0", ">=0.9,<=1.0", ">=1.0,<2", ">=2.0,<=3.0", "<=1.0,<=0.9", "<=1.0rc1")


@pytest.mark.parametrize("versions", BOUNDS)
@pytest.mark.parametrize(
    "version", ["0.9", "1.0", "1.0.0", "1.0.1", "1.1", "3", "4.0", "1.0rc1", "1.0.post1", "1.0+cu1"]
)
def test_a_range_ends_before_what_is_newer_than_what_was_read(versions, version):
    ends = [pin.version for pin in SpecifierSet(versions) if pin.operator == "<="]
    newer = any(not SpecifierSet(f"<={end}").contains(version, prereleases=True) for end in ends)
    assert ranges.ends_before(versions, version) == newer


def test_no_built_in_patch_needs_packaging():
    """So that `apply` does without for every release that is no pre-release."""
    for listed in LISTED:
        for variant in listed.variants:
            for each in filter(None, (variant, variant.co_installed)):
                assert ranges.plainly_contains(each.versions, "1.0") is not None, listed.name


def test_a_specifier_that_is_none_is_an_error():
    with pytest.raises(DefinitionError, match=r"Guard\.versions is '=>1': expected a PEP 440 specifier"):
        Guard("some-framework", "=>1")
