"""How much of an exhaustive test to run: all of it on one Python, a share on the others, which differ little."""

from __future__ import annotations

import sys

SHARE = 1 if sys.version_info[:2] == (3, 11) else 4
"""Run one in so many cases."""
