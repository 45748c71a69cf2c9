"""Never a hang: other threads import, fork and are interrupted while the hook or ``apply()`` is at work.

CPython calls ``find_spec`` under the global import lock, which its detection of deadlocks does not know; so each of
these has a process of its own, and a limit.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.harness import toy_slime

HOOK = {"RLHF_PATCHES_AUTOLOAD": "1"}
STARTS = {"hook": ("", HOOK), "strict": ("", {**HOOK, "RLHF_PATCHES_STRICT": "1"}), "apply": ("A()", {})}
LIMIT = 60  # seconds; each takes less than one where nothing hangs

HEAD = f"""
import faulthandler, os, sys, threading, time, warnings
warnings.simplefilter("ignore")  # of forks with threads
faulthandler.dump_traceback_later({LIMIT - 10})
def A():
    import rlhf_patches
    rlhf_patches.apply()
def look():
    {toy_slime.LOOK}
def look_in_a_child_too(thread, forked):  # while that thread waits for the fork
    child = os.fork()
    if not child:
        look(); sys.stdout.flush(); os._exit(0)
    forked.set(); thread.join()
    assert os.waitpid(child, 0)[1] == 0
def at_import(thread, name, action):  # when that thread begins to import that module, before Python takes any lock
    done = []
    def hook(event, arguments):
        if event == "import" and arguments[0] == name and threading.get_ident() == thread() and not done:
            done.append(action())
    sys.addaudithook(hook)
"""


@pytest.fixture
def ask(installed, tmp_path):
    """Run code in the wheel's environment, beside a checkout of slime; returns the words that it printed."""
    toy_slime.write(tmp_path)

    def run(code, start="hook", **more):
        first, settings = STARTS[start]
        text = HEAD + textwrap.dedent(code).replace("START", first or "pass")
        process = subprocess.Popen(
            [installed.python, "-c", text],
            env=installed.environment({**settings, **more}),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", "-9", "-s", str(process.pid)])
            pytest.fail(f"hangs:\n{process.communicate()[1]}")
        assert process.returncode == 0, err
        return out.split()

    return run


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "shared",
    [
        *("importlib.metadata", "logging", "json", "collections"),
        # Later ones make it when they make collections.
        pytest.param("collections.abc", marks=pytest.mark.skipif(sys.version_info >= (3, 14), reason="has no file")),
    ],
)
def test_another_thread_is_importing_what_the_engine_needs(ask, start, shared):
    """That thread is in the middle of the module, and has yet to import more, when we come to wait for it."""
    code = f"""
        def waits(thread):  # for the lock of a module
            frame = sys._current_frames()[thread.ident]
            return frame.f_code.co_name == "acquire" and "importlib" in frame.f_code.co_filename
        inside = threading.Event()
        def hook(event, arguments):
            # Where it runs the code of that module's file: then it holds the module's lock.
            if event == "exec" and {shared.replace(".", "/")!r} in getattr(arguments[0], "co_filename", ""):
                inside.set()
                until = time.monotonic() + 1
                while not waits(threading.main_thread()) and time.monotonic() < until: time.sleep(0.005)
        START
        if {shared!r} not in sys.modules:
            thread = threading.Thread(target=__import__, args=({shared!r},))
            sys.addaudithook(hook)
            thread.start(); assert inside.wait(20)
        look()
    """
    assert ask(code, start) == ["applied"]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("delay", [0, 0.005])
def test_other_threads_import_all_kinds_of_modules(ask, start, delay):
    code = f"""
        sys.setswitchinterval(1e-6)
        names = ("asyncio", "logging", "typing", "json", "importlib.metadata", "packaging.version", "unittest.mock")
        threads = [threading.Thread(target=__import__, args=(name,)) for name in names]
        threads.append(threading.Thread(target=look))
        START
        for thread in threads: thread.start()
        time.sleep({delay})
        look()
        for thread in threads: thread.join()
    """
    assert ask(code, start) == ["applied"] * 2


@pytest.mark.parametrize("start", ["hook", "apply"])
def test_nothing_is_imported_under_the_global_import_lock(ask, start):
    """The rule itself. With one thread, what holds the lock at an import is a ``find_spec`` that imports."""
    code = """
        import _imp
        names = []
        sys.addaudithook(lambda event, arguments: event == "import" and _imp.lock_held() and names.append(arguments[0]))
        START
        look()
        print(names)
    """
    assert ask(code, start) == ["applied", "[]"]


@pytest.mark.parametrize(
    # Python 3.14 has dataclasses with logging, 3.15 has pkgutil with the site hook.
    "moment",
    ["dataclasses pkgutil", "ast_grep_py", "rlhf_patches.engine", "rlhf_patches.patches.catalogue"],
)
@pytest.mark.parametrize("start", ["hook", "apply"])
def test_a_fork_while_another_thread_loads_the_engine(ask, start, moment):
    """The child inherits modules that are half imported, and locked by a thread that it does not have."""
    code = f"""
        inside, forked = threading.Event(), threading.Event()
        def load():
            {f"A(); {toy_slime.IMPORT}" if start == "apply" else "look()"}
        thread = threading.Thread(target=load)
        import rlhf_patches, logging
        moment = next(name for name in {moment.split()} if name not in sys.modules)
        at_import(lambda: thread.ident, moment, lambda: (inside.set(), forked.wait({LIMIT})))
        thread.start(); assert inside.wait(20)
        child = os.fork()
        if not child:
            START
            look(); sys.stdout.flush(); os._exit(0)
        forked.set(); thread.join()
        assert os.waitpid(child, 0)[1] == 0
        look()
    """
    assert ask(code, start) == ["applied"] * (2 if start == "apply" else 3)


