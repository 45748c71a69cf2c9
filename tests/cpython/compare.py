"""CPython's own tests, as released and with every module watched: ``python tests/cpython/compare.py [TEST ...]``.

What a watched module's import looks like from inside and outside must be what it is without us, so each test has
to end alike. Needs an interpreter that was installed with its tests (``python -m test``). Status 1 if any differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

# In alphabetical order; those that this Python does not have are left out.
TESTS = (
    "test_bdb test_cmd_line_script test_copy test_dataclasses test_doctest test_frozen test_import "
    "test_importlib test_inspect test_linecache test_module test_modulefinder test_pdb test_pickle test_pkgutil "
    "test_pyclbr test_pydoc test_runpy test_site test_sys_settrace test_threadedtempfile test_threading "
    "test_threading_local test_trace test_traceback test_warnings test_zipimport test_threaded_import "
    "test_multiprocessing_main_handling"
)

EVERYTHING = """
from rlhf_patches.engine import import_hooks as imports
class Everything(dict):
    def __contains__(self, name):
        return True
    def get(self, name, default=()):
        return default
imports._watched = Everything()
imports.finder.install()
imports._notice_reloads()
"""


def results(tests: list[str], folder: Path, watched: bool) -> dict[str, str]:
    """How each test ended: passed, failure, error or skipped."""
    report = folder / f"{'watched' if watched else 'released'}.xml"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_PATCHES_")}
    if watched:
        hook = folder / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(EVERYTHING)
        environment["PYTHONPATH"] = str(hook)
        # An error in sitecustomize is a line on standard error, and the tests would run without us.
        watches = "import sys; sys.exit(type(sys.meta_path[0]).__name__ != '_Finder')"
        subprocess.run([sys.executable, "-c", watches], env=environment, check=True)
    work = folder / report.stem
    work.mkdir()
    command = [sys.executable, "-m", "test", "-j2", "--timeout", "300", "--junit-xml", str(report), *tests]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    if not report.exists():
        raise SystemExit(f"{' '.join(command)} wrote no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[str(case.get("name"))] = kinds[0] if kinds else "passed"
    return found


def main() -> int:
    tests = sys.argv[1:] or [name for name in TESTS.split() if _exists(name)]
    with tempfile.TemporaryDirectory() as folder:
        before = results(tests, Path(folder), watched=False)
        after = results(tests, Path(folder), watched=True)
    different = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in different:
        print(f"{name}: {before.get(name)} as released, {after.get(name)} with every module watched")
    counts = ", ".join(f"{count} {how}" for how, count in Counter(before.values()).most_common())
    print(f"Python {sys.version.split()[0]}: {len(before)} tests ({counts}); {len(different)} differ when watched")
    return int(bool(different) or not before)


def _exists(name: str) -> bool:
    import test  # here, for a message of its own where there is none

    folder = Path(test.__path__[0])
    return (folder / name).is_dir() or (folder / f"{name}.py").exists()


if __name__ == "__main__":
    raise SystemExit(main())
