"""The site hook of the installed wheel: off, on, in every kind of process, and when the package is damaged."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_patches import autoload
from rlhf_patches.runs.children import NOTE
from tests.harness import toy_slime
from tests.harness.toy_slime_fixtures import make_refused

ROOT = Path(__file__).parents[2]
ON = {"RLHF_PATCHES_AUTOLOAD": "1"}
MODULES = "import sys; print(*sorted(sys.modules))"
PEP_829 = sys.version_info >= (3, 15)


def test_the_wheel_ships_the_hook_beside_the_package(installed):
    assert (installed.site / "rlhf_patches.pth").exists()
    assert (installed.site / "rlhf_patches.start").read_text().strip() == "rlhf_patches_start:install"
    assert (installed.site / "rlhf_patches_start.py").exists()
    assert not (installed.site / "patches").exists()
    assert (installed.site / "rlhf_patches" / "patches" / "plugin.py").exists()


def test_the_wheel_ships_what_is_known_of_texts_and_stays_small(wheel, installed):
    texts = Path("rlhf_patches", "guards", "texts")
    ours = {path.name for path in (ROOT / texts).glob("*.json")}
    assert {path.name for path in (installed.site / texts).iterdir()} == ours
    assert "trl.json" in ours
    assert wheel.stat().st_size < 2_000_000  # patches with their proofs are more than half of it


def test_off_loads_nothing(installed, slime):
    assert "rlhf_patches" not in installed.code(MODULES).split()
    assert installed.code(toy_slime.LOOK, cwd=slime) == "untouched"
    assert installed.code(toy_slime.LOOK, cwd=slime, RLHF_PATCHES_AUTOLOAD="0") == "untouched"
    assert installed.code(toy_slime.LOOK, cwd=slime, RLHF_PATCHES_AUTOLOAD="off") == "untouched"


def test_on_loads_only_itself_before_a_framework(installed):
    bare = set(installed.code(MODULES, "-I").split())
    on = set(installed.code(MODULES, "-I", **ON).split())
    assert on - bare == {
        "atexit",  # in C, within the interpreter
        "rlhf_patches",
        "rlhf_patches.import_system",
        "rlhf_patches.installed",
        "rlhf_patches.site_hook",
    }
    assert ("rlhf_patches_start" in bare) == PEP_829
    # Python itself asks for sitecustomize and usercustomize: no reason to read what is installed.
    read = "import sys; print(len(sys.modules['rlhf_patches.installed']._remembered))"
    assert installed.code(read, **ON) == "0"
    assert installed.code(f"import packaging; {read}", **ON) != "0"


@pytest.mark.parametrize("flags", [(), ("-E",), ("-I",), ("-X", "dev")])
def test_on_patches_the_framework_and_says_so_once_if_asked(installed, slime, flags):
    code = f"import sys; sys.path.insert(0, {str(slime)!r}); {toy_slime.LOOK}"
    done = installed.run(installed.python, *flags, "-c", code, RLHF_PATCHES_LOG="info", **ON)
    assert done.stdout.strip() == "applied"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"[rlhf_patches] applied {toy_slime.PATCH}")
    if flags in ((), ("-X", "dev")):
        done = installed.run(installed.python, *flags, "-c", code, **ON)
        assert (done.stdout.strip(), done.stderr) == ("applied", ""), "unasked, only what is wrong is said"


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_without_assertions_there_is_nothing_to_repair(installed, slime, flag):
    code = f"{toy_slime.LOOK}; import rlhf_patches; print(rlhf_patches.report()[{toy_slime.PATCH!r}])"
    said = installed.code(code, flag, cwd=slime, **ON)
    assert said.startswith("untouched\n")
    assert "Status.UNAFFECTED" in said
    assert "under python -O there is no assertion" in said


HOOKS = "import sys; print(sum(type(finder).__name__ == '_FirstImport' for finder in sys.meta_path))"


@pytest.mark.parametrize("switched_on", [False, True])
@pytest.mark.parametrize("kind", ["pth", "start"])
def test_each_of_the_two_kinds_of_file_does_by_itself_what_both_do_once(make_installed, slime, kind, switched_on):
    """Python 3.15 to 3.17 pass over the lines of a .pth file that has its .start file; later ones over all of them."""
    environment = make_installed()
    setting = {} if switched_on else ON
    if switched_on:
        environment.run(environment.command, "autoload", "on")
    named = environment.code("import sys; print(*sys.modules)", **setting).split()
    assert ("rlhf_patches_start" in named, "rlhf_patches_autoload" in named) == (PEP_829, PEP_829 and switched_on)
    assert environment.code(HOOKS, **setting) == "1"
    assert environment.code(HOOKS, RLHF_PATCHES_AUTOLOAD="0") == "0"

    for file in environment.site.glob("rlhf_patches*.*"):
        if file.suffix == (".start" if kind == "pth" else ".pth"):
            file.unlink()
    acts = kind == "pth" or PEP_829
    assert environment.code(HOOKS, **setting) == str(int(acts))
    assert environment.code(toy_slime.LOOK, cwd=slime, **setting) == ("applied" if acts else "untouched")
    assert environment.code(HOOKS, RLHF_PATCHES_AUTOLOAD="0") == "0"

    shutil.rmtree(environment.site / "rlhf_patches")
    for extra, status in (({}, 0), ({"RLHF_PATCHES_STRICT": "1"}, 1)):
        broken = environment.run(environment.python, "-c", toy_slime.LOOK, cwd=slime, **setting, **extra)
        if not acts:
            assert (broken.returncode, broken.stderr) == (0, "")
            continue
        assert broken.returncode == status
        (line,) = [line for line in broken.stderr.splitlines() if line.startswith("[rlhf_patches] NOT ACTIVE")]
        assert f"{environment.site}/rlhf_patches" in line
        assert ("RuntimeError: [rlhf_patches] NOT ACTIVE" in broken.stderr) == bool(status)


LAZILY = f"""
import sys
{toy_slime.IMPORT}
from slime.backends.megatron_utils.model import train
print("slime" in sys.modules, "rlhf_patches.engine" in sys.modules)
"""


@pytest.mark.skipif(not PEP_829, reason="PEP 810 came at the same time")
@pytest.mark.parametrize("all_of_them", [False, True])
@pytest.mark.parametrize("start", ["hook", "apply"])
def test_a_lazy_import_is_patched_when_it_runs(installed, slime, start, all_of_them):
    """PEP 810: the engine waits as long as the framework does; and with every import lazy, its own among them."""
    code = LAZILY if all_of_them else re.sub("^(import|from) (?=slime)", r"lazy \1 ", LAZILY, flags=re.MULTILINE)
    flags = ("-X", "lazy_imports=all") if all_of_them else ()
    if start == "apply":
        code = f"import rlhf_patches; rlhf_patches.apply()\n{code}"
    code += f"{toy_slime.LOOK}; print(train is model.train)"
    said = installed.code(code, *flags, cwd=slime, **(ON if start == "hook" else {})).split()
    assert said == ["False", str(start == "apply"), "applied", "True"]


def test_no_site_no_hook(installed, slime):
    code = f"import sys; sys.path.insert(0, {str(slime)!r}); {toy_slime.LOOK}"
    assert installed.code(code, "-S", **ON) == "untouched"


CHILDREN = {
    "subprocess": f"import subprocess, sys; subprocess.run([sys.executable, '-c', {toy_slime.LOOK!r}], check=True)",
    "shell": f"import os, shlex, sys; os.system(shlex.join([sys.executable, '-c', {toy_slime.LOOK!r}]))",
    "thread": f"import threading; t = threading.Thread(target=exec, args=({toy_slime.LOOK!r},)); t.start(); t.join()",
    "fork before": "import os; "
    f"os.fork() or (exec({toy_slime.LOOK!r}), print(end='', flush=True), os._exit(0)); os.wait()",
    "fork after": f"{toy_slime.IMPORT}; import os\nif not os.fork():\n {toy_slime.LOOK}\nelse: os.wait()",
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_every_kind_of_child(installed, slime, kind):
    assert installed.code(CHILDREN[kind], cwd=slime, **ON).split() == ["applied"]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing(installed, slime, method):
    (slime / "job.py").write_text(
        "import multiprocessing, sys\n"
        f"def look():\n    {toy_slime.LOOK}\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=look)\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    done = installed.run(installed.python, "job.py", cwd=slime, **ON)
    assert (done.returncode, done.stdout.split()) == (0, ["applied"]), done.stderr


BELOW_ITS_GUARD = f"""
import concurrent.futures, multiprocessing, os, sys
def look():
    {toy_slime.LOOK}
    sys.stdout.flush()
