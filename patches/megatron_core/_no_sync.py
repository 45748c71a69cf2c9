"""The one repair behind every ``*-no-sync-reentry`` patch.

Megatron's trainers assert that ``config.no_sync_func`` is None before they install their own: a custom one
cannot work together with overlapped gradient reduction. But the config outlives the training call, so the
second entry meets what the first one installed, and takes it for custom.

The repaired assertion tells the two apart. What comes after it, the installation, always runs: an actor and
a critic may share a config, and each must get its own model's functions. Skipping the installation when the
config has functions already, as upstream pull requests do, leaves the other model's: seen on megatron-core 0.16.1
with a real actor and critic, gradients that are wrong by 83 % and no error
(tests/patches/megatron_core/test_no_sync.py shows it).
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Signature, Variant

MESSAGE = (
    "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None; a custom no_sync_func is "
    "not supported when overlapping grad-reduce"
)
_BASES = (
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"),  # 0.10.0 and later; FSDP's too
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
)


def is_none_or_megatrons(no_sync_func: Any) -> bool:
    """Whether a trainer may install its own ``no_sync`` functions over this value of ``config.no_sync_func``.

    True for None, and for what an earlier entry into training has installed: the bound ``no_sync`` of a
    Megatron data-parallel model chunk, or a list of them. False for anything else, which a user has set.
    """
    if no_sync_func is None:
        return True
    functions = no_sync_func if isinstance(no_sync_func, (list, tuple)) else [no_sync_func]
    return bool(functions) and all(_is_chunks_own(function) for function in functions)


def _is_chunks_own(function: Any) -> bool:
    if not isinstance(function, MethodType):
        return False
    # Not imported here: without the class's module there is no chunk of that class.
    bases = tuple(getattr(sys.modules[module], name) for module, name in _BASES if module in sys.modules)
    chunk = function.__self__
    return isinstance(chunk, bases) and function == getattr(chunk, "no_sync", None)


def patch(name: str, title: str, places: dict[Guard, str], references: tuple[str, ...], extra: str = "") -> Patch:
    """The patch of one framework.

    Args:
        name: the patch's name.
        title: the framework's name in texts.
        places: for the releases that were read, the function that asserts and installs, as ``module:qualified.name``.
        references: upstream reports.
        extra: what is particular to this framework, added to the symptom.
    """
    return Patch(
        name=name,
        summary=f"{title} may enter training more than once with --overlap-grad-reduce",
        harm="crash",
        bug="the second entry into training fails an assertion on no_sync_func",
        when="--overlap-grad-reduce, and training that is entered once per rollout",
        signatures=(Signature("AssertionError", MESSAGE.partition(": ")[2]),),
        symptom=f"""\
With `--overlap-grad-reduce`, the first rollout trains and the second dies as soon as training is entered:

    {MESSAGE}
{extra}""",
        cause=f"""\
{", or ".join(f"`{target}`" for target in places.values())},
asserts `config.no_sync_func is None` and then installs the `no_sync` methods of the model's chunks on that config. The
config object outlives the call, so the next entry finds its own functions from last time.""",
        repair="""\
The assertion holds for None and for bound `no_sync` methods of Megatron data-parallel chunks (one, or a list of
them), which an earlier entry installed. The lines after it then install this model's own again, which matters when
an actor and a critic share one config. A custom `no_sync_func` fails as before, with the original message.""",
        references=references,
        variants=tuple(Variant(guard, (_rewrite(target),)) for guard, target in places.items()),
        obsolete_when=f"when the oldest {title} in use accepts its own functions; none released so far does",
    )


def _rewrite(target: str) -> Rewrite:
    return Rewrite(
        target=target,
        pattern="$CONFIG.no_sync_func is None",
        inside="assert $CONFIG.no_sync_func is None, $MESSAGE",
        alongside=("$CONFIG.no_sync_func = [$CHUNK.no_sync for $CHUNK in $CHUNKS]",),
        replacement="$IS_NONE_OR_MEGATRONS($CONFIG.no_sync_func)",
        uses={"IS_NONE_OR_MEGATRONS": f"{__name__}:{is_none_or_megatrons.__name__}"},
    )
