"""SkyRL's own ``model_utils.py`` of one release, loaded by path, with nothing of SkyRL or Megatron installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.harness import side_by_side

FILE = Path("skyrl", "backends", "skyrl_train", "distributed", "megatron", "model_utils.py")


def find() -> dict[str, Path]:
    """The releases of SkyRL beside the environment's own (tests/environments/side-by-side): version -> file."""
    metadata = sorted(side_by_side.ROOT.glob("*/skyrl-*.dist-info"))
    return {path.stem.removeprefix("skyrl-"): path.parent / FILE for path in metadata}


def load(file: Path, group: Any = None) -> ModuleType:
    """Execute the file. Its entropy asks Megatron for the tensor-parallel group, and gets ``group``."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its entropy compiles a function at every call
    state = ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda *_, **__: group  # type: ignore[attr-defined]
    megatron, core = ModuleType("megatron"), ModuleType("megatron.core")
    megatron.core, core.parallel_state = core, state  # type: ignore[attr-defined]
    packed = ModuleType("skyrl.backends.skyrl_train.utils.packed_tensor")
    packed.lengths_from_offsets = lambda offsets: offsets[1:] - offsets[:-1]  # type: ignore[attr-defined]
    stand_ins = {module.__name__: module for module in (megatron, core, state, packed)}
    stand_ins |= {name: ModuleType(name) for name in _parents(packed.__name__)}
    before = {name: sys.modules.get(name) for name in stand_ins}
    spec = importlib.util.spec_from_file_location(f"upstream_{abs(hash(file))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            sys.modules.pop(name)
            if old is not None:
                sys.modules[name] = old
    return module


def _parents(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[: number + 1]) for number in range(len(parts))]
