"""TransformerEngine's Triton kernels on a CPU: its real files, and nothing in place of its compiled core.

``import transformer_engine`` loads the core, so its packages are stood in for by empty ones with the real paths. Triton
interprets the kernels, with numpy 2.1 (tests/environments/side-by-side/numpy-2.1.txt).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = ("", ".pytorch", ".pytorch.triton", ".common", ".common.triton")


def install() -> ModuleType:
    """The real ``transformer_engine.pytorch.cross_entropy``, from the first folder on sys.path that has it."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "to be set before triton is imported"
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for name in PACKAGES:
        package = ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[package.__name__] = package
    return importlib.import_module("transformer_engine.pytorch.cross_entropy")
