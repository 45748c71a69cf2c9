"""TransformerEngine's real Python files on a CPU, without its compiled core: its Triton kernels, or its modules.

``import transformer_engine`` loads the core, so its packages are stood in for by empty ones with the real paths. Triton
interprets the kernels, with numpy 2.1 (tests/environments/side-by-side/numpy-2.1.txt).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


class _Core(ModuleType):
    """Stands in for what is compiled: any name is an empty class, any attribute of that a number of its own."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made: type = _Numbers(name, (), {"__module__": self.__name__, "__init__": lambda *_, **__: None})
        setattr(self, name, made)
        return made


class _Numbers(type):
    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        number = len(vars(cls))
        setattr(cls, name, number)
        return number


#: What has to be compiled: the core, Triton's kernels, and what no test asks for.
CORE = (
    "transformer_engine_torch",
    *(f"transformer_engine.common.triton{name}" for name in ("", ".cross_entropy", ".pad", ".permutation")),
    "transformer_engine.pytorch.onnx_extensions",
)


def install_modules() -> ModuleType:
    """The real ``transformer_engine.pytorch``, from the first folder on sys.path that has it: its modules can be made,
    with their parameters, and cannot be called. Before megatron-core is imported, which looks for it.
    """
    import torch

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine's own word for: do not load the core
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    package: Any = ModuleType("transformer_engine")
    package.__path__ = [str(Path(spec.origin).parent)]
    package.__version__ = importlib.metadata.version("transformer-engine")
    sys.modules[package.__name__] = package
    for name in CORE:
        core: Any = _Core(name)
        core.__path__ = []
        sys.modules[name] = core
    sys.modules[CORE[0]].get_cudnn_version = lambda: 91000  # type: ignore[attr-defined]  # asked where attention is made
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
    cuda.get_device_capability = lambda *_: (9, 0)
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda *_: None
    made = importlib.import_module("transformer_engine.pytorch")
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]  # megatron-core has its own
    return made