if __name__ == '__main__':
    import rlhf_patches
    said = rlhf_patches.apply(CHILDREN)
    for method in 'spawn', 'forkserver':
        process = multiprocessing.get_context(method).Process(target=look)
        process.start(); process.join(); assert process.exitcode == 0
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        pool.submit(look).result()
    rlhf_patches.revert()
    process = multiprocessing.get_context('spawn').Process(target=look)
    process.start(); process.join(); assert process.exitcode == 0
    print(said.notes)
"""


@pytest.mark.parametrize(
    ("children", "found", "settings"),
    [("", ["untouched"] * 4, {}), ("children=True", ["applied"] * 3 + ["untouched"], {}), ("", ["applied"] * 4, ON)],
)
def test_spawned_children_of_a_script_that_calls_apply_below_its_guard(installed, slime, children, found, settings):
    (slime / "job.py").write_text(BELOW_ITS_GUARD.replace("CHILDREN", children))
    done = installed.run(installed.python, "job.py", cwd=slime, **settings)
    note = () if "applied" in found else (NOTE,)
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (0, [*found, str(note)]), done.stderr


def test_children_that_cannot_be_reached_are_an_error(make_installed, slime):
    changed = make_installed()
    code = f"import rlhf_patches\ntry: rlhf_patches.apply({{}})\nfinally: {toy_slime.LOOK}"

    def said(arguments: str, **settings: str) -> str:
        done = changed.run(changed.python, "-c", code.format(arguments), cwd=slime, **settings)
        assert (done.returncode, done.stdout) == (1, "untouched\n")
        return done.stderr.splitlines()[-1].removeprefix("rlhf_patches.settings.SettingsError: ")

    off = said("children=True", RLHF_PATCHES_AUTOLOAD="0")
    assert off.startswith("RLHF_PATCHES_AUTOLOAD=0 keeps child processes unpatched")
    for argument in ("only='slime-*'", "disable=[]", "strict=False"):
        assert said(f"children=True, {argument}").startswith("apply(children=True) with only, disable or strict")
    (changed.site / "rlhf_patches.pth").unlink()  # as an editable install leaves it
    assert said("children=True").startswith(
        "this environment has no site hook, so apply(children=True) would patch no child"
    )
    printed = f"import rlhf_patches; print(rlhf_patches.apply().notes == ({NOTE!r},))"
    assert changed.code("import os; os.environ['RLHF_PATCHES_AUTOLOAD'] = '1'; " + printed, cwd=slime) == "True"


def test_python_m(installed, slime):
    (slime / "job.py").write_text(toy_slime.LOOK)
    assert installed.run(installed.python, "-m", "job", cwd=slime, **ON).stdout.split() == ["applied"]


def test_threads_that_import_at_once_all_find_it_patched(installed, slime):
    code = f"""
