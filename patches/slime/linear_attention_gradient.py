"""slime's linear attention (Qwen3-Next, Qwen3.5), which every rank computes whole: the gradient of the rank's part.

Source: https://github.com/THUDM/slime, ``slime_plugins/models/hf_attention.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from .. import _hooks, _released

_NAME = "slime-linear-attention-gradient"
_COMPUTES_ALL = ("slime_plugins.models.qwen3_next", "slime_plugins.models.qwen3_5")
_LAYERS = ("slime_plugins", "transformers", "fla", "torch")
_GATHERING = "_AllGatherForDuplicatedComputation"
_MAPPINGS = ("gather_from_sequence_parallel_region", "scatter_to_sequence_parallel_region")


def computes_all(layer: Any) -> bool:
    """Whether each rank computes the same from whole sequences, and the gathering's backward handles the gradient."""
    other = _other(layer)
    if other:
        _released.stays(_NAME, f"{other} is not slime's own", "linear attention")
    return not other


def _other(layer: Any) -> str:
    """The first part of the layer, or function between its ranks, that is a user's; empty if there is none.

    A user's may compute a rank's share of the heads, or change the gradient itself.
    """
    # known: slime's own two were read; the others by attributes that no decorator copies.
    function = vars(layer).get("hf_forward", getattr(type(layer), "hf_forward", None))
    if _released.written_in(function) not in _COMPUTES_ALL:
        return f"{type(layer).__name__}.hf_forward"
    parallel = sys.modules.get("megatron.core.tensor_parallel")
    for name in _MAPPINGS:
        if not _released.is_released(getattr(parallel, name, None), ("megatron", "builtins")):  # builtins: it has none
            return name
    # From v0.2.4 on. Before, torch gathers.
    gathering = getattr(sys.modules.get("slime_plugins.models.hf_attention"), _GATHERING, None)
    if gathering is not None and not _released.is_released(getattr(gathering, "backward", None), ("slime_plugins",)):
        return _GATHERING
    parts = list(getattr(layer, "modules", tuple)())
    found = (_released.others(part, "forward", packages=_LAYERS) for part in parts)
    return next(filter(None, found), "") or _hooks.others(*parts)


def has_another_gradient(self: Any, hidden_states: Any) -> bool | None:
    """Whether a layer's gathering has the wrong gradient on these ranks, and autograd records it; None if unknown."""
    needs = getattr(hidden_states, "requires_grad", None)
    torch: Any = sys.modules.get("torch")
    state: Any = sys.modules.get("megatron.core.parallel_state")
    args, forward = getattr(self, "args", None), getattr(_attention(), "forward", None)
    code: Any = getattr(forward, "__code__", None)
    split = getattr(args, "sequence_parallel", None)
    if None in (torch, needs, state, code, split) or not state.model_parallel_is_initialized():
        return None
    # known: how slime's own releases gather. No attribute shows what a gathering does in backward.
    given = any(isinstance(each, tuple) and "tensor_parallel_output_grad" in each for each in code.co_consts)
    inflated = split and not given and state.get_tensor_model_parallel_world_size() > 1
    # known: torch's gathering adds up what goes back; that of the later releases has another name.
    cut = "all_gather" not in code.co_names and state.get_context_parallel_world_size() > 1
    if not (inflated or cut) or not (needs and torch.is_grad_enabled()):
        return False
    if getattr(args, "allgather_cp", False):
        return None
    return None if _other(self) else True  # as the repair, which does not change a user's own


def _attention() -> Any:
    return getattr(sys.modules.get("slime_plugins.models.hf_attention"), "HuggingfaceAttention", None)


def gathering(layer: Any) -> Callable[..., Any]:
    """The function that gathers a layer's sequences of all tensor-parallel ranks."""
    from megatron.core import tensor_parallel

    return gathered_sequence if computes_all(layer) else tensor_parallel.gather_from_sequence_parallel_region


def gathered_sequence(hidden_states: Any, tensor_parallel_output_grad: bool = False, group: Any = None) -> Any:
    """``[tokens, batch, hidden]`` of all tensor-parallel ranks; backward takes this rank's piece of the gradient.

    Source: ``megatron.core.tensor_parallel``, which by default sums the ranks' gradients.
    """
    from megatron.core import tensor_parallel

    return tensor_parallel.gather_from_sequence_parallel_region(
        hidden_states, tensor_parallel_output_grad=False, group=group
    )


