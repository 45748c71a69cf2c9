"""The one pluggy hook through which patches and advice come in: built-in ones and those of plugins alike."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from .bug import KnownBug
from .listed import Listed

PROJECT = "rlhf_patches"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorates a plugin's ``rlhf_patches()`` function."""


@hookspec
def rlhf_patches() -> Iterable[KnownBug | Listed]:  # type: ignore[empty-body]
    """Return the patches that this distribution brings, and the advice.

    Called once per process, when patches are first listed or applied. It must not import a framework. A distribution
    with many patches may return them as `Listed`: each is then imported with what it patches.
    """
