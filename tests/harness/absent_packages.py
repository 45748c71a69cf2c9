"""Stand-ins for packages that a CPU-only test machine cannot have.

Megatron-Bridge and mcore-bridge (the model library under ms-swift) import TransformerEngine and a few other
packages that are compiled for CUDA at the top of their modules, although the functions that our tests call
never use them. `install()` lets those imports succeed. Three rules keep the tests honest:

* The finder sits at the end of `sys.meta_path`: a package that really is installed always wins, so the same
  test runs against the real TransformerEngine where there is one.
* Only the names in `STAND_INS` are answered, and those in `GIT_ONLY`, `ON_REQUEST` and `ENGINES` where a test asks
  for them. No framework that the test patches is among them, nor megatron-core.
* megatron-core's models and optimizers go on without TransformerEngine: were they to find one, they would be
  built from the stand-in's empty classes. See `_keep_megatron_core_native`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

import torch

#: Top-level package -> the version it claims to be: what the frameworks in tests/environments ask for.
STAND_INS: dict[str, str] = {
    # CUDA kernels. Megatron-Bridge's LoRA and mcore-bridge's patcher name its layers when they are imported.
    "transformer_engine": "2.12.0",
    # CUDA job supervision, no wheel for a CPU. Megatron-Bridge's training loop imports its restart wrapper.
    "nvidia_resiliency_ext": "0.4.1",
}

#: Parts of Megatron-LM that are in no wheel: ms-swift before 4.0 clones them from GitHub when it is imported.
GIT_ONLY: dict[str, str] = {"megatron.training": "0", "megatron.legacy": "0"}

#: What some releases import at the top of their modules: CUDA kernels, a client of reward servers, and vLLM, of which
#: ms-swift uses more (vllm_for_swift.py).
ON_REQUEST: dict[str, str] = {
    **{"flash_attn": "2.7.4", "aiohttp": "3.14.0", "vllm": "0.11.0"},
    "torchdata": "0.11.0",  # OpenRLHF's data loader of rows
}

#: The engine that samples, and what its processes speak through: the names that verl's side of them imports.
ENGINES: dict[str, str] = {"vllm": "0.19.0", "zmq": "27.0.0"}


class StandInModule(ModuleType):
    """Answers every attribute: a capitalized one with a class, any other with a stand-in submodule.

    The classes are empty subclasses of `torch.nn.Module`, because frameworks derive from them and name them
    in `isinstance` checks. The submodules serve as functions too, as far as being imported and passed on:
    from outside nothing tells `from a.b import function` from `from a.b import module`.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        if not name.lstrip("_")[:1].isupper():
            return importlib.import_module(f"{self.__name__}.{name}")
        stand_in = type(name, (torch.nn.Module,), {"__module__": self.__name__})
        setattr(self, name, stand_in)
        return stand_in

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is only a stand-in of the test suite")


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def name_of(self, fullname: str) -> str | None:
        """Which of the names answers for this module."""
        return next((name for name in self.names if f"{fullname}.".startswith(f"{name}.")), None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.name_of(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__version__"] = _VERSIONS[self.name_of(module.__name__) or ""]


_VERSIONS = {**STAND_INS, **GIT_ONLY, **ON_REQUEST, **ENGINES}
_finder = _StandInFinder()
_real_version = importlib.metadata.version


def _version(distribution_name: str) -> str:
    """The real `importlib.metadata.version`, but for the stand-ins that `install` put in place."""
    name = distribution_name.replace("-", "_")
    return _VERSIONS[name] if name in _finder.names else _real_version(distribution_name)


#: What the tests use of megatron-core. Importing these imports all that they are made of.
MEGATRON_CORE_IN_USE = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)
#: megatron-core's adapter to TransformerEngine: here its classes derive from TransformerEngine's.
_MEGATRON_CORE_ADAPTER = "megatron.core.extensions.transformer_engine"


def _keep_megatron_core_native() -> None:
    """Let megatron-core look for TransformerEngine, and not find it, before there is a stand-in to find.

    Its modules look while they are imported and keep the answer: native layers, `torch.optim`. The adapter
    has to be forgotten afterwards. Without TransformerEngine half of its names are None, while mcore-bridge
    and Megatron-Bridge want classes: they get a second copy of it, made with the stand-in. Modules that the
    tests do not use, and that are imported later (llava, heterogeneous layers), see the stand-in too.
    """
    for module in MEGATRON_CORE_IN_USE:
        importlib.import_module(module)
    sys.modules.pop(_MEGATRON_CORE_ADAPTER, None)


def install(names: Iterable[str] = tuple(STAND_INS)) -> tuple[str, ...]:
    """Let `import` find stand-ins for those of `names` that are not installed; say which these are.

    Call it before a framework is imported, and after `megatron_on_cpu.install()`, because it imports
    megatron-core. Calling it again is harmless.
    """
    wanted = set(names)
    if unknown := wanted - set(_VERSIONS):
        raise ValueError(f"no stand-in for {sorted(unknown)}; there are {sorted(_VERSIONS)}")
    new = {name for name in wanted - _finder.names if importlib.util.find_spec(name) is None}
    if "transformer_engine" in new:
        _keep_megatron_core_native()
    _finder.names |= new
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
        importlib.metadata.version = _version
    return tuple(sorted(wanted & _finder.names))


def install_for_swift() -> None:
    """As `install`, with the parts of Megatron-LM that ms-swift before 4.0 wants."""
    # Any folder will do: ms-swift only has to believe that it need not clone Megatron-LM from GitHub.
    os.environ.setdefault("MEGATRON_LM_PATH", os.getcwd())
    install((*STAND_INS, *GIT_ONLY))