@pytest.mark.parametrize("start", ["hook", "apply"])
def test_a_fork_while_another_thread_patches_a_module(ask, start):
    """The module has run, and its lock is held for as long as we are at work: much longer than without us."""
    code = f"""
        import rlhf_patches.engine.engine
        inside, forked = threading.Event(), threading.Event()
        patch = rlhf_patches.engine.engine.Engine._imported
        def slowly(*arguments):
            if threading.current_thread() is thread:
                inside.set(); forked.wait({LIMIT})
            patch(*arguments)
        rlhf_patches.engine.engine.Engine._imported = slowly
        START
        thread = threading.Thread(target=look)
        thread.start(); assert inside.wait(20)
        look_in_a_child_too(thread, forked)
        look()
    """
    assert ask(code, start) == ["applied"] * 3


@pytest.mark.parametrize("moment", ["rlhf_patches.engine.ledger", "rlhf_patches.engine.trampolines"])
@pytest.mark.parametrize("start", ["hook", "apply"])
def test_a_fork_while_another_thread_loads_what_patches(ask, start, moment):
    """It comes with the first module that is to be patched, whose lock is held meanwhile."""
    code = f"""
        inside, forked = threading.Event(), threading.Event()
        thread = threading.Thread(target=look)
        at_import(lambda: thread.ident, {moment!r}, lambda: (inside.set(), forked.wait({LIMIT})))
        START
        thread.start(); assert inside.wait(20)
        look_in_a_child_too(thread, forked)
        look()
    """
    assert ask(code, start) == ["applied"] * 3


def test_forks_while_other_threads_apply(ask):
    code = """
        import rlhf_patches
        go_on = True
        def again():
            while go_on: rlhf_patches.apply()
        threads = [threading.Thread(target=again) for _ in range(3)]
        for thread in threads: thread.start()
        for _ in range(40):
            child = os.fork()
            if not child:
                rlhf_patches.apply(); os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        go_on = False
        for thread in threads: thread.join()
        look()
    """
    assert ask(code, "apply") == ["applied"]


def _plugin(folder, body):
    """Install a plugin without patches, whose module begins with these lines."""
    (folder / "plug.py").write_text(
        f"{body}\nimport rlhf_patches\n@rlhf_patches.hookimpl\ndef rlhf_patches(): return []\n"
    )
    metadata = folder / "plug-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlhf_patches]\nplug = plug\n")


def test_a_plugin_that_imports_a_framework(installed, tmp_path):
    """Another thread holds that framework's lock and waits for the engine, which waits for the plugin's import."""
    toy_slime.write(tmp_path)
    (tmp_path / "trl.py").write_text("")
    _plugin(tmp_path, "import sys, time; sys.inside.set(); sys.begun.wait(20); time.sleep(0.5); import trl")
    code = f"""
        import rlhf_patches.site_hook
        rlhf_patches.site_hook._TIMEOUT = 2
        sys.inside, sys.begun = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (sys.inside.wait(20), __import__("trl")))
        at_import(lambda: thread.ident, "trl", sys.begun.set)
        thread.start()
        {toy_slime.LOOK}
        thread.join()
    """
    done = installed.run(installed.python, "-c", HEAD + textwrap.dedent(code), cwd=tmp_path, **HOOK)
    assert (done.returncode, done.stdout.split()) == (0, ["applied"]), done.stderr


@pytest.mark.parametrize("kind", ["module", "package", "namespace package"])
def test_a_plugin_that_imports_the_framework_whose_import_loads_it(ask, tmp_path, kind):
    """It runs once: torch does not run twice in a process, and its classes would be there twice."""
    ran = "import sys; sys.ran = getattr(sys, 'ran', 0) + 1\n"
    if kind == "module":
        (tmp_path / "trl.py").write_text(ran)
    else:
        (tmp_path / "trl").mkdir()
        (tmp_path / "trl" / ("__init__.py" if kind == "package" else "part.py")).write_text(ran)
    _plugin(tmp_path, "import trl" + (".part" if kind == "namespace package" else ""))
    code = """
        import trl, plug
        print(getattr(sys, "ran", 0), trl is plug.trl, hasattr(trl.__spec__.loader, "_module"))
        look()
    """
    assert ask(code, "strict") == ["1", "True", "False", "applied"]


