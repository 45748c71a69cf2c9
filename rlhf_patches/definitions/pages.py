"""The page of each patch, generated from its fields: ``docs/patches/*.md`` and ``rlhf-patches explain``.

tools/derive.py writes them (``make docs``).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from .patch import Change, Patch, Rewrite, Wrap
from .registry import BUILT_IN

_WIDTH = 120


def page(patch: Patch, plugin: str = BUILT_IN) -> str:
    """A patch's page as Markdown. It says who brings the patch where that is not this package."""
    parts = [
        f"# {patch.name}",
        patch.summary + ".",
        *([] if plugin == BUILT_IN else [f"Brought by the plugin {plugin}, not by rlhf-patches."]),
        "## What you see without it",
        _prose(patch.symptom),
        "## Why upstream does that",
        _prose(patch.cause),
        "## What the patch changes",
        _prose(patch.repair),
        *_changes(patch),
        *(["## Your numbers change", _prose(patch.changes_numbers)] if patch.changes_numbers else []),
        "## Where it applies",
        _where(patch),
        f"Switch it off with `RLHF_PATCHES_DISABLE={patch.name}`.",
        "## When it can go",
        _wrapped(patch.retire[0].upper() + patch.retire[1:] + "."),
        "## References",
        "\n".join(f"- <{reference}>" for reference in patch.references),
    ]
    return "\n\n".join(parts) + "\n"


def _where(patch: Patch) -> str:
    return _wrapped(
        f"Distribution `{patch.distribution}`, versions {_ranges(patch)}, and only where the "
        "code is recognised. A copy without metadata (a git checkout) is patched when the code is recognised."
    )


def _ranges(patch: Patch) -> str:
    return " or ".join(f"`{variant.guard.versions or 'all'}`" for variant in patch.variants)


def _changes(patch: Patch) -> list[str]:
    parts = []
    for number, variant in enumerate(patch.variants, 1):
        if len(patch.variants) > 1:
            parts.append(f"### Variant {number}: `{variant.guard}`")
        parts += map(_change, variant.changes)
    return parts


def _change(change: Change) -> str:
    if not isinstance(change, Rewrite):
        verb = "wrapped by" if isinstance(change, Wrap) else "replaced by"
        return _wrapped(f"`{change.target}` is {verb} `{change.implementation}`.")
    place = f" inside `{change.inside}`" if change.inside else ""
    lines = [_wrapped(f"In `{change.target}`, where it stands {_times(change.matches)}{place}:")]
    removed = (f"- {line}" for line in change.pattern.splitlines())
    added = (f"+ {line}" for line in change.replacement.splitlines())
    lines += ["", "```diff", *removed, *added, "```"]
    if change.uses:
        lines += ["", *(f"`${name}` is `{path}`." for name, path in change.uses.items())]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """A field of a patch, with the paragraphs wrapped that have a line too long: values were put into them."""
    paragraphs = (_wrapped(part) if _is_long_prose(part) else part for part in text.strip().split("\n\n"))
    return "\n\n".join(paragraphs)


def _is_long_prose(paragraph: str) -> bool:
    lines = paragraph.splitlines()
    # Code, lists, tables, quotations and headings keep their lines.
    kept = any(re.match(r"[-*+|>#\s]|\d+[.)] |```", line) for line in lines)
    return not kept and any(len(line) > _WIDTH for line in lines)


def _wrapped(sentence: str) -> str:
    # No line ends within code: textwrap breaks at plain spaces only.
    kept = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\N{NO-BREAK SPACE}"), " ".join(sentence.split()))
    lines = textwrap.fill(kept, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def summary(patch: Patch) -> str:
    """What a patch repairs, in a line of a list."""
    return patch.summary + (" (changes numbers)" if patch.changes_numbers else "")


def index(patches: Iterable[Patch]) -> str:
    """The list of all pages, as Markdown."""
    rows = [f"| [{p.name}]({p.name}.md) | {p.distribution} {_ranges(p)} | {summary(p)} |" for p in patches]
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
