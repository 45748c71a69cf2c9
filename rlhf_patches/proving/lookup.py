"""Find the proof of a patch, which is in the patch's package under the patch's name."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from typing import NamedTuple

from ..definitions import ranges, registry
from ..definitions.bug import KnownBug
from ..definitions.errors import DefinitionError
from ..definitions.listed import PATCH
from .proof import Proof


class LocatedProof(NamedTuple):
    """A patch's proof and the module of its worker."""

    proof: Proof
    worker: str


def proof_of(patch: KnownBug) -> LocatedProof | None:
    """The proof of a registered patch; None if it has none. Imports no framework.

    Raises:
        DefinitionError: the module has no proof of that patch.
    """
    for module in registry.modules_of(patch):
        package, _, bug = module.__name__.rpartition(".")
        where = f"{package}.proofs.{bug}"
        if not package or not _is_there(f"{package}.proofs") or not _is_there(where):
            continue
        proof = getattr(importlib.import_module(where), "PROOF", None)
        if not isinstance(proof, Proof) or patch.name not in {case.patch for case in proof.cases}:
            raise DefinitionError(f"{where}.PROOF is {proof!r}: expected a Proof with a case of {patch.name}")
        return LocatedProof(proof, worker_of(where, proof))
    return None


def worker_of(module: str, proof: Proof) -> str:
    """The worker's module for the proof in ``module``."""
    package, _, bug = module.rpartition(".")
    return f"{package}.{proof.worker or f'{bug}_ranks'}"


def why_none(patch: KnownBug) -> str:
    """Why a patch has no proof: ``NO_PROOF`` of its module or package; empty if neither is set."""
    for module in registry.modules_of(patch):
        package = importlib.import_module(module.__name__.rpartition(".")[0] or module.__name__)
        for where in (module, package):
            reason = getattr(where, "NO_PROOF", None)
            if isinstance(reason, str) and reason:
                return reason
    return ""


def how_to_prove(patch: KnownBug) -> str:
    """A paragraph of a patch's page: how to prove it, or why that is not possible. Empty for an advice or a watch."""
    if patch.kind != PATCH:
        return ""
    located = proof_of(patch)
    if located is None:
        why = why_none(patch)
        return f"`rlhf-patches prove` has no proof of this patch{f', because {why}' if why else ''}."
    proof = located.proof
    cases = [case.words or case.title for case in proof.cases if case.patch == patch.name]
    ranks = f" on {proof.ranks} ranks" if proof.ranks > 1 else ""
    needs = f" It also needs {' and '.join(f'`{name}`' for name in proof.needs)}." if proof.needs else ""
    return (
        f"`rlhf-patches prove {patch.name}` runs the installed release without and with the patch, and compares both "
        f"with a reference. It takes about {proof.seconds} s{ranks}.{needs}"
        f"{' With `--gpu` it runs on a GPU.' if proof.gpu else ''}\n\n"
        f"{'Cases' if len(cases) > 1 else 'Case'}: {'; '.join(cases)}."
    )


def missing(needs: Iterable[str]) -> list[str]:
    """The modules that are not installed, or not in such a release."""
    return [each for each in needs if not _is_there(each)]


def _is_there(need: str) -> bool:
    module, operator, _ = need.partition(">=")
    try:
        if importlib.util.find_spec(module) is None:
            return False
        return not operator or ranges.plainly_contains(need[len(module) :], importlib.metadata.version(module)) is True
    except ModuleNotFoundError:  # its parent is not a package, or it has no metadata
        return False
