"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def whitened_in_parts(args: Any) -> bool | None:
    """Whether advantages are whitened on parts of sequences; None without CP (a rank may have no token)."""
    if not args.normalize_advantages:
        return False
    return True if args.context_parallel_size > 1 else None


def without_eps_clip_c(args: Any) -> bool | None:
    """False without the option; None with it, because the tokens would have to be read."""
    return False if args.eps_clip_c is None else None
