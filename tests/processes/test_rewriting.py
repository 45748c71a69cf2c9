"""What compiling upstream's text says and leaves on disk, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.harness.texts import TRACED


@pytest.mark.skipif(sys.version_info < (3, 12), reason="older versions warn of it once, at the first compilation")
def test_no_warnings_about_the_frameworks_text(framework):
    """The framework's cached bytecode is silent about its invalid escapes; so must we be, and with -W error."""
    framework.write("mod", "PATTERN = '\\d'\ndef f(x): return x - 1\n")
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(framework.site)!r})
        import {framework.name}.mod as mod
        from rlhf_patches import *
        from rlhf_patches.engine.engine import Engine
        from rlhf_patches.definitions.registry import Registered
        change = Rewrite({framework.path("mod:f")!r}, "x - 1", "x + 1")
        patch = Patch("a-bug", *"sscr", ("r",), (Variant(Guard("no-such-distribution", ""), (change,)),), "r")
        print(Engine(load=lambda: ([Registered(patch, "t")], [])).apply()["a-bug"].status, mod.f(1))
        """
    )
    quiet = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", code], env=quiet, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", code], env=quiet, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("applied 2", "")


# --------------------------------------------------------------------------------- debuggers, tracebacks


def test_breakpoints_by_line(framework):
    """pdb stops in the rewritten function at the line of the file, and shows that line."""
    file = framework.write("mod", TRACED)
    script = framework.site / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import {framework.name}.mod as mod
            from rlhf_patches import *
            from rlhf_patches.engine.engine import Engine
            from rlhf_patches.definitions.registry import Registered
            change = Rewrite("{framework.name}.mod:f", "min($X, 0)", "abs($X)")
            patch = Patch("a-bug", *"sscr", ("r",), (Variant(Guard("{framework.distribution}", ""), (change,)),), "r")
            print(Engine(load=lambda: ([Registered(patch, "t")], [])).apply()["a-bug"].status)
            mod.f(-4)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "pdb", str(script)],
        input=f"break {file}:9\ncontinue\nprint(('y', y))\nwhere\nnext\nprint(('z', z))\nclear 1\nquit\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(framework.site)},
    )
    assert "applied" in done.stdout, done.stdout + done.stderr
    for shown in (f"> {file}(9)f()", "-> z = helper(y)  # the line", "('y', 4)", f"> {file}(10)f()", "('z', 0.25)"):
        assert shown in done.stdout
