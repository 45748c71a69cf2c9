"""Which environment has a framework, what a fork server loads of it, and which older releases lie beside it."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_patches.definitions import registry
from tests.harness import forkserver, side_by_side
from tests.harness.forkserver import TORCH, Level, Levels

ENVIRONMENTS = ("trl", "megatron")
"""Two, since ms-swift has no room for TRL 1 (noxfile.py)."""


@dataclass(frozen=True)
class Framework:
    """What to load.

    Attributes:
        environment: the one that has it.
        modules: what is imported for it, in this order.
        below: the framework on which it is loaded, in a process that the two share.
        levels: what loads it instead, given a release's folder or None: the tests' own (tests/harness/forkserver.py).
        releases: how the names of the folders begin in which older releases of it are; all of them if empty.
        newest: the folder that has a newer release than the environment itself.
    """

    environment: str
    modules: tuple[str, ...] = ()
    below: str | None = None
    levels: Callable[[str | None], Levels] | None = None
    releases: str = ""
    newest: str | None = None


def _loaded(name: str, path: str | None = None) -> Level:
    """A function of the tests' loading.py."""
    return Level(f"tests.harness.loading:{name}", path)


def _verl(release: str | None) -> Levels:
    since = {"verl_critic": "0.7", "verl_distillation": "0.8"}
    more = (_loaded(name) for name, first in since.items() if _at_least("verl", release, first))
    return (*forkserver.verl(release and release.removeprefix("verl-")), *more)


def _at_least(framework: str, release: str | None, wanted: str) -> bool:
    found = release and release.removeprefix(f"{framework}-")
    return found is None or tuple(map(int, found.split("."))) >= tuple(map(int, wanted.split(".")))


def _skyrl(release: str | None) -> str:
    """SkyRL is beside the others only."""
    return (release or "skyrl-0.4").removeprefix("skyrl-")


def _skyrl_megatron(release: str | None) -> Levels:
    name = _skyrl(release or "skyrl-0.3")  # 0.4's workers want packages for which there is no stand-in
    levels = forkserver.skyrl(name)
    return (*levels, forkserver.SKYRL_WORKERS) if name == "0.3" else levels


def _skyrl_dispatch(release: str | None) -> Levels:
    name = _skyrl(release or "skyrl-0.3")  # as above; older ones lie there without loguru, which 0.3 has
    folders = dict.fromkeys(str(side_by_side.folder(f"skyrl-{each}")) for each in (name, "0.3"))
    return (*TORCH, _loaded("skyrl_dispatch", os.pathsep.join(folders)))


def _math_verify(release: str | None) -> Levels:
    return forkserver.beside(release or "math-verify-0.9", "math_verify")


def _transformer_engine(release: str | None) -> Levels:
    return forkserver.transformer_engine((release or "transformer-engine-2.11").removeprefix("transformer-engine-"))


def _training(name: str, release: str | None) -> Levels:
    assert release is None
    return forkserver.trainer(name)


