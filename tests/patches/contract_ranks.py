"""A patch applied, reverted and disabled on its loaded framework: ``--out FOLDER PATCH VARIANT``, on one rank."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import rlhf_patches
from rlhf_patches.definitions import registry


def code_of(target: str) -> CodeType:
    """The live code of ``module:qualified.name``, behind its decorators."""
    module, _, qualname = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = inspect.getattr_static(found, part) if isinstance(found, type) else getattr(found, part)
    found = getattr(found, "__func__", found)
    code: CodeType = inspect.unwrap(found).__code__
    return code


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("patch")
    parser.add_argument("variant", type=int)
    options = parser.parse_args()
    (patch,) = [item.patch for item in registry.load()[0] if item.patch.name == options.patch]
    variant = patch.variants[options.variant]
    if any(module.startswith("skyrl.") for module in variant.modules) and "megatron" in sys.modules:
        from tests.harness import absent_packages

        absent_packages.install()  # 0.4.0 imports TransformerEngine on the way
    for module in variant.modules:
        importlib.import_module(module)
    functions = list(dict.fromkeys(change.target for change in variant.changes))
    before = [code_of(target) for target in functions]

    def state() -> dict[str, Any]:
        row = rlhf_patches.report()[options.patch]
        own = [code_of(target) is code for target, code in zip(functions, before, strict=True)]
        return {"status": row.status.value, "reason": row.reason, "own code": own}

    report: dict[str, Any] = {"functions": functions}
    rlhf_patches.apply(only=options.patch)
    report["applied"] = state()
    rlhf_patches.revert()
    report["reverted"] = state()
    os.environ["RLHF_PATCHES_DISABLE"] = options.patch
    rlhf_patches.apply(only=options.patch)
    report["disabled"] = state()
    (options.out / "rank0.json").write_text(json.dumps(report))
