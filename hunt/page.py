"""docs/hunt.md, from what the last whole hunt of each environment found (hunt/results)."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hunt import known_bugs
from hunt.cells import ACCEPTED, CANNOT, HOLDS, KNOWN, NEW, Cell, Verdict
from hunt.check_patches import RESULTS, Configuration
from hunt.frameworks import ENVIRONMENTS
from hunt.rehearse import NOT_CHECKED, Rehearsed

HERE = Path(__file__).resolve().parents[1]
PAGE = HERE / "docs" / "hunt.md"
REHEARSED = RESULTS / "rehearsed.json"
WORST = (NEW, KNOWN, ACCEPTED, HOLDS, CANNOT)

_HEAD = """\
# The hunt

A relation is a pair of settings for which a trainer must compute the same: 8 samples in one micro-batch or in 8, on one
rank or on two, with more padding, packed, resumed, checkpointed, sharded. A relation needs no reference result, so it
finds bugs that nobody has reported. `make hunt` runs each relation on each trainer that takes its settings, and prints
the differences. It uses tiny models and the newest releases of the real frameworks. `hunt/` has a short module for each
[relation](../hunt/relations), and a module with the [trainers](../hunt/trainers) of each framework.

| verdict | meaning |
| --- | --- |
| holds | both results agree, up to the deviation that the table shows |
| known | the results differ. With the named patch they agree, or no patch repairs the bug |
| accepted | the results differ by definition ([reasons](../hunt/reasons.toml)) |
| cannot | the release has no such trainer or setting |
| NEW | none of these: the command fails, and its last lines say how to run that cell alone |

```
make hunt NAMES="trl micro_batches trl-1.5"   # frameworks or trainers, relations, a release, or cells
make hunt NAMES="trl/gold:micro_batches/8-of-1"
.cache/tools/bin/nox -s hunt -- --check-patches 0.1  # compares patches on and off, bit for bit, over a tenth
.cache/tools/bin/nox -s hunt -- --known-bugs         # finds the bugs of the catalogue in older releases
python -m hunt --environment trl --rehearse          # rehearses the trainers, with the patches on
```

A deviation is the norm of a tensor's difference, divided by the norm of the tensor. The page shows the largest one of
all tensors. `8.000 x` means that the results differ by this factor and by nothing else. `make hunt` with `--write`
generates this page.
"""


def write(environment: str, what: str, words: str, rows: Sequence[Any] = (), whole: bool = True) -> None:
    """Keep what was found, and write the page anew; of a part of the hunt only its rows."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{environment}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if not whole:
        before = kept[what]
        words, rows = before["words"], [*{_key(row): row for row in (*before["rows"], *rows)}.values()]
    kept[what] = {"words": words, "rows": [*rows]} if rows else {"words": words}
    file.write_text(json.dumps(kept, indent=0) + "\n")
    PAGE.write_text(text())


def write_rehearsed(rows: Iterable[tuple[Configuration, Rehearsed]], whole: bool) -> None:
    """Keep each configuration with its verdict, one a line, and write the page anew; of a part only its rows."""
    found = [
        {
            "trainer": each.trainer.name,
            "settings": each.name.partition(" ")[2],
            "verdict": found.kind,
            "holds": found.holds,
            "notes": [*found.notes],
            "words": found.words,
        }
        for each, found in rows
    ]
    kept = [] if whole else json.loads(REHEARSED.read_text())
    lines = {(row["trainer"], row["settings"]): json.dumps(row) for row in (*kept, *found)}
    REHEARSED.write_text("[\n" + ",\n".join(lines.values()) + "\n]\n")
    PAGE.write_text(text())


