"""The real SkyRL where it does not import as a whole: what patches/skyrl/proofs/modules.py has, and more of it."""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_patches.patches.skyrl.proofs import modules

_TRAIN, _Names = modules.TRAIN, modules.Names
install, trainer, worker_dispatch = modules.install, modules.trainer, modules.worker_dispatch
MODEL_UTILS = f"{_TRAIN}.distributed.megatron.model_utils"
MODEL_WRAPPER = f"{_TRAIN}.workers.megatron.megatron_model_wrapper"


def model_utils() -> Any:
    """The module with the functions that are patched."""
    return importlib.import_module(MODEL_UTILS)


def model_wrapper() -> Any:
    """The module with the trainer's loss function, which calls them."""
    from tests.harness import absent_packages

    absent_packages.install()  # 0.4.0 imports TransformerEngine on the way
    return importlib.import_module(MODEL_WRAPPER)


def megatron_worker() -> Any:
    """The module with Megatron's workers, which imports the one with FSDP's."""
    from tests.harness import absent_packages

    absent_packages.install()
    worker_dispatch()
    return importlib.import_module(f"{_TRAIN}.workers.megatron.megatron_worker")


def tinker_backend() -> Any:
    """The module that answers the Tinker API with a `WorkerDispatch`; the API's types are empty classes."""
    worker_dispatch()
    for name in (
        "skyrl.backends.backend",
        "skyrl.backends.renderer",
        f"{_TRAIN}.inference_engines.ray_wrapped_inference_engine",
        *(f"{_TRAIN}.inference_servers.{part}" for part in ("remote_inference_client", "server_group", "utils")),
        f"{_TRAIN}.inference_servers.vllm_router",
        f"{_TRAIN}.inference_servers",
        "skyrl.tinker",
        "skyrl.utils",
        "skyrl.utils.log",
        "skyrl.utils.tok",
        "skyrl.train.config",
    ):
        sys.modules[name] = _Names(name)
    vars(sys.modules["skyrl.utils.log"])["logger"] = logging.getLogger("skyrl")
    return importlib.import_module("skyrl.backends.skyrl_train_backend")


class _NamesOnly(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked first: answers for each of SkyRL's modules but some, and for packages that are not there."""

    def __init__(self, real: Iterable[str], absent: Iterable[str]) -> None:
        self.real, self.absent = frozenset(real), frozenset(absent)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        if (package == "skyrl" and fullname not in self.real) or package in self.absent:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Its names are made when they are asked for."""


INFERENCE = (f"{_TRAIN}.inference_servers.utils", "skyrl.train.entrypoints.main_base", f"{_TRAIN}_backend")
"""Where engines are started."""


def inference() -> None:
    """The modules that start engines, and the correction of ratios; all else of SkyRL is names, vLLM too."""
    root = Path(sys.modules["skyrl"].__path__[0]).parent
    correction = [f"{_TRAIN}.utils.{name}" for name in ("off_policy_correction_utils", "torch_utils")]
    parents = [f"{_TRAIN}.inference_servers", "skyrl.train.entrypoints"]
    for name in parents:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
    absent = [name for name in ("vllm", "loguru", "tinker", "cloudpathlib") if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _NamesOnly((*INFERENCE, *correction), absent))
    del sys.modules["skyrl.train.config"]
    for module in (*INFERENCE, correction[0]):
        importlib.import_module(module)


def servers() -> None:
    """The first of `INFERENCE`, on what is loaded; all else that it imports of SkyRL is names."""
    if INFERENCE[0] in sys.modules:
        return
    parent = INFERENCE[0].rpartition(".")[0]
    root = Path(sys.modules["skyrl"].__path__[0]).parent
    package = sys.modules[parent] = ModuleType(parent)
    package.__path__ = [str(root.joinpath(*parent.split(".")))]
    config = sys.modules.pop("skyrl.train.config")
    sys.meta_path.insert(0, names := _NamesOnly(INFERENCE[:1], ("loguru",)))
    importlib.import_module(INFERENCE[0])
    sys.meta_path.remove(names)
    sys.modules[config.__name__] = config


def on_each_rank(fill: Callable[[dict[str, Any], list[str]], None]) -> None:
    """What a worker does: ``--out FOLDER [PART ...]``, all ranks tensor parallel on gloo, and the report written.

    Args:
        fill: puts what it finds into the report; gets the parts that were asked for, too.
    """
    import torch
    from megatron.core import parallel_state

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    report: dict[str, Any] = {"skyrl": install()}
    fill(report, options.parts)
    (options.out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
