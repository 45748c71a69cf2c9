"""``--part K/N``: of the exhaustive tests one part in N, by their files, for CI; and what runs on one Python alone."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.harness import effort
from tests.harness.effort import in_part

FILES = [f"patches/{name}.py" for name in "abcdefghijklmnopqrstuvwxyz"]


def test_each_file_is_in_one_part():
    assert all(sum(in_part(file, f"{number}/4") for number in range(1, 5)) == 1 for file in FILES)
    assert Counter(in_part(file, "1/1") for file in FILES) == {True: len(FILES)}


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "1/0", "a/b", ""])
def test_what_is_no_part(part):
    with pytest.raises(ValueError, match="expected K/N"):
        in_part(FILES[0], part)


@pytest.mark.one_python
def test_what_is_dear_runs_on_one_python_and_as_a_whole():
    assert ("{}.{}".format(*sys.version_info), effort.SHARE) == (effort.ONE, 1)
