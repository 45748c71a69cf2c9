"""Generates the page of each patch, advice and watch from its fields: ``docs/patches/*.md``, ``rlhf-patches explain``.

tools/derive.py writes them (``make docs``).
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from .bug import HARMS, KnownBug
from .changes import Change, Rewrite, Shape, Wrap
from .guard import Guard
from .patch import Advice, Patch, Watch
from .registry import BUILT_IN

_WIDTH = 120
_LOWERCASE = ("accelerate", "ms-swift", "slime", "torch", "transformers", "verl")
"""Packages whose names begin with a small letter, also at the beginning of a sentence."""


def page(patch: KnownBug, plugin: str = BUILT_IN, proof: str = "") -> str:
    """Return the page of a patch, an advice or a watch as Markdown. It names the plugin that provides the patch.

    Args:
        patch: the patch.
        plugin: the distribution that provides it.
        proof: how to test it, or why that is impossible, in a paragraph (`proving.lookup.how_to_prove`), or "".
    """
    parts = [
        f"# {patch.name}",
        _sentence(patch.summary),
        *_at_a_glance(patch),
        *([] if plugin == BUILT_IN else [f"The plugin {plugin} provides this patch."]),
        *_of_kind(patch),
        *(["## Proof", _prose(proof)] if proof else []),
        "## Removal",
        wrapped(_sentence(_obsolete(patch))),
        "## References",
        "\n".join(f"- <{reference}>" for reference in patch.references),
    ]
    return "\n\n".join(parts) + "\n"


def _obsolete(patch: KnownBug) -> str:
    text = patch.obsolete_when
    return f"the {patch.kind} is obsolete {text}" if text.startswith("when ") else text


def _of_kind(patch: KnownBug) -> list[str]:
    if isinstance(patch, Patch):
        return _of_patch(patch)
    return _of_advice(patch) if isinstance(patch, Advice) else _of_watch(patch) if isinstance(patch, Watch) else []


def _at_a_glance(patch: KnownBug) -> list[str]:
    """Return the harm, the bug and the affected configurations, without the fields that a plugin's patch leaves out."""
    fields = (("Harm", patch.harm), ("Bug", "" if isinstance(patch, Advice) else patch.bug), ("When", patch.when))
    lines = [_indented(f"- **{title}:** {text}.") for title, text in fields if text]
    return ["\n".join(lines)] if lines else []


def _of_patch(patch: Patch) -> list[str]:
    return [
        "## What you see without the patch",
        _prose(patch.symptom),
        "## Cause",
        _prose(patch.cause),
        "## What the patch changes",
        _prose(patch.repair),
        *_changes(patch),
        *(["## Your results change", _prose(patch.changes_numbers)] if patch.changes_numbers else []),
        *(["## Contested upstream", _contested(patch)] if patch.contested else []),
        "## A run in progress",
        _in_progress(patch),
        "## Where it applies",
        _where(patch),
        _switch(patch),
    ]


def _in_progress(patch: Patch) -> str:
    """Return when to apply the patch, and the effect on results."""
    text = "Apply the patch on every rank at the next start of the processes, and resume from a checkpoint."
    if patch.changes_numbers or patch.harm.startswith("wrong"):
        text += (
            " Results differ from that step on. Earlier checkpoints, weights and logs are unchanged. Compare runs only "
            "if all of them used the patch from the first step, or none did."
        )
    return wrapped(text)


def _of_watch(watch: Watch) -> list[str]:
    return [
        "## What it logs",
        _prose(watch.symptom),
        "## Possible causes",
        _prose(watch.cause),
        "\n".join(f"- [{name}]({name}.md)" for name in watch.points_to),
        "## What it reads",
        _prose(watch.looks_at),
        *_changes(watch),
        wrapped(
            "It changes no results and no state of the framework, and adds no forward pass, no collective and no GPU "
            "synchronization. It logs its own errors at level debug and does not raise them."
        ),
        "## When it warns",
        _prose(watch.limits),
        "## Where it applies",
        wrapped(
            f"Distribution `{watch.distribution}`, versions {_ranges(watch)}, if the functions' signatures match. "
            "In a copy without metadata (a git checkout), the signatures alone decide."
        ),
        _switch(watch),
    ]


