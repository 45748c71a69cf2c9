"""Which patch has a proof, and where: beside it, by its name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import NamedTuple

from ..definitions import registry
from ..definitions.listed import DefinitionError
from ..definitions.patch import KnownBug
from .proof import Proof


class Found(NamedTuple):
    """A patch's proof, and the module of its worker."""

    proof: Proof
    worker: str


def proof_of(patch: KnownBug) -> Found | None:
    """The proof of a registered patch, None where it has none. Imports no framework.

    Raises:
        DefinitionError: what is there is no proof of that patch.
    """
    for module in registry.modules_of(patch):
        package, _, bug = module.__name__.rpartition(".")
        where = f"{package}.proofs.{bug}"
        if not _is_there(f"{package}.proofs") or not _is_there(where):
            continue
        proof = getattr(importlib.import_module(where), "PROOF", None)
        if not isinstance(proof, Proof) or patch.name not in {case.patch for case in proof.cases}:
            raise DefinitionError(f"{where}.PROOF is {proof!r}: expected a Proof with a case of {patch.name}")
        return Found(proof, f"{package}.proofs.{proof.worker or f'{bug}_ranks'}")
    return None


def missing(needs: Iterable[str]) -> list[str]:
    """Those of the modules that are not installed."""
    return [module for module in needs if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False
