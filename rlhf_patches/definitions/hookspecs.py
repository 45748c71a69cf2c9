"""The pluggy hook that provides patches and advice, of this package and of plugins."""

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
    """Return the patches and the advice of this distribution.

    Called once per process, when patches are first listed or applied. It must not import a framework. A distribution
    with many patches may return them as `Listed`: each is then imported together with the modules that it patches.
    """
