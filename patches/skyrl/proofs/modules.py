"""The real SkyRL where it does not import as a whole: without vLLM, Ray actors, flash-attention, or on Python 3.11.

`import skyrl.backends` runs what needs all of those (on 3.11 even pydantic refuses a type there). `install()` registers
SkyRL's packages without running their `__init__`; their modules are the real files. `skyrl.train.config`, of which
these modules need the names of dataclasses for annotations only, answers with empty classes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

TRAIN = "skyrl.backends.skyrl_train"
_PACKAGES = (
    "skyrl",
    "skyrl.backends",
    "skyrl.train",
    TRAIN,
    *(f"{TRAIN}.{name}" for name in ("distributed", "distributed.megatron", "mtp", "utils", "workers")),
    f"{TRAIN}.workers.megatron",
)


class _Config(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():
            raise AttributeError(name)
        return SimpleNamespace


@functools.cache
def install() -> str:
    """Let `import` find SkyRL's own modules; returns SkyRL's version."""
    distribution = importlib.metadata.distribution("skyrl")
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(Path(str(distribution.locate_file(""))).joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["skyrl.train.config"] = _Config("skyrl.train.config")
    return distribution.version


class Names(_Config):
    """Of a module of which only names are imported: classes are empty, and functions refuse to be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace if name[:1].isupper() else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is only a stand-in")


@functools.cache
def worker_dispatch() -> Any:
    """The module with the controller's side of the actor groups; SkyRL's inference is not there."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # SkyRL imports it from where the Ray that it asks for has it too.
    placement_group: Any = importlib.import_module("ray.util.placement_group")
    placement_group.PlacementGroupSchedulingStrategy = PlacementGroupSchedulingStrategy
    root = Path(sys.modules["skyrl"].__path__[0]).parent
    for name in ("skyrl.train.dataset", "skyrl.train.utils", f"{TRAIN}.inference_engines"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name in (
        "skyrl.train.config.config",
        f"{TRAIN}.distributed.ulysses",
        f"{TRAIN}.inference_engines.inference_engine_client",
        f"{TRAIN}.utils.io",
    ):
        sys.modules[name] = Names(name)
    return importlib.import_module(f"{TRAIN}.workers.worker_dispatch")


@functools.cache
def trainer() -> Any:
    """The module with the trainer, to be the first of SkyRL's: what is around advantages and losses is names only."""
    root = Path(sys.modules["skyrl"].__path__[0]).parent
    for name in (
        *(f"{TRAIN}.inference_engines.{part}" for part in ("inference_engine_client", "utils")),
        f"{TRAIN}.inference_engines",
        *(f"{TRAIN}.inference_servers.{part}" for part in ("base", "engine_utils")),
        f"{TRAIN}.inference_servers",
        f"{TRAIN}.utils.io",
        *(f"{TRAIN}.workers.{part}" for part in ("worker", "worker_dispatch", "worker_utils")),
        *(f"skyrl.train.{part}" for part in ("dataset", "evaluate", "generators", "utils")),
        *(f"skyrl.train.generators.{part}" for part in ("base", "utils")),
        *(
            f"skyrl.train.utils.{part}"
            for part in ("callbacks", "logging_utils", "ray_gpu_monitor", "tracking", "trainer_utils")
        ),
        *(f"skyrl.train.utils.{part}" for part in ("trajectory_logging", "utils", "vllm_metrics_scraper")),
    ):
        sys.modules[name] = Names(name)
    vars(sys.modules["skyrl.train.dataset"])["__path__"] = [str(root.joinpath("skyrl", "train", "dataset"))]
    return importlib.import_module("skyrl.train.trainer")