import threading
barrier = threading.Barrier(8)
def look():
    barrier.wait()
    {toy_slime.LOOK}
threads = [threading.Thread(target=look) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    assert installed.code(code, cwd=slime, **ON).split() == ["applied"] * 8


def test_a_pth_that_runs_twice_installs_one_finder(installed):
    code = (
        "import sys; from rlhf_patches.site_hook import install; install(); install();"
        "print(sum(type(f).__module__ == 'rlhf_patches.site_hook' for f in sys.meta_path))"
    )
    assert installed.code(code, **ON) == "1"


def test_more_modules_can_be_watched(installed, slime):
    (slime / "elsewhere.py").write_text("import sys; print('rlhf_patches.engine' in sys.modules)")
    assert installed.code("import elsewhere", cwd=slime, **ON) == "False"
    assert installed.code("import elsewhere", cwd=slime, RLHF_PATCHES_WATCH="else, elsewhere", **ON) == "True"


def test_the_standard_library_is_not_waited_for(installed):
    """The engine imports it, too: it would be loaded in the middle of its own import."""
    code = "import json, sys; print('rlhf_patches.engine' in sys.modules)"
    assert installed.code(code, RLHF_PATCHES_WATCH="json", **ON) == "False"


def test_disable_one(installed, slime):
    assert installed.code(toy_slime.LOOK, cwd=slime, RLHF_PATCHES_DISABLE="slime-*", **ON) == "untouched"


def test_a_typo_stops_the_run_at_its_first_framework_and_nothing_else(installed, slime):
    wrong = {**ON, "RLHF_PATCHES_DISABLE": "slime-no-sink-reentry"}
    assert installed.code("print(1)", **wrong) == "1"
    code = f"try:\n {toy_slime.IMPORT}\nexcept Exception: pass\n{toy_slime.LOOK}"
    done = installed.run(installed.python, "-c", code, cwd=slime, **wrong)
    assert done.returncode == 1, "a framework that swallows the first exception must not get away unpatched"
    assert "did you mean 'slime-no-sync-reentry'?" in done.stderr


def test_a_switch_of_no_meaning_is_an_error_like_every_other(installed, slime):
    done = installed.run(installed.python, "-c", toy_slime.LOOK, cwd=slime, RLHF_PATCHES_AUTOLOAD="yep")
    assert (done.returncode, done.stdout) == (1, "")
    assert "SettingsError: RLHF_PATCHES_AUTOLOAD is 'yep': expected one of 1, true" in done.stderr


@pytest.mark.parametrize("switch", [None, "0"])
def test_a_variable_of_no_meaning_is_one_line_at_the_start(installed, slime, switch):
    """The hook is off then, and nothing else looks: RLHF_PATCHES_AUTLOAD=1 would be an unpatched run. 0 is a word."""
    said = {"RLHF_PATCHES_AUTLOAD": "1", **({} if switch is None else {"RLHF_PATCHES_AUTOLOAD": switch})}
    done = installed.run(installed.python, "-c", "import sys; sys.stderr.write('begun')", **said)
    line = (
        "[rlhf_patches] environment variable RLHF_PATCHES_AUTLOAD is unknown; did you mean 'RLHF_PATCHES_AUTOLOAD'?. "
        "RLHF_PATCHES_AUTOLOAD is not set: nothing is patched without apply()\n"
    )
    assert done.stderr == ("begun" if switch else line + "begun")
    done = installed.run(installed.command, "list", **said)
    assert "at the start" not in done.stderr
    assert done.stderr.count("RLHF_PATCHES_AUTLOAD is unknown") == 1, "the command says it itself"


UNASKED = "NOT ACTIVE, although RLHF_PATCHES_STRICT is set: slime ran unpatched"
APPLY = "import rlhf_patches; rlhf_patches.apply(strict=False)"


@pytest.mark.parametrize(
    ("code", "settings", "said"),
    [
        (toy_slime.IMPORT, {"STRICT": "1"}, True),
        (toy_slime.IMPORT, {"STRICT": "1", "RANK": "0"}, True),
        (toy_slime.IMPORT, {"STRICT": "1", "RANK": "1"}, False),
        (toy_slime.IMPORT, {"STRICT": "1", "AUTOLOAD": "0"}, False),
        (toy_slime.IMPORT, {"STRICT": "1", "LOG": "off"}, False),
        (toy_slime.IMPORT, {"STRICT": "off", "LOG": "info", "ONLY": ""}, False),
        ("import json", {"STRICT": "1"}, False),
        ("import sys; sys.argv[0] = '/bin/accelerate'; import slime", {"STRICT": "1"}, False),
        (f"{toy_slime.IMPORT}; {APPLY}", {"STRICT": "1"}, False),
        (f"{APPLY}; {toy_slime.IMPORT}", {"STRICT": "1"}, False),
    ],
)
def test_a_variable_that_nothing_heeds_is_said_at_the_end(installed, slime, code, settings, said):
    """Not before: who calls apply() sets them rightly, and may call it after the import."""
    given = {name if name == "RANK" else f"RLHF_PATCHES_{name}": value for name, value in settings.items()}
    code = f"import sys; {code}; sys.stderr.write('ended')"
    done = installed.run(installed.python, "-c", code, cwd=slime, **given)
    assert done.returncode == 0, done.stderr
    assert (UNASKED in done.stderr.partition("ended")[2]) is said, done.stderr
    assert done.stderr.count("\n") == said


def test_an_environment_that_is_switched_on_heeds_every_variable(make_installed, slime):
    environment = make_installed()
    environment.run(environment.command, "autoload", "on")
    done = environment.run(environment.python, "-c", toy_slime.LOOK, cwd=slime, RLHF_PATCHES_STRICT="1")
    assert (done.stdout, done.stderr) == ("applied\n", "")


def test_the_report_file_has_a_line_a_process(installed, slime, tmp_path):
    import json

    file = tmp_path / "report.jsonl"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {toy_slime.LOOK!r}]); {toy_slime.LOOK}"
    installed.code(code, cwd=slime, RLHF_PATCHES_REPORT=str(file), RANK="3", **ON)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["pid"] for line in lines}) == len(lines) == 2
    for line in lines:
        assert line["rank"] == "3"
        statuses = {patch["name"]: patch["status"] for patch in line["patches"]}
        assert statuses[toy_slime.PATCH] == "applied"


