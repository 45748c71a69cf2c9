"""Ranges that are told without packaging: as packaging tells them."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from rlhf_patches import DefinitionError, Guard
from rlhf_patches.definitions import ranges
from rlhf_patches.patches.catalogue import LISTED


def numbers(most=4):
    return st.lists(st.sampled_from((0, 0, 1, 2, 10)), min_size=1, max_size=most).map(
        lambda each: ".".join(map(str, each))
    )


SUFFIXES = ("", "", "a1", "b0", "rc1", ".post0", ".post1", ".dev0", ".dev2", "rc1.dev1", "+cu128", "-1", "c1")
SIGNS = (">=", "<=", "==", "!=", ">", "<", "~=", "===", "=", "")
versions = st.builds("{}{}".format, numbers(), st.sampled_from(SUFFIXES))
spaces = st.sampled_from(("", "", " "))
items = st.builds(
    "{}{}{}{}".format, st.sampled_from(SIGNS), spaces, versions, st.sampled_from(("", "", ".*", " ", ","))
)
specifiers = st.lists(items, max_size=3).map(",".join)


@given(specifiers, st.one_of(numbers(), versions))
@example(">1.0,<2", "1.0.0")
@example("==1.0.*", "1.0")
@example("<1.0rc1", "1")
@settings(max_examples=300, deadline=None)
def test_they_are_as_packaging_has_them(specifier, version):
    found = ranges.plainly_contains(specifier, version)
    if found is not None:
        assert found == SpecifierSet(specifier).contains(Version(version), prereleases=True)


@given(st.text("0123456789.<>=!~, *abrcpostdev+-v\n\u0663", max_size=12), st.text("0123456789.\n v\u0663", max_size=6))
@settings(max_examples=300, deadline=None)
def test_of_what_packaging_does_not_take_nothing_is_told(specifier, version):
    try:
        expected = SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        assert ranges.plainly_contains(specifier, version) is None
    else:
        assert ranges.plainly_contains(specifier, version) in (None, expected)


@pytest.mark.parametrize("version", ["1.0rc1", "1.0.post1", "1.0+cu128", "1!1.0", "v1.0", "head", "1" * 5000])
def test_a_version_that_is_not_plain_is_left_to_packaging(version):
    assert ranges.plainly_contains(">=0.1,<2", version) is None


def test_no_built_in_patch_needs_packaging():
    """So that `apply` does without for every release that is no pre-release."""
    for listed in LISTED:
        for variant in listed.variants:
            assert ranges.plainly_contains(variant.versions, "1.0") is not None, listed.name


def test_a_specifier_that_is_none_is_an_error():
    with pytest.raises(DefinitionError, match=r"Guard\.versions is '=>1': expected a PEP 440 specifier"):
        Guard("some-framework", "=>1")
