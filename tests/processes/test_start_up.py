"""What importing the package imports, and fingerprints on every Python that is here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pluggy
import pytest

import rlhf_patches
from rlhf_patches import fingerprint
from tests.harness.texts import FUNCTION

ROOT = Path(rlhf_patches.__file__).parent.parent


# ----------------------------------------------------------------------------------------------- fingerprints

# Everything whose tree or repr() differs between Python versions, as far as we know.
ACROSS = (
    FUNCTION
    + '''
def other(x, w, *a):
    """Only a docstring and strings: \U0001fae8."""
    plain = f"a{x}b" "c" f"{x!a:{w}.{w}}d" rf"\\d{{{x}}}\\n"
    empty = f"", f"{x:}", f"{x=}", f"{x = !r:>{w}}", f"{{}}", u"u", f"{x:%H:%M {w}}"
    new = "\U0001fae8\u1c89\U0001faea\ud800é\\x85\\u2028"
    numbers = 0x_ff, 1e400, -1e-400, 1_000.5, 123456789012345678901234567890, 0o17, 1j
    match x:
        case {"a": [1, *rest], **more} | None if rest:
            return x[a, ::2], x[()], x[1:2, *a] if w else x[...]
        case Point(x=0) as point:
            pass
    for i, in a:
        continue
    else:
        global g
    async def inner(): return [y async for y in x] + [await z for z in w]
    @decorator
    class Local(Base, metaclass=M):
        """A docstring."""
        attribute: int = 1
        def method(self): return super().method
    assert (n := 10) <= x < 5, "m"
    import os, os.path as path
    from . import sibling
    from json import loads as parse
'''
).replace("\ud800", "\\ud800")


def _interpreters():
    versions = Path.home() / ".pyenv" / "versions"
    found = {path.parent.parent.name: path for path in versions.glob("3.1[0-9].*/bin/python")}
    found.update((path.name[6:], path) for path in (ROOT / ".cache" / "pythons" / "bin").glob("python3.*"))
    own = [str(number) for number in sys.version_info[:2]]
    return [pytest.param(found[name], id=name) for name in sorted(found) if name.split(".")[:2] != own]


@pytest.mark.parametrize("python", _interpreters())
@pytest.mark.parametrize("name", ["Thing.method", "other"])
def test_fingerprints_are_equal_on_every_python(python, name, tmp_path):
    text = ACROSS.replace("x[1:2, *a]", "x[1:2, a]")  # a star in a subscript is new in 3.11
    (tmp_path / "text.py").write_text(text, encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from rlhf_patches.guards.fingerprints import fingerprint; "
        "print(fingerprint(open(sys.argv[2], encoding='utf-8').read(), sys.argv[3]))"
    )
    done = subprocess.run(
        [python, "-I", "-S", "-c", code, ROOT, tmp_path / "text.py", name], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == fingerprint(text, name)


# ------------------------------------------------------------------------------------------------ cheap imports


def _modules_after(statement, *options):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_next_to_nothing():
    bare = _modules_after("import os, sys, _thread", "-S", "-I")
    ours = {"rlhf_patches", "rlhf_patches.import_system"}
    assert _modules_after("import rlhf_patches", "-S", "-I") - bare == ours
    assert "typing" not in bare


def test_importing_the_site_hook_imports_next_to_nothing():
    bare = _modules_after("import os, sys, _thread, atexit", "-S", "-I")  # built in, all of them
    assert _modules_after("import rlhf_patches.site_hook", "-S", "-I") - bare == {
        "rlhf_patches",
        "rlhf_patches.import_system",
        "rlhf_patches.installed",
        "rlhf_patches.site_hook",
    }


def test_the_engine_imports_no_framework_and_no_test_tool():
    every_command = "import rlhf_patches.cli; rlhf_patches.cli._parser([])"
    modules = _modules_after(f"{every_command}; from rlhf_patches.engine.engine import engine; engine.report()")
    tops = {name.partition(".")[0] for name in modules}
    assert not tops & {
        "torch",
        "numpy",
        "megatron",
        "transformers",
        "trl",
        "deepspeed",
        "verl",
        "swift",
        "slime",
        "pytest",
    }
    assert "packaging" in tops


def test_a_command_is_loaded_without_the_others():
    ours = "rlhf_patches.cli."
    modules = _modules_after("import rlhf_patches.cli; rlhf_patches.cli._parser(['run', '--', 'true'])")
    assert {name for name in modules if name.startswith(ours)} == {
        ours + name for name in ("command_line", "output", "run", "supervised")
    }
    assert not modules & {"rich", "ast_grep_py", "pluggy", "packaging", "importlib.metadata"}


LATER = {
    "rlhf_patches.definitions.bug",
    "rlhf_patches.definitions.changes",
    "rlhf_patches.definitions.checks",
    "rlhf_patches.definitions.guard",
    "rlhf_patches.definitions.patch",
    "rlhf_patches.definitions.variant",
    "rlhf_patches.engine.ledger",
    "rlhf_patches.guards.decision",
    "difflib",
    "importlib.metadata",
    "json",
    "logging",
    "packaging",
    "pluggy",
    "subprocess",
}
"""What `apply` does without until a function is to be changed, a line to be said, or a version is not plain."""


def test_apply_imports_only_what_every_run_needs():
    after = _modules_after("import rlhf_patches; rlhf_patches.apply()")
    assert "rlhf_patches.engine.engine" in after
    assert not after & (LATER | {"rich", "argparse", "ast_grep_py"})


def test_what_changes_functions_is_imported_with_a_framework(tmp_path):
    metadata = tmp_path / "transformers-4.57.6.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    package = tmp_path / "transformers"
    models = [package / "models" / name for name in ("gpt_oss", "qwen3_next")]
    for model in models:
        model.mkdir(parents=True)
    inits = [folder / "__init__" for folder in (package, package / "models", *models)]
    for module in (
        *inits,
        package / "trainer",
        package / "modeling_utils",
        *(model / f"modeling_{model.name}" for model in models),
    ):
        module.with_suffix(".py").write_text("")
    apply = (
        f"sys.path.insert(0, {str(tmp_path)!r}); import rlhf_patches; "
        "assert rlhf_patches.apply()['transformers-moe-aux-loss'].status == 'pending'"
    )
    assert not _modules_after(apply) & LATER
    ours = {name for name in LATER if name.startswith("rlhf_patches")}
    assert _modules_after(f"{apply}; import transformers.trainer") >= ours


def test_apply_imports_nothing_for_frameworks_that_are_not_there(tmp_path):
    (tmp_path / "pluggy").symlink_to(Path(pluggy.__file__).parent)
    modules = _modules_after(
        f"sys.path[:] = [{str(tmp_path)!r}, *(path for path in sys.path if 'site-packages' not in path)]; "
        "import rlhf_patches; assert {row.status for row in rlhf_patches.apply()} == {'absent'}"
    )
    patches = {name for name in modules if name.startswith("rlhf_patches.patches.")}
    assert patches == {"rlhf_patches.patches.plugin", "rlhf_patches.patches.catalogue"}
    assert "packaging" not in modules
