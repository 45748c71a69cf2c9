"""Manners of import that take an interpreter of their own: scripts, ``-m``, spawned children."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

BUG = "def add(a, b):\n    return a - b\n"
FIXED, BROKEN = 3, 1  # add(2, 1)


def _python(*arguments, cwd=None, **environment):
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=120
    )


# --------------------------------------------------------------------------------------------- processes


@pytest.fixture
def script(framework):
    """A file that applies a Rewrite of ``mod:add`` and then runs the given lines."""
    framework.write("mod", BUG)

    def write(lines, name="script.py"):
        file = framework.site / name
        head = f"""
            import multiprocessing, sys
            from rlhf_patches import Guard, Patch, Rewrite, Variant
            from rlhf_patches.engine.engine import Engine
            from rlhf_patches.definitions.registry import Registered

            def engine(target="{framework.name}.mod:add"):
                patch = Patch(
                    name="a-bug", summary="s", symptom="s", cause="c", repair="r", references=("r",),
                    variants=(
                        Variant(Guard("{framework.distribution}", ""), (Rewrite(target, "$A - $B", "$A + $B"),)),
                    ),
                    obsolete_when="r",
                )
                return Engine(load=lambda: ([Registered(patch, "tests")], []))

            def child(queue):
                import {framework.name}.mod as mod
                queue.put(mod.add(2, 1))

            def ask(method):
                context = multiprocessing.get_context(method)
                queue = context.SimpleQueue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                process.join(60)
                assert process.exitcode == 0
                return queue.get()
            """
        file.write_text(textwrap.dedent(head) + textwrap.dedent(lines))
        return file

    return write


@pytest.mark.parametrize(
    ("method", "where", "result"),
    [
        ("fork", "if True:\n    engine().apply()\n", FIXED),
        # A child that is spawned runs the main module's top level again, and nothing else of the parent.
        ("spawn", "if True:\n    engine().apply()\n", FIXED),
        ("spawn", "if __name__ == '__main__':\n    engine().apply()\n", BROKEN),
    ],
)
def test_multiprocessing_children(framework, script, method, where, result):
    file = script(f"{where}if __name__ == '__main__':\n    print(ask('{method}'))\n")
    done = _python(file, PYTHONPATH=framework.site)
    assert (done.stdout, done.stderr) == (f"{result}\n", "")


def test_fork_while_another_thread_holds_the_engines_lock(framework, script):
    file = script(
        """
        import os, threading
        made = engine()
        made.apply()
        held, go_on = threading.Event(), threading.Event()
        def hold():
            with made._lock:
                held.set()
                go_on.wait(60)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        pid = os.fork()
        if pid == 0:
            import faulthandler
            faulthandler.dump_traceback_later(30, exit=True)
            print(made.apply()["a-bug"].status, flush=True)
            os._exit(0)
        go_on.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        """
    )
    done = _python("-W", "ignore::DeprecationWarning", file, PYTHONPATH=framework.site)
    assert (done.stdout, done.stderr) == ("pending\n", "")


@pytest.mark.parametrize("how", ["module", "package", "file"])
def test_a_target_that_runs_as_main_is_refused(framework, script, how):
    """Its functions are not those of the module that the target names; to say "pending" for ever would be silence."""
    name = framework.name if how == "package" else "script"
    script(
        f"""
        def add(a, b):
            return a - b

        if __name__ == "__main__":
            report = engine("{name + ".__main__" if how == "package" else name}:add").apply()["a-bug"]
            print(report.status, add(2, 1))
            print(report.reason)
        """,
        name=f"{framework.name}/__main__.py" if how == "package" else "script.py",
    )
    arguments = [framework.site / "script.py"] if how == "file" else ["-m", name]
    done = _python(*arguments, cwd=framework.site, PYTHONPATH=framework.site)
    status, reason = done.stdout.splitlines()
    assert status == "refused 1"
    assert "__main__" in reason
    assert "import it instead" in reason
