"""Relations that every trainer must keep, held against tiny models on real frameworks: ``make hunt`` (docs/hunt.md)."""
