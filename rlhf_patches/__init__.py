"""Repairs known bugs of RLHF training stacks at run time, in place, only where the code is recognised.

    import rlhf_patches; rlhf_patches.apply()

Importing this package imports no framework and, until a name below is used, none of its own dependencies.
"""

from . import import_system

# Spelled out, because importing typing would cost every interpreter of the environment several milliseconds.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agreement import VerifyError
    from .distributed import verify
    from .hookspecs import hookimpl
    from .public import apply, fingerprint, report, revert
    from .reporting import PatchError, PatchReport, Report, Status
    from .settings import SettingsError
    from .vocabulary import DefinitionError, Guard, Patch, Replace, Rewrite, Wrap

__version__ = "0.1.0"
__all__ = [
    "DefinitionError",
    "Guard",
    "Patch",
    "PatchError",
    "PatchReport",
    "Replace",
    "Report",
    "Rewrite",
    "SettingsError",
    "Status",
    "VerifyError",
    "Wrap",
    "apply",
    "fingerprint",
    "hookimpl",
    "report",
    "revert",
    "verify",
]

_HOME = {
    "hookimpl": "hookspecs",
    "PatchError": "reporting",
    "PatchReport": "reporting",
    "Report": "reporting",
    "Status": "reporting",
    "SettingsError": "settings",
    "VerifyError": "agreement",
    "verify": "distributed",
    **dict.fromkeys(("DefinitionError", "Guard", "Patch", "Replace", "Rewrite", "Wrap"), "vocabulary"),
    **dict.fromkeys(("apply", "fingerprint", "report", "revert"), "public"),
}


def __getattr__(name: str) -> "Any":
    # Lazy, because the site hook imports this package at the start of every interpreter of the environment.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with import_system.loading():
        from importlib import import_module

        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
