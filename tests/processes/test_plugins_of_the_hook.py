"""Plugins under the site hook, in processes that import what they patch and nothing that a built-in patch is for.

What such a plugin patches is known to nobody but itself, so nothing may be missing in silence where it cannot say so.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

ON = {"RLHF_PATCHES_AUTOLOAD": "1"}
STRICT = {**ON, "RLHF_PATCHES_STRICT": "1"}
VERIFY = {**ON, "RLHF_PATCHES_VERIFY": "1"}
LOOK = "import toptarget; print(toptarget.f(5, 2))"
PLUGIN = """\
from rlhf_patches import Guard, Patch, Rewrite, Variant, hookimpl
@hookimpl
def rlhf_patches():
    change = Rewrite('toptarget:f', '$A - $B', '$A + $B')
    variant = Variant(Guard('toptarget', ''), (change,))
    return [Patch('toptarget-sign', 's', 's', 's', 's', ('r',), (variant,), 'never')]
"""
UNPATCHED, PATCHED = "3\n", "7\n"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with a framework of one function, and a plugin that repairs it."""
    (tmp_path / "toptarget.py").write_text("def f(a, b):\n    return a - b\n")
    (tmp_path / "plug.py").write_text(PLUGIN)
    metadata = tmp_path / "plug-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlhf_patches]\nplug = plug\n")
    return tmp_path


def look(installed, folder, settings, code=LOOK):
    return installed.run(installed.python, "-c", code, **{"PYTHONPATH": str(folder), **settings})


BROKEN = {
    "cannot be imported": "import nonesuch\n" + PLUGIN,
    "ends the process": "raise SystemExit(0)\n",
    "brings none": PLUGIN.replace("    return [", "    ["),
    "brings more than patches": PLUGIN.replace("    return [", "    return ['more', "),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_plugin_is_said_and_stops_a_strict_run(installed, plugin, broken):
    (plugin / "plug.py").write_text(BROKEN[broken])
    report = plugin / "report.jsonl"
    done = look(installed, plugin, {**ON, "RLHF_PATCHES_REPORT": str(report)})
    usable = broken == "brings more than patches"
    assert (done.returncode, done.stdout) == (0, PATCHED if usable else UNPATCHED), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"[rlhf_patches] plugin plug could not be used{' in full' if usable else ''}: ")
    (said,) = json.loads(report.read_text())["plugin_failures"]
    assert said["plugin"] == "plug"

    for settings in (STRICT, VERIFY):
        caught = f"try: import toptarget\nexcept ImportError: pass\nexcept Exception: print('refused')\n{LOOK}"
        done = look(installed, plugin, settings, caught)
        if settings is VERIFY:  # it compares ranks, whose plugins may be broken alike
            assert (done.returncode, done.stdout) == (0, PATCHED if usable else UNPATCHED)
            assert done.stderr.count("plugin plug could not be used") == 1
            continue
        assert (done.returncode, done.stdout) == (1, "refused\n"), "and again, where the first is caught"
        assert "PatchError: strict mode: plugin plug could not be used" in done.stderr


@pytest.mark.parametrize("value", ["typo", "plug,typo", "plug.", ",", "all", "1"])
@pytest.mark.parametrize("settings", [ON, STRICT])
def test_a_wrong_name_of_a_plugin_stops_the_run(installed, plugin, value, settings):
    caught = f"try: import toptarget\nexcept ImportError: pass\nexcept Exception: print('refused')\n{LOOK}"
    done = look(installed, plugin, {**settings, "RLHF_PATCHES_PLUGINS": value}, caught)
    assert (done.returncode, done.stdout) == (1, "refused\n"), done.stderr
    assert "SettingsError: RLHF_PATCHES_PLUGINS names " in done.stderr


@pytest.mark.parametrize("value", ["plug", " PLUG ", "", " ", "plug,plug"])
def test_a_right_one_does_not(installed, plugin, value):
    done = look(installed, plugin, {**STRICT, "RLHF_PATCHES_PLUGINS": value})
    assert (done.returncode, done.stdout, done.stderr) == (0, PATCHED, "")