FRAMEWORKS = {
    "transformers": Framework(
        "trl",
        # unwrap_model imports DeepSpeed where it is installed.
        ("deepspeed", "accelerate", "datasets", "peft", "transformers.trainer")
        + ("transformers.models.llama.modeling_llama", "torch.distributed.checkpoint", "torch.distributed.fsdp")
        + ("transformers.models.gemma3n.modeling_gemma3n", "transformers.models.gemma4.modeling_gemma4")
        # What torch.compile imports with its first graph, eight seconds of every fork otherwise.
        + ("torch._inductor.compile_fx", "torch._dynamo.backends.inductor", "torch.export._trace")
        + ("torch.distributed.tensor.experimental",),
    ),
    "peft": Framework("trl", ("peft",), "transformers"),
    "trl": Framework(
        "trl",
        tuple(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo"))
        + tuple(f"trl.experimental.{name}" for name in ("kto", "online_dpo", "orpo", "cpo", "gkd", "gold"))
        + tuple(
            f"transformers.models.{name}.modeling_{name}"
            for name in ("mixtral", "gpt_oss", "recurrent_gemma", "modernbert_decoder", "mamba", "gpt2", "granite")
            + ("qwen3_5", "qwen3_next", "olmo_hybrid", "bamba", "falcon_h1", "nemotron_h", "lfm2", "jamba")
        ),
        "transformers",
        newest="trl-1.16",
    ),
    # Which TRL 1.14 no longer has.
    "trl_prm": Framework("trl", ("trl.experimental.prm",), "transformers", releases="trl-1.5", newest="trl-1.5"),
    "liger": Framework(
        "trl",
        ("hunt.interpreter", "accelerate", "datasets", "peft", "transformers.trainer", "trl.trainer.sft_trainer")
        + ("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral")
        + ("liger_kernel.transformers",),
        levels=lambda name: (_loaded("torch_and_interpreter", str(side_by_side.folder(name or "liger-0.8"))),),
        releases="liger-",
        newest="liger-0.8",
    ),
    "datasets": Framework("trl", ("datasets",), "transformers", releases="none"),
    "accelerate": Framework("trl", ("accelerate", "torch.distributed.fsdp"), "transformers"),
    "deepspeed": Framework(
        "trl",
        ("rlhf_patches.patches.deepspeed.proofs.on_cpu", "torch._inductor.compile_fx", "deepspeed")
        # Newer ones compile functions of Muon's whatever the optimizer, which imports half of torch.
        + ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.utils.tensor_fragment"),
        "transformers",
    ),
    "openrlhf": Framework(
        "trl",
        levels=lambda release: forkserver.beside(release, "openrlhf"),
        releases="openrlhf-",
        newest="openrlhf-0.11.2",
    ),
    "verl": Framework("megatron", levels=_verl, releases="verl-"),
    "verl_corrections": Framework(
        "megatron",
        levels=lambda name: (
            *forkserver.verl_workers(name and name.removeprefix("verl-")),
            _loaded("verl_v1_trainer"),
        ),
        releases="verl-",
    ),
    "skyrl": Framework("megatron", levels=lambda name: forkserver.skyrl_trainer(_skyrl(name)), releases="skyrl-"),
    "skyrl_megatron": Framework("megatron", levels=_skyrl_megatron, releases="skyrl-"),
    "skyrl_dispatch": Framework("megatron", levels=_skyrl_dispatch, releases="skyrl-"),
    "swift": Framework("megatron", levels=lambda name: forkserver.swift(name, "swift_transformers"), releases="swift-"),
    "swift_megatron": Framework(
        "megatron", levels=lambda name: forkserver.swift(name, "swift_megatron"), releases="swift-"
    ),
    "swift_kto": Framework(
        "megatron", levels=lambda name: forkserver.swift(name, "swift_kto"), releases="swift-3", newest="swift-3.12"
    ),
    "megatron_core": Framework("megatron", levels=forkserver.megatron, releases="megatron-"),
    "slime": Framework("megatron", levels=forkserver.megatron, releases="none"),  # from a clone; on megatron-core
    # Their entries into training, each loaded on the one before; no other release of them.
    **{
        f"{name}_training": Framework("megatron", levels=functools.partial(_training, name), releases="none")
        for name in ("verl", "swift", "megatron_bridge")
    },
    "transformer_engine": Framework("megatron", levels=_transformer_engine, releases="transformer-engine-"),
    "math_verify": Framework("megatron", levels=_math_verify, releases="math-verify-"),
}


def concerns(framework: str, release: str | None) -> bool:
    """Whether the folder has a release of it."""
    return release is None or release.startswith(FRAMEWORKS[framework].releases)


def levels(framework: str, release: str | None) -> Levels:
    """What a fork server loads, in this order; with the releases of ``side-by-side/RELEASE``, below everything."""
    if (own := FRAMEWORKS[framework].levels) is not None:
        return (*own(release), Level(f"hunt.frameworks:{framework}"))
    names = [framework]
    while (below := FRAMEWORKS[names[0]].below) is not None:
        names.insert(0, below)
    # What is below is loaded from the release's folder, too: it may have others of these packages.
    folder = None if release is None else str(side_by_side.folder(release))
    return (*TORCH, *(Level(f"hunt.frameworks:{name}", folder) for name in names))


def load(framework: str) -> None:
    """In a fork server."""
    os.environ.update(
        DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false"
    )
    # With every patch on, those are on too that upstream contests.
    contested = [patch.name for patch, _ in registry.listed()[0] if getattr(patch, "contested", "")]
    os.environ["RLHF_PATCHES_ENABLE"] = ",".join(contested)
    for module in FRAMEWORKS[framework].modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # else this release does not have it
    importlib.import_module("hunt.worker")


def __getattr__(name: str) -> object:
    if name in FRAMEWORKS:
        return lambda: load(name)
    raise AttributeError(name)
