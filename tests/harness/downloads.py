"""For tests of what fetches a release: the cache, and a pip that must not be called."""

from __future__ import annotations

from pathlib import Path


def cached(folder: Path) -> list[str]:
    """The files of the cache in a test's folder."""
    cache = folder / "cache"
    return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()]


def broken_pip(folder: Path, text: str = "raise SystemExit('ERROR: pip was called')") -> str:
    """A folder for PYTHONPATH with a pip that does this."""
    (folder / "broken").mkdir()
    (folder / "broken" / "pip.py").write_text(text)
    return str(folder / "broken")
