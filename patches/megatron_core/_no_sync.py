"""The repair behind every ``*-no-sync-reentry`` patch.

Megatron's trainers assert that ``config.no_sync_func`` is None before they install their own: a custom one does not
work together with overlapped gradient reduction. But the config outlives the training call, so the second entry sees
the functions that the first entry installed, and takes them for custom ones.

The repaired assertion distinguishes the two. The installation after it always runs: an actor and a critic may share a
config, and each must get its own model's functions. Upstream pull requests skip the installation if the config has
functions already, which leaves the other model's functions: on megatron-core 0.16.1 with a real actor and critic, this
gives gradients that are wrong by 83 % without an error (tests/patches/megatron_core/test_no_sync.py shows it).
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

    True for None, and for what an earlier entry into training installed: the bound ``no_sync`` of a Megatron
    data-parallel model chunk, or a list of them. False for anything else, which a user has set.
    """
    if no_sync_func is None:
        return True
    functions = no_sync_func if isinstance(no_sync_func, (list, tuple)) else [no_sync_func]
    return bool(functions) and all(_is_chunks_own(function) for function in functions)


def _is_chunks_own(function: Any) -> bool:
    if not isinstance(function, MethodType):
        return False
    # Not imported here: if the class's module is not loaded, no chunk of that class exists.
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
        extra: a framework-specific addition to the symptom.
    """
    return Patch(
        name=name,
        summary=f"{title} can enter training more than once with --overlap-grad-reduce",
        harm="crash",
        bug="training on the second rollout fails an assertion on no_sync_func",
        when="--overlap-grad-reduce, and a training function that is called once per rollout",
        signatures=(Signature("AssertionError", MESSAGE.partition(": ")[2]),),
        symptom=f"""\
With `--overlap-grad-reduce`, training on the first rollout succeeds. Training on the second rollout raises:

    {MESSAGE}
{extra}""",
        cause=f"""\
{" or ".join(f"`{target}`" for target in places.values())}
asserts `config.no_sync_func is None` and then installs the `no_sync` methods of the model's chunks on that config. The
config object outlives the call, so the next entry sees its own functions from the previous one.""",
        repair="""\
The assertion passes for None and for bound `no_sync` methods of Megatron data-parallel chunks (one, or a list of them),
which an earlier entry installed. The lines after the assertion then install this model's own methods again, which is
required if an actor and a critic share one config. A custom `no_sync_func` fails as before, with the original
message.""",
        references=references,
        variants=tuple(Variant(guard, (_rewrite(target),)) for guard, target in places.items()),
        obsolete_when=(
            f"when the oldest {title} in use accepts the functions that it has installed; none released so far does"
        ),
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
