"""The site in a real browser: headless Chromium (``apt-get install chromium``)."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from urllib.parse import urlencode

import pytest

from rlhf_patches.definitions import pages
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


def opened(page, fragment="", *options):
    """The page's text after its scripts have run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*command, *options, f"{page.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def found(page, fragment=""):
    """The patches that the catalogue shows."""
    return Rows(opened(page, fragment).partition('id="catalogue"')[2].partition("</table>")[0]).shown


def with_script(page, script):
    """A copy of a page that runs a script when it is loaded."""
    copy = page.with_name(f"copy-of-{page.name}")
    copy.write_text(page.read_text().replace("</body>", f"<script>addEventListener('load', {script});</script></body>"))
    return copy


@in_a_browser
@pytest.mark.parametrize(
    ("asked", "expected"),
    [  # as the address has it
        ({}, [patch.name for patch in sorted(site.plugin.rlhf_patches(), key=pages.by_harm)]),
        ({"words": "[rank1]: RuntimeError: size mismatch, got input (7), vec (0)"}, ["trl-chunked-nll-zero3"]),
        ({"words": "KeyError: GPTModel( in disable_forward_pre_hook"}, ["megatron-core-forward-pre-hook-reentry"]),
        (
            {"framework": "peft", "release": "0.21.2"},
            ["peft-disable-adapter-restore", "peft-lora-merge-drift", "peft-clear-device-cache"],
        ),
        ({"framework": "peft", "release": "9.9"}, []),
        ({"framework": "nemo-rl", "side": "rollouts"}, ["nemo-rl-async-prefix-cache", "nemo-rl-watch-rollouts"]),
        ({"words": "a segmentation violation of something unheard"}, []),
    ],
)
def test_a_bug_is_found(built, asked, expected):
    assert found(built / "find.html", f"#{urlencode(asked)}") == expected


@in_a_browser
def test_what_is_typed_is_looked_for(built):
    typing = (
        "() => { const field = document.querySelector('#find [name=words]');"
        "field.value = 'policy_ref in the saved policy'; field.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    assert found(with_script(built / "find.html", typing)) == ["peft-save-adapter-prefix"]


SEARCH = """async () => {
  const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));
  const roots = () => [...document.querySelectorAll("*")].map(each => each.shadowRoot).filter(root => root);
  document.querySelector("button.md-search__button").click();
  await pause(1500);
  const field = roots().map(root => root.querySelector("input")).find(each => each);
  field.value = "prefix cache";
  field.dispatchEvent(new Event("input", {bubbles: true}));
  await pause(2000);
  document.body.dataset.found = roots().map(root => root.textContent).join(" ");
}"""


@in_a_browser
@pytest.mark.parametrize("page", ["cli.html", "patches/trl-sft-first-label.html"])
def test_the_search_works_without_a_server_or_the_net(built, page):
    assert "unpkg.com" not in (built / page).read_text()
    (found,) = re.findall(r'data-found="([^"]*)"', opened(with_script(built / page, SEARCH)))
    assert "nemo-rl-async-prefix-cache" in found
    assert "Search is unavailable" not in found


@in_a_browser
@pytest.mark.parametrize("width", [800, 1220, 1400, 1920])
def test_no_column_of_the_catalogue_is_cut(built, width):
    measure = (
        "() => { const around = document.querySelector('.md-typeset__scrollwrap');"
        "document.body.dataset.widths = around.scrollWidth + ' ' + around.clientWidth; }"
    )
    text = opened(with_script(built / "find.html", measure), "", f"--window-size={width},900")
    ((inside, outside),) = re.findall(r'data-widths="(\d+) (\d+)"', text)
    assert int(inside) <= int(outside)


@in_a_browser
@pytest.mark.parametrize(("wanted", "scheme"), [("0", "slate"), ("1", "default")])
def test_it_is_dark_where_the_system_is(built, wanted, scheme):
    text = opened(built / "index.html", "", f"--blink-settings=preferredColorScheme={wanted}")
    assert re.findall(r'<body[^>]* data-md-color-scheme="(\w+)"', text) == [scheme]


@in_a_browser
@pytest.mark.parametrize("name", ["index", "find", "cli", "compatibility"])
def test_a_phone_shows_it_whole(built, name):
    measure = (
        "() => { const cells = [...document.querySelectorAll('#catalogue td')];"
        "const ends = cells.map(cell => cell.getBoundingClientRect().right);"
        "parent.postMessage([innerWidth, document.documentElement.scrollWidth, ...ends].join(' '), '*'); }"
    )
    phone = built / f"phone-{name}.html"  # a window of Chromium is no narrower than 500 pixels
    phone.write_text(
        "<body><script>addEventListener('message', said => { document.body.dataset.widths = said.data; });</script>"
        f'<iframe style="width: 390px" src="{with_script(built / f"{name}.html", measure).name}"></iframe></body>'
    )
    ((width, *others),) = [each.split() for each in re.findall(r'data-widths="([^"]*)"', opened(phone))]
    assert width == "390"
    assert len(others) > (4 * 50 if name == "find" else 0)
    assert max(map(float, others)) <= 390


def test_the_start_says_what_it_is_and_how_to_begin(built):
    page = (built / "index.html").read_text()
    for text in ("pip install .", "rlhf-patches diagnose train.log", "Why you can trust it", 'href="find.html"'):
        assert text in page
    assert f"rlhf_patches {site.__version__}, Apache License 2.0" in page


def test_no_backslash_is_shown_in_a_table(built):
    cells = [cell for page in built.rglob("*.html") for cell in re.findall(r"(?s)<td.*?</td>", page.read_text())]
    assert any("[--json | --quiet]" in cell for cell in cells)
    assert [cell for cell in cells if "\\|" in cell] == []


def test_every_patch_has_its_page(built):
    for patch in site.plugin.rlhf_patches():
        assert (built / "patches" / f"{patch.name}.html").is_file()


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path, monkeypatch):
    (tmp_path / "tools").mkdir()
    shutil.copy(site.ROOT / "tools" / "mkdocs.yml", tmp_path / "tools")
    shutil.copytree(site.ROOT / "docs", tmp_path / "docs")
    shutil.copy(site.ROOT / "README.md", tmp_path)
    with (tmp_path / "docs" / "ray.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        site.build(tmp_path / "build")