def _of_advice(advice: Advice) -> list[str]:
    return [
        "This is an advice: **there is no repair**. `apply()` recognizes the code and logs a warning.",
        "## What you see",
        _prose(advice.symptom),
        "## Cause",
        _prose(advice.cause),
        "## What to do",
        _prose(advice.what_to_do),
        "## Where it applies",
        wrapped(
            f"Distribution `{advice.distribution}`, versions {_ranges(advice)}. In a copy without metadata (a git "
            "checkout), the code alone decides."
        ),
        *_changes(advice),
        f"Switch the warning off with `RLHF_PATCHES_DISABLE={advice.name}`.",
    ]


def _switch(patch: Patch | Watch) -> str:
    state, variable = ("on", "ENABLE") if isinstance(patch, Patch) and patch.contested else ("off", "DISABLE")
    return f"Switch the {patch.kind} {state} with `RLHF_PATCHES_{variable}={patch.name}`."


def _contested(patch: Patch) -> str:
    return wrapped(
        f"{_sentence(patch.contested)} The patch is **off by default**. Enable it by its name: "
        "in `RLHF_PATCHES_ENABLE`, in `RLHF_PATCHES_ONLY`, or in `apply(only=...)`. Globs do not enable it."
    )


def _where(patch: Patch) -> str:
    return wrapped(
        f"Distribution `{patch.distribution}`, versions {_ranges(patch)}. rlhf_patches applies the patch only if "
        "it recognizes the code. In a copy without metadata (a git checkout), the code alone decides."
    )


def _ranges(patch: KnownBug) -> str:
    return " or ".join(map(_range, (variant.guard for variant in patch.variants)))


def _range(guard: Guard) -> str:
    own = f"`{guard.versions or 'all'}`"
    return (
        f"{own} with `{guard.co_installed.distribution}` `{guard.co_installed.versions}`" if guard.co_installed else own
    )


def _changes(patch: KnownBug) -> list[str]:
    parts = []
    for number, variant in enumerate(patch.variants, 1):
        if len(patch.variants) > 1:
            parts.append(f"### Variant {number}: `{variant.guard}`")
        parts += map(_change, variant.changes)
    return parts


def _change(change: Change) -> str:
    if isinstance(change, Shape) and change.of_a_module:
        module = change.target.partition(":")[0]
        return wrapped(f"`{module}` runs on every import:") + _fenced("python", [change.pattern])
    if isinstance(change, Shape):
        return wrapped(f"`{change.target}` has {_matches(change.matches)} of this{_inside(change)}:") + _fenced(
            "python", change.pattern.splitlines()
        )
    if not isinstance(change, Rewrite):
        verb = "wrapped by" if isinstance(change, Wrap) else "replaced by"
        return wrapped(f"`{change.target}` is {verb} `{change.implementation}`.")
    text = wrapped(f"In `{change.target}`, {_matches(change.matches)}{_inside(change)}:")
    removed = (f"- {line}" for line in change.pattern.splitlines())
    added = (f"+ {line}" for line in change.replacement.splitlines())
    text += _fenced("diff", [*removed, *added])
    if change.uses:
        text += "\n\n" + "\n".join(f"`${name}` is `{path}`." for name, path in change.uses.items())
    return text


def _inside(change: Rewrite | Shape) -> str:
    return f" inside `{change.inside}`" if change.inside else ""


def _fenced(language: str, lines: Iterable[str]) -> str:
    return "\n".join(["", "", f"```{language}", *lines, "```"])


def _prose(text: str) -> str:
    """Return a field of a patch; wrap the paragraphs that inserted values made too long."""
    paragraphs = (wrapped(part) if _is_long_prose(part) else part for part in text.strip().split("\n\n"))
    return "\n\n".join(paragraphs)


def _is_long_prose(paragraph: str) -> bool:
    lines = paragraph.splitlines()
    # Code, lists, tables, quotations and headings keep their lines.
    kept = any(re.match(r"[-*+|>#\s]|\d+[.)] |```", line) for line in lines)
    return not kept and any(len(line) > _WIDTH for line in lines)


