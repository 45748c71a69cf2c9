"""Repairs known bugs of RLHF training frameworks at run time, in place, only if the code is recognized.

    import rlhf_patches; rlhf_patches.apply()

Importing this package imports no framework and, until a name below is used, none of its own dependencies.

PYTEST_DONT_REWRITE: pytest warns about a package with a plugin that is imported before pytest, as by the site hook.
"""

from . import import_system

# Not from typing, whose import would cost every interpreter of the environment several milliseconds.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from . import ray, watching
    from ._version import __version__
    from .api import apply, fingerprint, in_force, matched, report, revert
    from .definitions.bug import Signature
    from .definitions.changes import Replace, Rewrite, Shape, Wrap
    from .definitions.errors import DefinitionError
    from .definitions.guard import CoInstalled, Guard
    from .definitions.hookspecs import hookimpl
    from .definitions.listed import Listed, ListedCoInstalled, ListedVariant
    from .definitions.patch import Advice, Condition, Patch, Watch
    from .definitions.status import PatchError, PatchReport, Report, Status
    from .definitions.variant import Variant
    from .engine.reached import decided
    from .rehearsal.start import rehearse
    from .runs.comparison import VerifyError
    from .runs.process_group import verify
    from .settings import SettingsError

__all__ = [
    "Advice",
    "CoInstalled",
    "Condition",
    "DefinitionError",
    "Guard",
    "Listed",
    "ListedCoInstalled",
    "ListedVariant",
    "Patch",
    "PatchError",
    "PatchReport",
    "Replace",
    "Report",
    "Rewrite",
    "SettingsError",
    "Shape",
    "Signature",
    "Status",
    "Variant",
    "VerifyError",
    "Watch",
    "Wrap",
    "__version__",
    "apply",
    "decided",
    "fingerprint",
    "hookimpl",
    "in_force",
    "matched",
    "ray",
    "rehearse",
    "report",
    "revert",
    "verify",
    "watching",
]

_HOME = {
    "__version__": "_version",
    "hookimpl": "definitions.hookspecs",
    "DefinitionError": "definitions.errors",
    "Listed": "definitions.listed",
    "ListedCoInstalled": "definitions.listed",
    "ListedVariant": "definitions.listed",
    "PatchError": "definitions.status",
    "PatchReport": "definitions.status",
    "Report": "definitions.status",
    "Status": "definitions.status",
    "SettingsError": "settings",
    "VerifyError": "runs.comparison",
    "decided": "engine.reached",
    "ray": "ray",
    "rehearse": "rehearsal.start",
    "verify": "runs.process_group",
    "watching": "watching",
    "CoInstalled": "definitions.guard",
    "Guard": "definitions.guard",
    "Signature": "definitions.bug",
    "Variant": "definitions.variant",
    **dict.fromkeys(("Replace", "Rewrite", "Shape", "Wrap"), "definitions.changes"),
    **dict.fromkeys(("Advice", "Condition", "Patch", "Watch"), "definitions.patch"),
    **dict.fromkeys(("apply", "fingerprint", "in_force", "matched", "report", "revert"), "api"),
}


def __getattr__(name: str) -> "Any":
    # Lazy, because the site hook imports this package at the start of every interpreter of the environment.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with import_system.loading():
        from importlib import import_module

        home = import_module(f".{_HOME[name]}", __name__)
        value = home if name == _HOME[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