def test_a_plugin_that_forks_and_goes_on_in_the_child(ask, tmp_path):
    _plugin(tmp_path, "import os\nchild = os.fork()\nif child: assert os.waitpid(child, 0)[1] == 0")
    code = "look(); sys.stdout.flush(); import plug; plug.child or os._exit(0)"
    assert ask(code, "strict") == ["applied", "applied"]


def test_a_fork_in_the_middle_of_a_package_of_the_standard_library(ask, tmp_path):
    """asyncio (and pathlib in Python 3.13) cannot be imported anew while its submodules are still there."""
    _plugin(tmp_path, "import asyncio")
    code = f"""
        inside, forked = threading.Event(), threading.Event()
        thread = threading.Thread(target=look)
        moment = "asyncio.unix_events"
        at_import(lambda: thread.ident, moment, lambda: (inside.set(), forked.wait({LIMIT})))
        thread.start(); assert inside.wait(20)
        look_in_a_child_too(thread, forked)
    """
    assert ask(code, "strict") == ["applied"] * 2


# ------------------------------------------------------------------------------- without the engine

CAUGHT = f"""
for _ in range(2):
    try:
        {toy_slime.IMPORT}
    except ImportError:
        print("no-slime")
    except Exception as error:
        print(type(error).__name__)
    else:
        print("unpatched")
"""


@pytest.mark.parametrize("variable", [None, "STRICT", "VERIFY"])
@pytest.mark.parametrize("damage", ["shadowed", "ends the process"])
def test_an_engine_that_cannot_be_loaded(installed, tmp_path, damage, variable):
    """Where a patched run is demanded, every import of a framework fails, and not as if there were no framework."""
    toy_slime.write(tmp_path)
    (tmp_path / "dataclasses.py").write_text("" if damage == "shadowed" else "raise SystemExit(0)\n")
    code = "import sys\n" + CAUGHT
    settings = {f"RLHF_PATCHES_{variable}": "1"} if variable else {}
    done = installed.run(installed.python, "-c", code, cwd=tmp_path, **HOOK, **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["NotActiveError" if variable else "unpatched"] * 2
    assert done.stderr.count("NOT ACTIVE: the engine could not be loaded") == (0 if variable else 1)
    done = installed.run(
        installed.python, "-c", code.partition("\nfor")[0] + f"\n{toy_slime.LOOK}", cwd=tmp_path, **HOOK, **settings
    )
    assert (done.returncode, done.stdout.strip()) == ((1, "") if variable else (0, "untouched"))
    if variable:
        assert f"RLHF_PATCHES_{variable} is set, and rlhf_patches is NOT ACTIVE" in done.stderr


@pytest.mark.parametrize("variable", [None, "STRICT", "VERIFY"])
def test_without_ast_grep_a_patch_of_an_unknown_text_fails_as_others_do(installed, tmp_path, variable):
    """What is known takes none, so that it is missing is said where a text is not."""
    toy_slime.write(tmp_path)
    code = "import sys; sys.modules['ast_grep_py'] = None  # as if it were not installed\n" + CAUGHT
    settings = {f"RLHF_PATCHES_{variable}": "1"} if variable else {}
    done = installed.run(installed.python, "-c", code, cwd=tmp_path, **HOOK, **settings)
    assert (done.returncode, done.stdout.split()) == (0, ["PatchError" if variable == "STRICT" else "unpatched"] * 2)
    assert done.stderr.count("failed slime-no-sync-reentry: ImportError: ast_grep_py") == 1


ODD_SPECS = {
    "of another kind": "class Odd(types.SimpleNamespace): pass",
    "of a class without subclasses": """\
class Odd(types.SimpleNamespace):
    def __init_subclass__(cls):
        raise ValueError("no subclass")
""",
    "of a class that sets what it likes": """\
class Odd(types.SimpleNamespace):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise AttributeError(name)
        super().__setattr__(name, value)
""",
}
ODD_FINDER = """
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and name.startswith("slime"):
            more = {"cached": spec.cached, "parent": spec.parent, "has_location": spec.has_location}
            return Odd(**vars(spec), **more)
sys.meta_path.insert(1, Finder)
"""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ODD_SPECS)
def test_a_spec_that_cannot_be_observed(installed, tmp_path, kind, strict):
    toy_slime.write(tmp_path)
    code = f"import sys, types, importlib.machinery\n{ODD_SPECS[kind]}{ODD_FINDER}{CAUGHT}"
    if kind == "of another kind":
        code = code.replace("Odd(**", "types.SimpleNamespace(**")
    settings = {"RLHF_PATCHES_STRICT": "1"} if strict else {}
    done = installed.run(installed.python, "-c", code, cwd=tmp_path, **HOOK, **settings)
    assert (done.returncode, done.stdout.split()) == (0, ["NotActiveError" if strict else "unpatched"] * 2), done.stderr
    assert done.stderr.count("NOT ACTIVE: the import of slime cannot be watched") == (not strict)
    assert done.stderr.count("\n") == (not strict), "one line, however many modules"


def test_wrapt_is_not_needed(ask):
    assert ask("sys.modules['wrapt'] = None; START; look()") == ["applied"]
    assert ask("sys.modules['wrapt'] = None; START; look()", "apply") == ["applied"]
