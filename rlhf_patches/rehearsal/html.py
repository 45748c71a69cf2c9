"""Writes "what is trained on" as a page: one file, without scripts, and with every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
body { color: #1b1f24; background: #fff }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top }
tr.deviates td { color: #b3261e; font-weight: 600 }
.row { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9 }
.row { border: 1px solid #d0d7de; border-radius: 6px; padding: .8rem }
.row span { border-radius: 3px; padding: 1px 0; margin-right: 1px }
.prompt { color: #57606a } .between { background: #ddeafc }
.label { background: #b7e8c0; border-bottom: 2px solid #1a7f37 }
.padding { color: #8c959f; text-decoration: line-through }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117 } .row { border-color: #30363d }
  .prompt { color: #9da7b1 } .between { background: #1b2f4b } .label { background: #14532d }
  tr.deviates td { color: #ff8a80 }
}
"""
_KINDS = {
    "prompt": "read, before the first label: the prompt",
    "label": "with a label: trained on",
    "between": "read, after a label: a tool's answer, or another turn",
    "padding": "padding",
}
_COUNTS = (
    ("tokens", "tokens of the micro-batch"),
    ("padding", "padding tokens"),
    ("labels", "tokens with a label"),
    ("padding_trained", "padding tokens with a label"),
    ("rows", "rows"),
    ("without_labels", "rows without a label"),
    ("ends", "end tokens of answers"),
    ("ends_trained", "end tokens with a label"),
    ("begin_twice", "rows that begin with the start token twice"),
    ("end_twice", "rows that end with two end tokens"),
)


def page(found: Mapping[str, Any]) -> str:
    """Return the page of a rehearsal's results.

    Args:
        found: the results as ``--json`` has them.
    """
    parts = ["<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">']
    parts += [
        "<title>rlhf-patches rehearse: what is trained on</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
    ]
    parts.append("<h1>What is trained on</h1>")
    shown = found.get("trained_on") or []
    if not shown:
        parts.append("<p>The first micro-batch has no labels or completion masks of tokens.</p>")
    for each in shown:
        parts += _of(each)
    parts += ["<h2>Relations</h2>", *_relations(found["relations"]), "</body>", "</html>"]
    return "\n".join(parts) + "\n"


def _of(trained: Mapping[str, Any]) -> list[str]:
    counts = trained["counts"]
    real = max(1, counts["tokens"] - counts["padding"])
    rows = [(text, str(counts[name])) for name, text in _COUNTS if counts[name] or name in ("tokens", "labels", "rows")]
    rows.append(("share of tokens trained on, without padding", f"{counts['labels'] / real:.0%}"))
    tokens = _told_apart(trained["row"])
    kinds = [kind for kind in _KINDS if any(kind == each for *_, each in tokens)]
    parts = [f"<h2>{escape(trained['of'])}: first micro-batch</h2>", "<table>"]
    parts += [f"<tr><td>{escape(text)}</td><td>{number}</td></tr>" for text, number in rows]
    parts += ["</table>", "<h2>First row</h2>", '<p class="row">']
    parts[-1] += "".join(
        f'<span class="{kind}" title="{place}: token {number}, {kind}">{_visible(text)}</span>'
        for place, (number, text, kind) in enumerate(tokens)
    )
    parts[-1] += "</p>"
    if left := trained.get("left_out"):
        parts.append(f"<p>{int(left)} more tokens of this row are not shown.</p>")
    parts += ["<ul>", *(f'<li><span class="{kind}">{escape(_KINDS[kind])}</span></li>' for kind in kinds), "</ul>"]
    return parts


def _told_apart(row: Sequence[Sequence[Any]]) -> list[tuple[int, str, str]]:
    """Tell what is read before the first label from what is read after it."""
    made, labeled = [], False
    for number, text, kind in row:
        labeled |= kind == "label"
        if kind == "read":
            kind = "between" if labeled else "prompt"
        made.append((int(number), str(text), kind))
    return made


def _visible(text: str) -> str:
    return escape(text).replace("\n", "&#8629;\n") or "&#8709;"


def _relations(relations: Sequence[Mapping[str, str]]) -> list[str]:
    names = ("relation", "measured", "verdict", "text")
    made = ["<table>", "<tr><th>relation</th><th>measured</th><th>verdict</th><th></th></tr>"]
    for each in relations:
        mark = ' class="deviates"' if each["verdict"] == "deviates" else ""
        made.append(f"<tr{mark}>" + "".join(f"<td>{escape(each[name])}</td>" for name in names) + "</tr>")
    return [*made, "</table>"]