def _indented(item: str) -> str:
    """Return a wrapped list item."""
    return wrapped(item).replace("\n", "\n  ")


def wrapped(sentence: str, width: int = _WIDTH) -> str:
    """Wrap a sentence; lines do not break within a word or within code."""
    # textwrap breaks at plain spaces only.
    kept = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\N{NO-BREAK SPACE}"), " ".join(sentence.split()))
    lines = textwrap.fill(kept, width, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _matches(count: int) -> str:
    return "one match" if count == 1 else f"{count} matches"


def _sentence(text: str) -> str:
    """Return a field as a sentence; names and code at its beginning stay as they are."""
    first = re.match(r"[a-z-]+(?=[\s,:])", text)
    capital = first and first[0] not in _LOWERCASE
    return f"{text[0].upper() + text[1:] if capital else text}."


def bug(patch: KnownBug) -> str:
    """Return the bug and its condition as one line; without a bug field, the summary."""
    if not patch.bug:
        return summary(patch)
    when = f". When: {patch.when}" if patch.when else ""
    return f"{patch.bug}{when}{_remarks(patch)}"


class Harmful(Protocol):
    """A known bug or a row of a report."""

    @property
    def name(self) -> str: ...
    @property
    def harm(self) -> str: ...


_SEVERAL = {"wrong gradient": "wrong gradients", "wrong metric": "wrong metrics", "hang": "hangs", "crash": "crashes"}


def counted(patches: Iterable[Harmful]) -> str:
    """Return the number of bugs per harm, the worst first: "3 wrong gradients, 2 hangs"; unstated harms are omitted."""
    counts = Counter(patch.harm for patch in patches)
    return ", ".join(
        f"{counts[harm]} {harm if counts[harm] == 1 else _SEVERAL.get(harm, harm)}" for harm in HARMS if counts[harm]
    )


def by_harm(patch: Harmful) -> tuple[int, str]:
    """Sort key: the worst harm first, then the name; unstated harms last."""
    return (HARMS.index(patch.harm) if patch.harm else len(HARMS)), patch.name


def summary(patch: KnownBug) -> str:
    """Return a patch's or an advice's summary with remarks."""
    return patch.summary + _remarks(patch)


def _remarks(patch: KnownBug) -> str:
    remarks = ["repair changes results"] * bool(patch.changes_numbers)
    remarks += ["off by default"] * bool(patch.contested)
    remarks += ["advice: not repaired"] * isinstance(patch, Advice)
    return f" ({'; '.join(remarks)})" if remarks else ""


def index(patches: Iterable[KnownBug]) -> str:
    """Return the list of all pages as Markdown: by harm, then by framework."""
    patches = sorted(patches, key=lambda patch: (patch.distribution, patch.name))
    text = "# Patches\n\n`make docs` generates this page from the patches' fields.\n"
    watches = [patch for patch in patches if isinstance(patch, Watch)]
    for harm in (*HARMS, ""):
        entries = [patch for patch in patches if patch.harm == harm and not isinstance(patch, Watch)]
        if entries:
            heading = harm.capitalize() or "Harm not stated"
            text += f"\n## {heading}\n\n{_table(('bug', 'releases', 'what is wrong, and when'), entries)}"
    if watches:
        text += "\n## Watches\n\nA watch changes nothing. It logs one line if a run shows a sign of a bug.\n\n"
        text += _table(("watch", "releases", "what it reads"), watches)
    return text


def _table(heads: Iterable[str], entries: Iterable[KnownBug]) -> str:
    rows = [(f"[{each.name}]({each.name}.md)", f"{each.distribution} {_ranges(each)}", bug(each)) for each in entries]
    return "".join(f"| {' | '.join(row)} |\n" for row in [tuple(heads), ("---",) * 3, *rows])


def write(patches: Iterable[KnownBug], folder: Path, proof: Callable[[KnownBug], str]) -> None:
    """Write every page and the index, and remove the pages of removed patches; ``proof`` as in `page`."""
    patches = list(patches)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.md"):
        stale.unlink()
    for patch in patches:
        (folder / f"{patch.name}.md").write_text(page(patch, proof=proof(patch)), encoding="utf-8")
    (folder / "README.md").write_text(index(patches), encoding="utf-8")
