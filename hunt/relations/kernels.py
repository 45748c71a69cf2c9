"""What saves memory or time computes the same: checkpointing, compilation, fused and chunked losses, attention."""

from hunt.relations import Pair

PAIRS = [
    Pair("checkpointing", {"checkpointing": False}, {"checkpointing": True}),
    Pair("checkpointing-reentrant", {"checkpointing": False}, {"checkpointing": "reentrant"}),
    Pair("compile", {"compiled": False}, {"compiled": True}),
    Pair("sdpa", {"attention": "eager"}, {"attention": "sdpa"}),
    Pair("Liger", {"liger": False}, {"liger": True}),
    Pair("chunked", {"chunked": False}, {"chunked": True}),
]
