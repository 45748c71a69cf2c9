"""The real SkyRL where it does not import as a whole: without vLLM, Ray actors, flash-attention, or on Python 3.11.

`import skyrl.backends` runs what needs all of those (on 3.11 even pydantic refuses a type there). `install()` registers
SkyRL's packages without running their `__init__`; their modules are the real files. `skyrl.train.config`, of which
these modules need the names of dataclasses for annotations only, answers with empty classes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_TRAIN = "skyrl.backends.skyrl_train"
_PACKAGES = (
    "skyrl",
    "skyrl.backends",
    "skyrl.train",
    _TRAIN,
    *(f"{_TRAIN}.{name}" for name in ("distributed", "distributed.megatron", "mtp", "utils", "workers")),
    f"{_TRAIN}.workers.megatron",
)
MODEL_UTILS = f"{_TRAIN}.distributed.megatron.model_utils"
MODEL_WRAPPER = f"{_TRAIN}.workers.megatron.megatron_model_wrapper"


class _Config(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():
            raise AttributeError(name)
        return SimpleNamespace


def install() -> str:
    """Let `import` find SkyRL's own modules; returns SkyRL's version."""
    distribution = importlib.metadata.distribution("skyrl")
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(Path(str(distribution.locate_file(""))).joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["skyrl.train.config"] = _Config("skyrl.train.config")
    return distribution.version


def model_utils() -> Any:
    """The module with the functions that are patched."""
    return importlib.import_module(MODEL_UTILS)


def model_wrapper() -> Any:
    """The module with the trainer's loss function, which calls them."""
    import absent_packages

    absent_packages.install()  # 0.4.0 imports TransformerEngine on the way
    return importlib.import_module(MODEL_WRAPPER)