def test_a_plugin_that_is_asked_for_and_not_installed(installed, plugin):
    """Without any plugin: nothing but the variable tells that one was to be there."""
    for file in (plugin / "plug-1.0.dist-info").iterdir():
        file.unlink()
    done = look(installed, plugin, {**ON, "RLHF_PATCHES_PLUGINS": "plug"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "RLHF_PATCHES_PLUGINS names 'plug', which provides no patches here" in done.stderr


def as_archive(plugin: Path, name: str) -> Path:
    """The plugin within an archive: a zip, or an egg with its own kind of metadata."""
    path = plugin / name
    info = "EGG-INFO" if name.endswith(".egg") else "plug-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(plugin / "plug.py", "plug.py")
        archive.writestr(f"{info}/{'PKG-INFO' if name.endswith('.egg') else 'METADATA'}", "Name: plug\nVersion: 1.0\n")
        archive.writestr(f"{info}/entry_points.txt", "[rlhf_patches]\nplug = plug\n")
    for file in (plugin / "plug-1.0.dist-info").iterdir():
        file.unlink()
    (plugin / "plug-1.0.dist-info").rmdir()
    (plugin / "plug.py").unlink()
    return path


@pytest.mark.parametrize("name", ["plug.zip", "plug-1.0-py3.egg", "an.egg that is a zip"])
def test_a_plugin_in_an_archive(installed, plugin, name):
    archive = as_archive(plugin, name)
    done = look(installed, plugin, {**ON, "PYTHONPATH": f"{archive}:{plugin}"})
    assert (done.returncode, done.stdout, done.stderr) == (0, PATCHED, "")


@pytest.mark.parametrize("entry", ["/nothere.egg", "other.zip", "/nothere"])
def test_a_plugin_beside_what_only_importlib_metadata_can_read(installed, plugin, entry):
    with zipfile.ZipFile(plugin / "other.zip", "w") as archive:
        archive.writestr("other.py", "")
    done = look(installed, plugin, {**ON, "PYTHONPATH": f"{plugin / entry}:{plugin}"})
    assert (done.returncode, done.stdout, done.stderr) == (0, PATCHED, "")


FINDER = """
import importlib.abc, importlib.metadata, pathlib, sys
class Of(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None): return None
    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        named = context.name in (None, "plug")
        return [importlib.metadata.PathDistribution(pathlib.Path(sys.argv[1]))] if named else []
sys.meta_path.append(Of())
"""


def test_a_plugin_that_a_foreign_finder_knows_of(installed, plugin):
    hidden = (plugin / "plug-1.0.dist-info").rename(plugin / "hidden")
    done = installed.run(installed.python, "-c", FINDER + LOOK, str(hidden), PYTHONPATH=str(plugin), **ON)
    assert (done.returncode, done.stdout, done.stderr) == (0, PATCHED, "")


def test_what_mends_a_broken_environment_still_runs(installed, plugin):
    (plugin / "plug.py").write_text("import nonesuch\n")
    (plugin / "pip").mkdir()
    (plugin / "pip" / "__init__.py").touch()
    (plugin / "pip" / "__main__.py").write_text("import pip\nprint('pip')\n")
    settings = {**STRICT, "PYTHONPATH": str(plugin)}
    done = installed.run(installed.python, "-m", "pip", **settings)
    assert (done.returncode, done.stdout, done.stderr) == (0, "pip\n", "")
    for command in ((installed.command,), (installed.python, "-m", "rlhf_patches")):
        done = installed.run(*command, "list", **settings)
        assert "plugin plug could not be used" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_without_plugins_nothing_is_loaded(installed, tmp_path):
    (tmp_path / "other.py").write_text("import sys; print('rlhf_patches.definitions' in sys.modules)\n")
    assert installed.code("import other", PYTHONPATH=str(tmp_path), **STRICT) == "False"


def test_what_a_plugin_imports_while_it_is_asked_runs_once(installed, plugin):
    """The module whose import is the occasion to ask is about to run, and is there already when that is done."""
    (plugin / "shared.py").write_text("import sys; sys.ran = getattr(sys, 'ran', 0) + 1\n")
    (plugin / "plug.py").write_text("import shared\n" + PLUGIN)
    code = f"import shared, sys, plug; print(sys.ran, plug.shared is shared); {LOOK}"
    done = look(installed, plugin, ON, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"1 True\n{PATCHED}", "")
