"""A patch on a framework, or a copy of it that is first on sys.path: ``--out FOLDER PATCH MODULE PREPARE``.

The patch is applied, the module imported after ``PREPARE`` (``MODULE:FUNCTION``) has run, and the report says what
became of the patch and whether every function that it would change has the code that its file says.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path

import rlhf_patches
from rlhf_patches.definitions import registry


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """This code object and those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("patch")
    parser.add_argument("module")
    parser.add_argument("prepare")
    options = parser.parse_args()
    rlhf_patches.apply(only=options.patch)
    prepare, _, function = options.prepare.partition(":")
    getattr(importlib.import_module(prepare), function)()
    module = importlib.import_module(options.module)
    file = Path(str(module.__file__))
    written = set(codes(compile(file.read_text(), str(file), "exec", dont_inherit=True)))
    (definition,) = [one.patch for one in registry.load()[0] if one.patch.name == options.patch]
    live = []
    for target in {change.target for variant in definition.variants for change in variant.changes}:
        if target.partition(":")[0] == options.module:
            found: object = module
            for part in target.partition(":")[2].split("."):
                found = getattr(found, part)
            live.append(inspect.unwrap(found).__code__)  # type: ignore[arg-type]
    report = {
        "file": str(file),
        "status": rlhf_patches.report()[options.patch].status.value,
        "as written": [code in written for code in live],
    }
    (options.out / "rank0.json").write_text(json.dumps(report))