def test_only_rank_0_speaks(installed, slime):
    quiet = installed.run(installed.python, "-c", toy_slime.LOOK, cwd=slime, RANK="1", RLHF_PATCHES_LOG="info", **ON)
    loud = installed.run(installed.python, "-c", toy_slime.LOOK, cwd=slime, RANK="1", RLHF_PATCHES_LOG="info:all", **ON)
    assert quiet.stdout == loud.stdout == "applied\n"
    assert (quiet.stderr.count(toy_slime.PATCH), loud.stderr.count(toy_slime.PATCH)) == (0, 1)


GONE = "import site, sys; site.addsitedir(sys.argv[1]); site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[1])\n"


@pytest.mark.parametrize("default", ["0", "1"])
@pytest.mark.parametrize(
    ("settings", "refuses"),
    [
        ({}, False),
        ({"STRICT": "0", "VERIFY": "off"}, False),
        ({"STRICT": "1"}, True),
        ({"VERIFY": "yes"}, True),
        ({"AUTOLOAD": "0", "STRICT": "1"}, None),
        ({"AUTOLOAD": " Off", "STRICT": "1"}, None),
    ],
)
def test_the_package_is_gone_and_its_hook_is_left(tmp_path, default, settings, refuses):
    """One line per process, which names the file where it is now; with STRICT or VERIFY no framework is imported."""
    made, moved = tmp_path / "made", tmp_path / "moved"
    made.mkdir()
    (made / "left.pth").write_text(autoload.line(default, ("mine",)))
    for name in ("torch", "mine", "asked", "other"):
        (made / f"{name}.py").touch()
    made.rename(moved)
    settings = {"AUTOLOAD": "1", **settings} if default == "0" else settings
    # ImportError is what scripts take for "not installed".
    tries = "".join(
        f"try: import {name}; print('{name}')\nexcept ImportError: print('ImportError')\n"
        "except RuntimeError as error: assert 'NOT ACTIVE' in str(error)\n"
        for name in ("torch", "mine", "asked", "json", "other")
    )
    environment = {f"RLHF_PATCHES_{name}": value for name, value in {"WATCH": "json, asked.models", **settings}.items()}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", GONE + tries, str(moved)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    everything = ["torch", "mine", "asked", "json", "other"]
    assert done.stdout.split() == (["json", "other"] if refuses else everything), done.stderr
    if refuses is None:
        assert done.stderr == ""
    else:
        assert done.stderr.startswith("[rlhf_patches] NOT ACTIVE, although ")
        assert "No module named 'rlhf_patches'. Install rlhf-patches again" in done.stderr
        assert str(moved / "left.pth") in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_hook_that_is_left_and_nowhere_to_say_so(tmp_path):
    (tmp_path / "left.pth").write_text(autoload.line("1"))
    for closed in ("2>&-", "2>/dev/full"):
        code = f"{shlex.quote(sys.executable)} -I -S -c {shlex.quote(GONE + 'print(1)')} {tmp_path} {closed}"
        done = subprocess.run(code, shell=True, env={}, stdout=subprocess.PIPE, text=True, timeout=60)
        assert done.stdout == "1\n"


