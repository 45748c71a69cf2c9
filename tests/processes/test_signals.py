"""What a signal's handler raises while the engine is loaded or patches: it goes on to the user, and nothing is lost.

The handler runs in the main thread between any two steps, so its exception comes out of whatever we were doing.
"""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.harness import toy_slime

ON = {"RLHF_PATCHES_AUTOLOAD": "1"}
HANDLERS = {
    "a function": "def handler(number, frame): stop()",
    "one that calls another": "def deeper(): stop()\ndef handler(number, frame): deeper()",
    "a method": "class Job:\n    def ends(self, number, frame): stop()\nhandler = Job().ends",
    "an object": "class Job:\n    def __call__(self, number, frame): stop()\nhandler = Job()",
    "a partial": "def ends(why, number, frame): stop()\nhandler = functools.partial(ends, 'why')",
    "a lambda": "handler = lambda *_: stop()",
    "one for a single time": "def handler(number, frame): signal.signal(number, signal.SIG_DFL); stop()",
}
HEAD = """
import functools, os, signal, sys
class Preempted(Exception): pass
def stop(): raise {raised}
{handler}
signal.signal(signal.SIGUSR1, handler)
done = []
def at(event, arguments):
    if event == "import" and arguments[0] == {moment!r} and not done:
        done.append(1)
        os.kill(os.getpid(), signal.SIGUSR1)
sys.addaudithook(at)
"""
# With what the engine is loaded, and with what changes a function; both are imported by us, in the framework's import.
MOMENTS = (
    "rlhf_patches.api",
    "dataclasses",
    "rlhf_patches.definitions.registry",
    "rlhf_patches.patches.catalogue",
    "rlhf_patches.definitions.bug",
    "ast_grep_py",
    "rlhf_patches.engine.ledger",
    "hashlib",
)


def run(installed, folder, code, handler="a function", raised="SystemExit(3)", moment=MOMENTS[0], **settings):
    text = HEAD.format(handler=HANDLERS[handler], raised=raised, moment=moment) + textwrap.dedent(code)
    return installed.run(installed.python, "-c", text, cwd=folder, **ON, **settings)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_exit_in_a_handler_ends_the_process(installed, slime, moment):
    done = run(installed, slime, toy_slime.LOOK, moment=moment)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


@pytest.mark.parametrize("handler", HANDLERS)
def test_every_kind_of_handler(installed, slime, handler):
    done = run(installed, slime, toy_slime.LOOK, handler=handler, moment="rlhf_patches.engine.engine")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


CAUGHT = f"""
try:
    {toy_slime.IMPORT}
except {{}} as error:
    print(error.args)
{toy_slime.LOOK}
"""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("raised", ["Preempted", "TimeoutError", "SystemExit"])
def test_what_a_handler_raises_is_the_users_and_the_next_import_is_patched(installed, slime, moment, raised):
    done = run(installed, slime, CAUGHT.format(raised), raised=f"{raised}('now')", moment=moment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "('now',)\napplied\n", "")


@pytest.mark.parametrize("body", ["import hidden", "class A:\n    a = functools.cached_property(int)"])
def test_a_plugin_is_asked_again(installed, slime, body):
    """Within a plugin's own code too, and where Python itself turns the exception into another (before 3.12)."""
    (slime / "hidden.py").write_text("")
    (slime / "toptarget.py").write_text("def f(a, b):\n    return a - b\n")
    (slime / "plug.py").write_text(
        "import functools, os, signal, sys\n"
        "from rlhf_patches import Guard, Patch, Rewrite, Variant, hookimpl\n"
        "class Sets:\n"
        "    def __set_name__(self, owner, name): os.kill(os.getpid(), signal.SIGUSR1); int()\n"
        "if not hasattr(sys, 'asked'):\n"
        "    sys.asked = True\n"
        f"    {'import hidden' if 'hidden' in body else 'class A: a = Sets()'}\n"
        "@hookimpl\n"
        "def rlhf_patches():\n"
        "    variant = Variant(Guard('toptarget', ''), (Rewrite('toptarget:f', '$A - $B', '$A + $B'),))\n"
        "    return [Patch('toptarget-sign', 's', 's', 's', 's', ('r',), (variant,), 'never')]\n"
    )
    metadata = slime / "plug-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlhf_patches]\nplug = plug\n")
    code = """
        try:
            import toptarget
        except Preempted:
            print("preempted")
        import toptarget
        print(toptarget.f(5, 2))
    """
    done = run(installed, slime, code, raised="Preempted", moment="hidden")
    assert (done.returncode, done.stdout, done.stderr) == (0, "preempted\n7\n", "")


def test_what_a_handler_returned_from_changes_nothing(installed, slime):
    code = "def stop(): print('heard')\n" + toy_slime.LOOK
    done = run(installed, slime, code, moment="rlhf_patches.engine.engine")
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\napplied\n", "")


def test_an_error_of_ours_beside_a_handled_one_is_not_the_handlers(installed, slime):
    """The user's code is handling what a handler has raised, and imports; that the engine cannot be loaded is news."""
    (slime / "dataclasses.py").write_text("import nonesuch\n")
    code = f"try: os.kill(os.getpid(), signal.SIGUSR1); int()\nexcept Preempted: {toy_slime.LOOK}"
    done = run(installed, slime, code, raised="Preempted", moment="none")
    assert (done.returncode, done.stdout) == (0, "untouched\n")
    assert "NOT ACTIVE: the engine could not be loaded, ModuleNotFoundError: No module named 'nonesuch'" in done.stderr


AT_ANY_MOMENT = f"""
import signal, sys
def handler(number, frame): sys.exit(3)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
try:
    {toy_slime.IMPORT}
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
print('applied' if '__import__' in model.train.__code__.co_names else 'untouched')
"""


def test_at_any_moment(installed, slime):
    """Either it comes in time and ends the process, or after the import; never is there an unpatched run."""
    ended = 0
    for step in range(40):
        command = [installed.python, "-c", AT_ANY_MOMENT, str(0.002 * (step + 1))]
        environment = installed.environment(ON)
        done = subprocess.run(command, env=environment, cwd=slime, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) in ((3, ""), (0, "applied\n")), (step, done.stderr)
        # Python itself ignores what is raised within importlib's weak references' callbacks, and says so.
        assert done.stderr == "" or done.stderr.startswith("Exception ignored "), done.stderr
        ended += done.returncode == 3
    assert ended