def text() -> str:
    """The page."""
    kept = [json.loads(file.read_text()) for name in ENVIRONMENTS if (file := RESULTS / f"{name}.json").exists()]
    rows = [row for each in kept for row in each.get("cells", {}).get("rows", [])]
    parts = [_HEAD, "## Newest releases\n", _table(rows)]
    for kind, title in ((NEW, "New"), (KNOWN, "Known"), (ACCEPTED, "Accepted")):
        if chosen := [row for row in rows if row["kind"] == kind]:
            parts += [f"### {title}\n", _list(chosen)]
    parts.append(_deviations(kept, "cells"))
    parts += [
        "## Known bugs that it finds\n",
        _known_bugs([row for each in kept for row in each.get("known-bugs", {}).get("rows", [])]),
    ]
    parts += ["## Every patch on against off\n", _CHECK_PATCHES, _deviations(kept, "check-patches")]
    if REHEARSED.exists():
        parts += ["## Rehearsed\n", _REHEARSED, *_rehearsed(json.loads(REHEARSED.read_text()))]
    return "\n".join(parts)


_REHEARSED = """\
`python -m hunt --environment trl --rehearse` [rehearses](rehearse.md) each trainer that is a `transformers.Trainer`,
with all patches on, in its first window. The configurations are drawn from dropout, dtype, autocast, attention,
checkpointing, LoRA, accumulation, ranks, packing, padding-free, ZeRO-2, ZeRO-3, FSDP1 and FSDP2. Each configuration
with its verdict is in [rehearsed.json](../hunt/results/rehearsed.json).

- holds: no relation deviates. A note is not a deviation.
- known: the deviation is that of a bug that no patch repairs ([reasons](../hunt/reasons.toml)).
- not checked: the window's gradient cannot be read, or cannot be computed again.
- cannot: the configuration does not run, with or without a rehearsal, or it trains nothing.
"""


def _rehearsed(kept: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row for each trainer, and what is not in the list of what holds."""
    by_trainer: dict[str, list[dict[str, Any]]] = {}
    for row in kept:
        by_trainer.setdefault(row["trainer"], []).append(row)
    kinds = (HOLDS, KNOWN, NEW, NOT_CHECKED, CANNOT)
    lines = [f"| trainer | configurations | {' | '.join(kinds)} | notes |", "| --- " * (len(kinds) + 3) + "|"]
    for trainer, rows in by_trainer.items():
        counts = Counter(row["verdict"] for row in rows)
        notes = Counter(note for row in rows for note in row["notes"])
        said = ", ".join(f"{note} ({number})" for note, number in sorted(notes.items()))
        lines.append(f"| {trainer} | {len(rows)} | {' | '.join(str(counts[kind] or '') for kind in kinds)} | {said} |")
    yield "\n".join(lines) + "\n"
    counts = Counter(row["verdict"] for row in kept)
    yield f"{len(kept)} configurations: {', '.join(f'{counts[kind]} {kind}' for kind in kinds if counts[kind])}.\n"
    for kind, title in ((NEW, "Deviations that nothing explains"), (KNOWN, "Known deviations")):
        if chosen := [row for row in kept if row["verdict"] == kind]:
            yield f"### {title}\n"
            lines = ["| trainer | settings | deviation |", "| --- | --- | --- |"]
            yield (
                "\n".join(
                    lines
                    + [f"| {each['trainer']} | {each['settings']} | {_escaped(each['words'])} |" for each in chosen]
                )
                + "\n"
            )


_CHECK_PATCHES = """\
This compares each configuration without patches and with all of them. The configurations are drawn from dtype,
compilation, checkpointing, LoRA, accumulation, ranks, packing and sharding.

- `same`: losses, gradients, parameters, the optimizer's state and saved files are equal bit for bit. The user's objects
  are the same ones, with the same attributes and hooks.
- `repaired`: the result was wrong. With patches it is that of one process and one micro-batch.
- `changed`: neither result is that of one process and one micro-batch. A router's loss, for example, is a mean over a
  micro-batch.
- `accepted`: another relation tests the result ([reasons](../hunt/reasons.toml)).
- `cannot`: the configuration does not run, with or without patches.

The run's own verdict is compared too. If numbers differ, it names a bug that occurred, or one that it cannot decide. If
they are equal, it names none.

No configuration with a right result changed.
"""


def _deviations(kept: Iterable[dict[str, Any]], what: str) -> str:
    """The last lines of the commands, of each environment."""
    words = [f"- {each[what]['words']}" for each in kept if what in each]
    return "".join(textwrap.fill(line, 118, subsequent_indent="  ") + "\n" for line in words)


def _key(row: Any) -> tuple[str, ...]:
    return (row["trainer"], row["relation"], row["pair"]) if isinstance(row, dict) else (row[0],)


def of_cell(cell: Cell, verdict: Verdict) -> dict[str, Any]:
    """What is kept of a cell."""
    return {
        "trainer": cell.trainer.name,
        "release": cell.release or "",
        "relation": cell.relation.name,
        "pair": cell.pair.name,
        "kind": verdict.kind,
        "found": verdict.found,
        "why": verdict.why,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each trainer, a column for each relation: the worst verdict; the largest deviation where all hold."""
    relations = list(dict.fromkeys(row["relation"] for row in rows))
    lines = ["| trainer | " + " | ".join(name.replace("_", " ") for name in relations) + " |"]
    lines.append("| --- |" + " --- |" * len(relations))
    for trainer in dict.fromkeys(row["trainer"] for row in rows):
        line = [trainer]
        for relation in relations:
            own = [row for row in rows if row["trainer"] == trainer and row["relation"] == relation]
            line.append(_worst(own))
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines) + "\n"


