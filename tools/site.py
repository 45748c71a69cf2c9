"""Build docs/ as a site, ``.cache/site/html``: ``make site``. It starts as README does, and has a catalogue to search.

By Zensical, which reads mkdocs.yml; a link that leads nowhere ends the build.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhf_patches._version import __version__
from rlhf_patches.definitions import pages
from rlhf_patches.definitions.bug import KnownBug
from rlhf_patches.patches import plugin

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "release_record"))
import record  # noqa: E402

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?!patches/|[a-z-]+\.md)[^)]+)\)")
_CODE = re.compile(r"(`+)(.+?)\1")
_FETCHED = 'src="https://unpkg.com/iframe-worker/shim"'  # by which the search would work over file://
_START = """\
{head}

[Find a bug](find.md){{ .md-button .md-button--primary }} [All commands](cli.md){{ .md-button }}

## Three commands

```
# Which known bugs these versions have
rlhf-patches audit uv.lock
# Which of them an error or a hang is
rlhf-patches diagnose train.log
# Your run, with what it needs repaired
rlhf-patches run -- torchrun train.py
```

{trust}
"""
_PAGE = """\
# Find a bug

Paste an error message, or choose what you use. Each bug has a page: what you see, why, and what the patch changes.

<form id="find" markdown="0">
<label>Framework <select name="framework"><option value="">all</option>{frameworks}</select></label>
<label>Of <select name="side"><option value="">all</option><option>training</option><option>rollouts</option></select>
</label>
<label>Release <input name="release" placeholder="such as 0.16.1" autocomplete="off"></label>
<label>Words, or an error message <input name="words" type="search" autocomplete="off"></label>
</form>

<p id="found"></p>

<table id="catalogue" markdown="0">
<thead><tr><th>Bug</th><th>Releases</th><th>Harm</th><th>What is wrong, and when</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>

<script src="assets/catalogue.js"></script>
"""


def build(folder: Path) -> Path:
    """Write what the site is made from into a folder, and build it there.

    Args:
        folder: of its own: Zensical keeps its cache there too. What is in it goes.

    Returns:
        the folder with the site.

    Raises:
        CalledProcessError: there was a warning: a page or a link is wrong.
    """
    shutil.rmtree(folder, ignore_errors=True)
    docs = folder / "docs"
    shutil.copytree(ROOT / "docs", docs)
    for page in docs.rglob("*.md"):
        page.write_text(_within(page.read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "index.md").write_text(start_page((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
    (docs / "find.md").write_text(catalogue_page(plugin.rlhf_patches(), record.load_all()), encoding="utf-8")
    settings = (ROOT / "tools" / "mkdocs.yml").read_text(encoding="utf-8")
    (folder / "mkdocs.yml").write_text(settings.replace("VERSION", __version__), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=True)
    built = folder / "html"
    for page in built.rglob("*.html"):
        ours = f'src="{"../" * (len(page.relative_to(built).parts) - 1)}assets/worker.js"'
        page.write_text(page.read_text(encoding="utf-8").replace(_FETCHED, ours), encoding="utf-8")
    return built


def _within(markdown: str) -> str:
    """A page as it is on a site.

    Links to the repository's other files lead nowhere: their text stays, and the path. GitHub wants a backslash before
    each ``|`` in a table; here it would be shown where the ``|`` is code.
    """
    lines = _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}` in the repository)", markdown).split("\n")
    return "\n".join(_CODE.sub(_bare, line) if line.startswith("|") else line for line in lines)


def _bare(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


def start_page(readme: str) -> str:
    """What it is, how to install it, three commands, and why to trust it: the most of it as README has it."""
    head, *sections = re.split(r"\n(?=## )", readme.replace("](docs/", "]("))
    (trust,) = (section for section in sections if section.startswith("## Why you can trust it"))
    return _START.format(head=_without_links(head), trust=_without_links(trust))


def _without_links(section: str) -> str:
    """A section without the paragraph of links at its end, which the site has beside every page."""
    return "\n\n".join(part for part in section.strip().split("\n\n") if not part.startswith("["))


def catalogue_page(patches: Iterable[KnownBug], records: Iterable[record.Record]) -> str:
    """The catalogue as Markdown with HTML: one row per patch, and in it what the filters look at."""
    patches, records = list(patches), list(records)
    frameworks = "".join(f"<option>{name}</option>" for name in sorted({patch.distribution for patch in patches}))
    rows = "\n".join(_row(patch, records) for patch in sorted(patches, key=pages.by_harm))
    return _PAGE.format(frameworks=frameworks, rows=rows)


def _row(patch: KnownBug, records: list[record.Record]) -> str:
    entries = (entry for item in record.records_of(patch, records) for entry in item.entries)
    affected = sorted({entry.version for entry in entries if record.claimed(patch, entry) is not None})
    errors = [f"{signature.exception} {signature.message}" for signature in patch.signatures]
    text = " ".join([patch.name, patch.summary, patch.harm, patch.when, patch.symptom, patch.cause, *errors])
    attributes = {
        "framework": patch.distribution,
        "side": "rollouts" if patch.affects_rollouts else "training",
        "releases": " ".join(affected),
        "text": " ".join(text.split()),
    }
    data = " ".join(f'data-{name}="{html.escape(value)}"' for name, value in attributes.items())
    cells = (
        f'<a href="patches/{patch.name}.html">{patch.name}</a>',
        f"{patch.distribution} {html.escape(patch.versions)}",
        html.escape(patch.harm or patch.kind),
        html.escape(pages.bug(patch)),
    )
    return f"<tr {data}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


if __name__ == "__main__":
    print(f"{build(ROOT / '.cache' / 'site') / 'index.html'}: open it in a browser")