# ------------------------------------------------------------------------------------- run


@pytest.mark.parametrize("command", [("python", "-c", toy_slime.LOOK), ("sh", "-c", f'python -c "{toy_slime.LOOK}"')])
def test_run_patches_the_command(installed, slime, command):
    done = installed.run(installed.command, "run", "--", *command, cwd=slime)
    assert done.stdout == "applied\n", done.stderr


def test_run_takes_options(installed, slime, tmp_path):
    look = ("--", "python", "-c", toy_slime.LOOK)
    report = tmp_path / "r.jsonl"
    run = (installed.command, "run")
    assert installed.run(*run, "--disable", toy_slime.PATCH, *look, cwd=slime).stdout == "untouched\n"
    assert installed.run(*run, "--only", "verl-*", *look, cwd=slime).stdout == "untouched\n"
    quiet = installed.run(*run, "--log", "off", "--strict", "--report", str(report), *look, cwd=slime)
    assert (quiet.stdout, quiet.stderr) == ("applied\n", "")
    assert len(report.read_text().splitlines()) == 1

    assert installed.run(installed.command, "report", str(report)).returncode == 0
    said = [installed.run(*run, *options, *look, cwd=slime).stderr for options in ((), ("--quiet",), ("--log", "info"))]
    assert [text.count("\n") for text in said] == [0, 0, 1]
    make_refused(slime)
    said = [installed.run(*run, *options, *look, cwd=slime).stderr for options in ((), ("--quiet",))]
    assert [text.count("[rlhf_patches] refused") for text in said] == [1, 0]


