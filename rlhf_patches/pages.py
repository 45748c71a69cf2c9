"""The page of each patch, generated from its fields: ``docs/patches/*.md`` and ``rlhf-patches explain``.

``python -m rlhf_patches.pages docs/patches`` writes them (``make docs``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from .plugins import BUILT_IN, load
from .vocabulary import Change, Patch, Rewrite, Wrap


def page(patch: Patch, plugin: str = BUILT_IN) -> str:
    """A patch's page as Markdown. It says who brings the patch where that is not this package."""
    parts = [
        f"# {patch.name}",
        patch.summary + ".",
        *([] if plugin == BUILT_IN else [f"Brought by the plugin {plugin}, not by rlhf-patches."]),
        "## What you see without it",
        patch.symptom.strip(),
        "## Why upstream does that",
        patch.cause.strip(),
        "## What the patch changes",
        patch.repair.strip(),
        "\n\n".join(_change(change) for change in patch.changes),
        "## Where it applies",
        _where(patch),
        f"Switch it off with `RLHF_PATCHES_DISABLE={patch.name}`.",
        "## When it can go",
        patch.retire[0].upper() + patch.retire[1:] + ".",
        "## References",
        "\n".join(f"- <{reference}>" for reference in patch.references),
    ]
    return "\n\n".join(parts) + "\n"


def _where(patch: Patch) -> str:
    return (
        f"Distribution `{patch.guard.distribution}`, versions `{patch.guard.versions or 'all'}`, and only where the "
        "code is recognised. A copy without metadata (a git checkout) is patched when the code is recognised."
    )


def _change(change: Change) -> str:
    if not isinstance(change, Rewrite):
        verb = "wrapped by" if isinstance(change, Wrap) else "replaced by"
        return f"`{change.target}` is {verb} `{change.implementation}`."
    lines = [f"In `{change.target}`, where it stands {_times(change.matches)}"]
    lines[0] += f" inside `{change.inside}`:" if change.inside else ":"
    removed = (f"- {line}" for line in change.pattern.splitlines())
    added = (f"+ {line}" for line in change.replacement.splitlines())
    lines += ["", "```diff", *removed, *added, "```"]
    if change.uses:
        lines += ["", *(f"`${name}` is `{path}`." for name, path in change.uses.items())]
    return "\n".join(lines)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def index(patches: Iterable[Patch]) -> str:
    """The list of all pages, as Markdown."""
    rows = [f"| [{p.name}]({p.name}.md) | `{p.guard}` | {p.summary} |" for p in patches]
    head = "# Patches\n\nGenerated from the patches' own fields by `make docs`; a test compares.\n\n"
    return head + "| patch | releases | what it repairs |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def write(patches: Iterable[Patch], folder: Path) -> None:
    """Write every page and the index, and remove pages of patches that are gone."""
    patches = list(patches)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.md"):
        stale.unlink()
    for patch in patches:
        (folder / f"{patch.name}.md").write_text(page(patch), encoding="utf-8")
    (folder / "README.md").write_text(index(patches), encoding="utf-8")


if __name__ == "__main__":
    write((item.patch for item in load()[0] if item.plugin == BUILT_IN), Path(sys.argv[1]))
