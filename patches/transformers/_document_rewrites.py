"""The rewrites by which recurrent layers keep packed documents apart (`_document_states`)."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_patches import Rewrite

_STATES = f"{__package__}._document_states"


class Call(NamedTuple):
    """A call within a mixer that has to know the documents.

    Attributes:
        function: what is called.
        helper: the function of `_document_states` that makes it keep documents apart.
        more: further arguments of the helper.
        call: the whole call, as a pattern.
        method: the mixer's method that contains it.
    """

    function: str
    helper: str
    more: tuple[str, ...] = ()
    call: str = "{}($$$)"
    method: str = "forward"


def apart(
    patch: str, layer: str, mixer: str, attribute: str, *calls: Call, inside: str | None = None
) -> tuple[Rewrite, ...]:
    """A layer gives the mixer in its attribute the documents; the calls within the mixer then keep them apart.

    Args:
        patch: the patch's name.
        layer: the class of the layer that knows the positions.
        mixer: the class of its mixer.
        attribute: the mixer, as the layer calls it.
        calls: those within the mixer.
        inside: the call of the mixer, if the attribute stands in others too.
    """
    return (
        _rewrite(f"{layer}.forward", attribute, "apart", ("position_ids", repr(patch)), inside),
        *(
            _rewrite(f"{mixer}.{each.method}", each.function, each.helper, each.more, each.call.format(each.function))
            for each in calls
        ),
    )


def _rewrite(target: str, function: str, helper: str, more: tuple[str, ...], inside: str | None) -> Rewrite:
    name = helper.upper()
    replacement = f"${name}({', '.join((function, *more))})"
    return Rewrite(target, function, replacement, inside=inside, uses={name: f"{_STATES}:{helper}"})