def gathered(hidden_states: Any, group: Any) -> Any:
    """Each context-parallel rank's part, ``[tokens, batch, hidden]``; backward sums all ranks' gradients of it.

    Source: ``megatron.core.tensor_parallel``; ``torch.distributed.nn.functional`` does this only on all ranks of the
    world if the backend is not NCCL.
    """
    from megatron.core import tensor_parallel

    whole = tensor_parallel.gather_from_sequence_parallel_region(
        hidden_states, tensor_parallel_output_grad=True, group=group
    )
    return whole.chunk(group.size())


_FORWARD = "slime_plugins.models.hf_attention:HuggingfaceAttention.forward"

PATCH = Patch(
    name=_NAME,
    summary="the gradient through a linear attention layer equals that of one rank, under TP and under CP",
    harm="wrong gradient",
    bug="the gradient through linear attention is multiplied by TP; since v0.2.4, a part of it is lost under CP",
    when="Qwen3-Next or Qwen3.5, sequence parallelism before v0.2.4 or context parallelism since",
    symptom="""\
A model with linear attention (Qwen3-Next, Qwen3.5, with `slime_plugins`) trains differently than on one rank. The
gradient norm grows with the tensor parallel size and the number of layers (v0.2.0 to v0.2.3), or shows nothing (v0.2.4
and later, context parallelism). No error is raised.""",
    cause="""\
Each rank gathers the whole sequences, computes the layer on all of them, and keeps its part of the output. With
sequence parallelism, the gathering's backward summed the ranks' gradients, which are the same on each rank: all earlier
layers got TP times the gradient, for each layer of linear attention. v0.2.4 removed this sum, and with it the sum over
context-parallel ranks. But a context-parallel rank's loss covers only its own part of the output. The gradient of the
other parts with respect to this rank's tokens, through the recurrence, is on the other ranks and is lost. Gradients of
the layer's own weights were right.""",
    repair="""\
The backward of the sequence-parallel gathering takes this rank's piece of the gradient. The backward of the
context-parallel gathering sums all ranks' gradients. The gradient then equals that of one rank. Without sequence and
context parallelism, nothing changes. In v0.2.0 to v0.2.3 without sequence parallelism, and in later releases without
context parallelism, results are bitwise identical.

The patch does not change a layer with a user's own `hf_forward`, which may divide the heads, so that the sum over ranks
was right, or may sum the gradient itself. For the same reason, it does not change a layer with your own `forward`,
modules or hooks, or with your own functions that gather or scatter between its ranks. Rank 0 logs one warning then, if
it has such a layer. The patch does not see a hook on a tensor: remove a hook of yours that divides the gradient of the
layer's input.

The patch does not repair `--allgather-cp`, whose ranks have other pieces of a sequence than this layer puts together
([slime's issue](https://github.com/THUDM/slime/issues/1871)).""",
    changes_numbers="""\
In v0.2.0 to v0.2.3, with sequence parallelism, the gradient of everything before a layer of linear attention had a part
that was TP times too large; the factors of several such layers multiply. From v0.2.4 to 0.3.1, with context
parallelism, it lacks the gradient with respect to other ranks' tokens: in a test the error was 0.45 of its norm on one
of two ranks, and 0.26 on the other. With the patch, it equals that of one rank. If you tuned a learning rate without
the patch, check it again. Training can continue from checkpoints.""",
    references=("https://github.com/THUDM/slime/pull/1748",),
    variants=(
        Variant(
            Guard("slime", ">=0.2.0,<=0.3.1"),
            (
                # v0.2.4 has version 0.2.3: both ways of gathering are recognized in each release.
                Rewrite(
                    target=_FORWARD,
                    pattern="tensor_parallel.gather_from_sequence_parallel_region",
                    alongside=("output = tensor_parallel.scatter_to_sequence_parallel_region($OUTPUT, group=$GROUP)",),
                    replacement="$GATHERING(self)",
                    uses={"GATHERING": f"{__name__}:{gathering.__name__}"},
                ),
                Rewrite(
                    target=_FORWARD,
                    pattern="hidden_states_list = $GATHERED",
                    alongside=("output_list.append(chunks[2 * cp_size - 1 - cp_rank])",),
                    replacement="hidden_states_list = $GATHER(hidden_states, mpu.get_context_parallel_group())"
                    " if $COMPUTES_ALL(self) else $GATHERED",
                    uses={
                        "GATHER": f"{__name__}:{gathered.__name__}",
                        "COMPUTES_ALL": f"{__name__}:{computes_all.__name__}",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest slime in use sums over context-parallel ranks, and not over tensor-parallel ones",
    conditions=(Condition(_FORWARD, f"{__name__}:{has_another_gradient.__name__}"),),
)
