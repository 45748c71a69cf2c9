"""The site in a real browser: headless Chromium (``apt-get install chromium``)."""

from __future__ import annotations

import html.parser
import shutil
import subprocess
from urllib.parse import urlencode

import pytest

from tools import site

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed here; `apt-get install chromium`, and `make site` runs these"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return site.build(tmp_path_factory.mktemp("site") / "build")


class Rows(html.parser.HTMLParser):
    """Which patches a page shows."""

    def __init__(self, text):
        super().__init__()
        self.shown, self._hidden = [], True
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "tr":
            self._hidden = "hidden" in attributes or "data-framework" not in attributes
        elif tag == "a" and not self._hidden:
            self.shown.append(attributes["href"].removeprefix("patches/").removesuffix(".html"))


def opened(page, fragment=""):
    """The page's elements after its scripts have run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"{page.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120, check=True
    )
    return Rows(done.stdout.partition('id="catalogue"')[2].partition("</table>")[0]).shown


@in_a_browser
@pytest.mark.parametrize(
    ("asked", "expected"),
    [  # as the address has it
        ({}, [patch.name for patch in site.plugin.rlhf_patches()]),
        ({"words": "[rank1]: RuntimeError: size mismatch, got input (7), vec (0)"}, ["trl-chunked-nll-zero3"]),
        ({"words": "KeyError: GPTModel( in disable_forward_pre_hook"}, ["megatron-forward-pre-hook-reentry"]),
        ({"framework": "peft", "release": "0.21.2"}, ["peft-disable-adapter-restore", "peft-lora-merge-drift"]),
        ({"framework": "peft", "release": "9.9"}, []),
        ({"words": "a segmentation violation of something unheard"}, []),
    ],
)
def test_a_bug_is_found(built, asked, expected):
    assert opened(built / "index.html", f"#{urlencode(asked)}") == expected


@in_a_browser
def test_what_is_typed_is_looked_for(built):
    page = built / "typed.html"
    typing = (
        "<script>addEventListener('load', () => { const field = document.querySelector('#find [name=words]');"
        "field.value = 'policy_ref in the saved policy'; field.dispatchEvent(new Event('input', {bubbles: true})); })"
        "</script></body>"
    )
    page.write_text((built / "index.html").read_text().replace("</body>", typing))
    assert opened(page) == ["peft-save-adapter-prefix"]


def test_every_patch_has_its_page(built):
    for patch in site.plugin.rlhf_patches():
        assert (built / "patches" / f"{patch.name}.html").is_file()


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path, monkeypatch):
    (tmp_path / "tools").mkdir()
    shutil.copy(site.ROOT / "tools" / "mkdocs.yml", tmp_path / "tools")
    shutil.copytree(site.ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "ray.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        site.build(tmp_path / "build")