def _worst(rows: Sequence[dict[str, Any]]) -> str:
    for kind in WORST:
        own = [row for row in rows if row["kind"] == kind]
        if own and kind == HOLDS:
            return str(max((row["found"] for row in own), key=float))
        if own:
            return kind
    return ""


def _list(rows: Iterable[dict[str, Any]]) -> str:
    """By reason, which cells, and the largest deviation of each relation's."""
    by_reason: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        why = re.sub("; then [^,]*, ", "; the rest is ", row["why"])
        own = by_reason.setdefault(why or "not read yet", {})
        own.setdefault(f"{row['trainer'].partition('/')[0]} {row['relation']}", []).append(row)
    lines = ["| reason | where | largest deviation |", "| --- | --- | --- |"]
    for why, own in by_reason.items():
        where = "; ".join(f"{name}: {_names(own_rows)}" for name, own_rows in own.items())
        largest = max((row for own_rows in own.values() for row in own_rows), key=_size)
        cell = f"`{largest['trainer']}:{largest['relation']}/{largest['pair']}` {_escaped(_short(largest['found']))}"
        lines.append(f"| {_escaped(why)} | {where} | {cell} |")
    return "\n".join(lines) + "\n"


def _names(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["trainer"].partition("/")[2] for row in rows))
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} others"


def _short(found: str) -> str:
    """Without where in the gradient it is largest."""
    return re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", found)


def _size(row: dict[str, Any]) -> float:
    try:
        return abs(float(row["found"].split(" ")[0]))
    except ValueError:
        return math.inf


def _known_bugs(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"{len(rows)} bugs of the catalogue are found by a relation in a release with the bug:\n"]
    lines += ["| bug | cell | deviation |", "| --- | --- | --- |"]
    lines += [
        f"| [{bug}](patches/{bug}.md) | `{cell}` | {_escaped(_short(found))} |"
        for bug, cell, found in sorted(map(tuple, rows))
    ]
    lines += ["", "No relation finds the others:\n", "| bug | why |", "| --- | --- |"]
    lines += [f"| [{bug}](patches/{bug}.md) | {_escaped(why)} |" for bug, why in sorted(known_bugs.unseen().items())]
    return "\n".join(lines) + "\n"


def _escaped(words: str) -> str:
    """As Markdown, in a table; what is in backticks stays as it is, but for a table's own sign."""
    parts = words.replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([<\[*_])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
