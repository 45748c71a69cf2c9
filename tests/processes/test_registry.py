"""Patches of other distributions, installed for real in fresh environments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.nested_pytest import alone
from tests.harness.plugins import IMPOSTOR, TAKEN

ROOT = Path(__file__).parents[2]

# ----------------------------------------------------------------------------------------------- the example


@pytest.fixture
def environment(with_example):
    """Its Python."""
    return Path(with_example.python)


def _run(python, code, **environment):
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("apply", "result"), [(True, 2.0), (False, 1.0)])
@pytest.mark.parametrize("imported_first", [True, False])
def test_the_example_repairs_its_framework(environment, apply, result, imported_first):
    lines = ["import rlhf_patches; report = rlhf_patches.apply()"] if apply else []
    lines.insert(0 if imported_first else 1, "from toy_framework.losses import masked_mean")
    lines.append("print(masked_mean([1.0, 3.0, 0.0, 0.0], [1, 1, 0, 0]))")
    if apply:
        lines.append("print(rlhf_patches.report().to_json())")
    output = _run(environment, "\n".join(lines)).splitlines()
    assert float(output[0]) == result
    if apply:
        report = json.loads(output[1])
        row = next(row for row in report["patches"] if row["name"] == "toy-masked-mean")
        assert (row["status"], row["version"], row["plugin"]) == ("applied", "1.4", "rlhf-patches-example")
        assert report["plugin_failures"] == []


def test_built_in_patches_come_the_same_way(environment):
    code = "import rlhf_patches; print(*sorted({row.plugin for row in rlhf_patches.apply()}), rlhf_patches.__file__)"
    *found, file = _run(environment, code).split()
    assert found == ["rlhf-patches", "rlhf-patches-example"]
    assert Path(file).is_relative_to(environment.parents[1])


def test_the_example_by_way_of_the_site_hook(environment):
    code = "from toy_framework.losses import masked_mean; print(masked_mean([1.0, 3.0, 0.0, 0.0], [1, 1, 0, 0]))"
    assert float(_run(environment, code)) == 1.0
    assert float(_run(environment, code, RLHF_PATCHES_AUTOLOAD="1", RLHF_PATCHES_WATCH="toy_framework")) == 2.0


@pytest.mark.one_python
def test_the_readme_is_right(environment):
    text = (ROOT / "examples" / "plugin" / "README.md").read_text()
    code = re.search(r'python -c "\n(.*)"\n', text, re.DOTALL).group(1)
    assert _run(environment, code).splitlines()[-1] == "2.0"


@pytest.mark.one_python
def test_the_example_passes_its_own_tests(environment, tmp_path):
    folder = environment.parents[2] / "plugin"
    command = [environment, "-m", "pytest", "-q", "-rs", *alone(tmp_path)]
    done = subprocess.run(command, cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 passed, 3 skipped" in done.stdout
    assert "toy-framework 1.4 has the bug; name a release that does not have it" in done.stdout


# -------------------------------------------------------------------------------------------- plugins that break


@pytest.mark.parametrize("call", ["apply", "report", "revert"])
def test_a_plugin_that_calls_us_while_it_is_loaded_is_no_deadlock(site, tmp_path, call):
    """In a process of its own: there is one engine behind the public functions."""
    bad, good = site.add("bad", f"import rlhf_patches\nrlhf_patches.{call}()"), site.good()
    paths = [str(ROOT), str(site.folder)]
    code = f"import sys; sys.path[:0] = {paths}; import rlhf_patches; print(rlhf_patches.report())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(
        rf"plugin {bad} could not be used: .*rlhf_patches was called while it loads its plugins", done.stdout
    )
    assert good in done.stdout


# ---------------------------------------------------------------------------------------- who brings a patch


def test_a_finder_that_leads_to_other_patches(tmp_path):
    """As another project's editable install can. What is found there is used, and called what it is."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "plugin.py").write_text(IMPOSTOR.format(TAKEN))
    code = f"""
        import importlib.machinery, importlib.util, sys
        class Finder:
            def find_spec(name, path=None, target=None):
                if name == "rlhf_patches.patches":
                    there = {str(folder)!r}
                    return importlib.util.spec_from_file_location(
                        name, there + "/__init__.py", submodule_search_locations=[there])
        sys.meta_path.insert(0, Finder)
        from rlhf_patches.definitions import registry
        print(*(f"{{item.patch.name}}: {{item.plugin}}" for item in registry.load()[0]), sep=chr(10))
        print("rlhf_patches.patches" in sys.modules)
    """
    name = f"{folder} (calls itself rlhf-patches)"
    path = {"PYTHONPATH": str(ROOT)}
    found = _run(sys.executable, code, **path).splitlines()
    assert {f"{TAKEN}: {name}", f"x-user: {name}", "True"} <= set(found)
    assert _run(sys.executable, code, RLHF_PATCHES_PLUGINS="none", **path).split() == ["False"], "nor imported"


def test_a_real_terminal(installed):
    """rich reads markup and emoji names where it writes colors, too."""
    here, there = os.openpty()
    environment = installed.environment(
        {"RLHF_PATCHES_REPORT": "[/x]:smile:\x1b[2J", "TERM": "xterm", "COLUMNS": "120"}
    )
    process = subprocess.Popen([installed.command, "doctor"], stdout=there, stderr=there, env=environment)
    os.close(there)
    said = b""
    with os.fdopen(here, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # the other end is closed
        while piece := terminal.read(4096):
            said += piece
    assert process.wait(timeout=60) == 0, said
    assert b"\x1b[" in said, "colors"
    assert b"RLHF_PATCHES_REPORT=[/x]:smile:\\x1b[2J\r\n" in said
    assert b"\x1b[2J" not in said


def test_a_malformed_entry_points_file_of_anybody_stops_nobody_else(installed, tmp_path):
    """importlib.metadata.entry_points() fails as a whole then."""
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlhf_patches]\nthis is no entry point\n[a\n")
    code = (
        "import rlhf_patches; r = rlhf_patches.apply(); print(len(r.patches), *[f.plugin for f in r.plugin_failures])"
    )
    count, *failures = installed.code(code, PYTHONPATH=str(tmp_path)).split()
    assert int(count) > 0
    assert all("broken" in failure for failure in failures)
