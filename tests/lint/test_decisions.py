"""docs/architecture.md stays short enough to be read, and each page of docs/decisions is complete and in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "decisions").glob("[0-9]*.md"))
HEADINGS = ["Context", "Decision", "What was tried and what it showed", "Consequences"]
MOST_WORDS = 2500


def words(page: Path) -> int:
    """Whatever has a letter or a digit: the lines of a table and the arrows of a diagram are no words."""
    return sum(re.search(r"\w", word) is not None for word in page.read_text().split())


def test_the_map_takes_ten_minutes():
    page = DOCS / "architecture.md"
    assert words(page) <= MOST_WORDS, "reasons belong in a page of docs/decisions"


def test_the_index_has_every_page_once_in_order():
    index = (DOCS / "decisions" / "README.md").read_text()
    rows = re.findall(r"^\| \[(\d{4})\]\(([\w-]+\.md)\) \| (.+) \| (\d{4}-\d\d-\d\d) \|$", index, re.MULTILINE)
    found = []
    for page in PAGES:
        title, date = re.match(r"# (.+)\n\nDate: (.+)\n", page.read_text()).groups()
        found.append((page.name[:4], page.name, title, date))
    assert rows == found
    assert [number for number, *_ in rows] == [f"{number:04}" for number in range(1, len(rows) + 1)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name[:4])
def test_a_page_has_the_four_headings_and_is_short(page):
    sections = re.split(r"^## (.+)\n", page.read_text(), flags=re.MULTILINE)
    assert sections[1::2] == HEADINGS
    assert all(section.strip() for section in sections[2::2])
    assert 120 <= words(page) <= 350