def test_run_hands_through_exit_status_and_signals(installed):
    assert installed.run(installed.command, "run", "--", "sh", "-c", "exit 7").returncode == 7
    assert installed.run(installed.command, "run", "--", "sh", "-c", "kill -TERM $$").returncode == -15
    process = subprocess.Popen(
        [installed.command, "run", "--", "sh", "-c", "trap 'exit 42' INT; echo ready; while :; do sleep 0.1; done"],
        env=installed.environment({}),
        stdout=subprocess.PIPE,
        text=True,
        # Started in the background of a shell, these tests ignore the signal, and a shell cannot trap what it ignores.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(2)
    assert process.wait(timeout=30) == 42
    process.stdout.close()


def test_run_takes_the_environments_own_programs(installed):
    """Called by its path, without activating the environment, whose `python` is another one then."""
    path = {"PATH": os.pathsep.join([*(p for p in os.environ["PATH"].split(os.pathsep) if "/.nox/" not in p)])}
    done = installed.run(installed.command, "run", "--", "python", "-c", "import sys; print(sys.prefix)", **path)
    assert (done.stdout.strip(), done.stderr) == (str(installed.folder), "")


@pytest.mark.parametrize("command", [("sh", "-c", "exit 3"), (sys.executable, "-S", "-c", "raise SystemExit(3)")])
def test_run_says_that_nothing_was_patched(installed, command):
    done = installed.run(installed.command, "run", "--quiet", "--", *command)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlhf-patches: NOT ACTIVE: no Python process of this run on this host loaded the hook of ")


def test_run_ends_with_what_it_started(installed, tmp_path):
    """A scheduler that kills `run` must not leave the job behind; but an empty file, by which it hears of hooks."""
    sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    process = subprocess.Popen(
        [installed.command, "run", "--", "python", "-c", sleeper],
        env=installed.environment({"TMPDIR": str(tmp_path)}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.kill()
    process.wait(timeout=30)
    started = time.monotonic()
    assert process.stdout.read() == ""
    assert time.monotonic() - started < 50, "the child held it open until its own end"
    process.stdout.close()


def test_a_folder_that_python_does_not_look_through_has_no_hook(installed, tmp_path):
    """`pip install --target`: its .pth file is there, and nothing runs it."""
    shutil.copytree(installed.site, tmp_path / "target", symlinks=True)
    bare = [sys.executable, "-m", "rlhf_patches"]
    here = {"PYTHONPATH": str(tmp_path / "target")}
    done = installed.run(*bare, "doctor", **here)
    assert "site hook: none." in done.stdout
    assert "pip install --target" in done.stdout
    done = installed.run(*bare, "run", "--", "true", **here)
    assert (done.returncode, "has no site hook" in done.stderr) == (2, True)


def test_a_command_that_is_not_there(installed):
    done = installed.run(installed.command, "run", "--", "no-such-command")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "rlhf-patches: there is no command 'no-such-command'\n"


@pytest.mark.parametrize("text", ["no program", "#!/no/such/interpreter\n"])
def test_a_command_that_cannot_be_executed(installed, tmp_path, text):
    file = tmp_path / "program"
    file.write_text(text)
    file.chmod(0o755)
    done = installed.run(installed.command, "run", "--", str(file))
    assert done.returncode == 126
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rlhf-patches: {file} cannot be executed: ")


def test_what_cannot_be_watched_is_refused_before_the_run(installed):
    done = installed.run(installed.command, "run", "--", "true", RLHF_PATCHES_WATCH="mine,json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rlhf-patches: RLHF_PATCHES_WATCH names json: expected top-level modules")


def test_the_very_module_whose_import_loads_the_engine_is_patched(installed, tmp_path):
    """The engine's finder joins sys.meta_path while Python walks through it for this import."""
    (tmp_path / "toptarget.py").write_text("def f(a, b):\n    return a - b\n")
    (tmp_path / "plug.py").write_text(
        "from rlhf_patches import Guard, Patch, Rewrite, Variant, hookimpl\n"
        "@hookimpl\n"
        "def rlhf_patches():\n"
        "    change = Rewrite('toptarget:f', '$A - $B', '$A + $B')\n"
        "    variant = Variant(Guard('toptarget', ''), (change,))\n"
        "    return [Patch('toptarget-sign', 's', 's', 's', 's', ('r',), (variant,), 'never')]\n"
    )
    metadata = tmp_path / "plug-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlhf_patches]\nplug = plug\n")
    code = "import toptarget; print(toptarget.f(5, 2))"
    environment = {"PYTHONPATH": str(tmp_path)}
    assert installed.code(code, **environment) == "3"
    assert installed.code(code, **ON, **environment) == "7"
    assert installed.code(code, RLHF_PATCHES_PLUGINS="none", **ON, **environment) == "3"
    assert installed.code(code, RLHF_PATCHES_WATCH="toptarget", **ON, **environment) == "7"
    (tmp_path / "sitecustomize.py").write_text("import toptarget\n")
    assert installed.code(code, **ON, **environment) == "7"
    (tmp_path / "sitecustomize.py").unlink()
    # `run` knows from the plugin what to watch.
    done = installed.run(installed.command, "run", "--", installed.python, "-c", code, **environment)
    assert done.stdout == "7\n", done.stderr
