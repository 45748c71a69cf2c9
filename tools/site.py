"""Build docs/ as a site, ``.cache/site/html``: ``make site``. Its first page is a catalogue to search.

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

from rlhf_patches.definitions import pages
from rlhf_patches.definitions.patch import KnownBug
from rlhf_patches.patches import plugin

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "release_record"))
import record  # noqa: E402

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?!patches/|[a-z-]+\.md)[^)]+)\)")
_PAGE = """\
# Find a bug

rlhf_patches repairs known bugs of RLHF training stacks at run time, in memory only: `import rlhf_patches;
rlhf_patches.apply()`. Each patch repairs one bug, only in the releases that have it, only where it recognises the code.
Paste an error message, or choose what you use.

<form id="find" markdown="0">
<label>Framework <select name="framework"><option value="">all</option>{frameworks}</select></label>
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
    (docs / "index.md").write_text(first_page(plugin.rlhf_patches(), record.load_all()), encoding="utf-8")
    shutil.copy(ROOT / "tools" / "mkdocs.yml", folder)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=True)
    return folder / "html"


def _within(markdown: str) -> str:
    """Links to the repository's other files lead nowhere on a site: their text stays, and the path."""
    return _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}` in the repository)", markdown)


def first_page(patches: Iterable[KnownBug], records: Iterable[record.Record]) -> str:
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
    attributes = {"framework": patch.distribution, "releases": " ".join(affected), "text": " ".join(text.split())}
    data = " ".join(f'data-{name}="{html.escape(value)}"' for name, value in attributes.items())
    cells = (
        f'<a href="patches/{patch.name}.html">{patch.name}</a>',
        f"{patch.distribution} {html.escape(patch.versions)}",
        html.escape(patch.harm),
        html.escape(pages.bug(patch)),
    )
    return f"<tr {data}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


if __name__ == "__main__":
    print(f"{build(ROOT / '.cache' / 'site') / 'index.html'}: open it in a browser")
