"""What an earlier process has found in a text: used again, never beyond what it was found for, never in the way."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_patches import Patch, Replace, Rewrite, Status, Wrap, fingerprint
from rlhf_patches.guards import rewriting, sources, stores

SOURCE = """\
def f(a):
    return a - 1, a - 2

class C:
    def g(self, a, *, b=1):
        \"\"\"It says so.\"\"\"
        return a - b
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of files, empty."""
    monkeypatch.delenv("RLHF_PATCHES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "cache" / "rlhf-patches" / "found"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was parsed and compiled, looked for and checked, by name."""
    done: list[str] = []

    def counted(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: object) -> object:
            done.append(name)
            return real(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(sources, "_parse")
    counted(rewriting, "_compile")
    counted(rewriting, "_rewrite_code")
    counted(rewriting, "_by_line")
    return done


@pytest.fixture
def patch(framework) -> Patch:
    framework.write("mod", SOURCE)
    framework.write("fixes", "def around(w, i, args, kwargs):\n    return w(*args, **kwargs) + 100\n")
    return framework.patch(
        Rewrite(framework.path("mod:f"), "a - 1", "a + 1"),
        Rewrite(framework.path("mod:f"), "a - 2", "a + 2"),
        Wrap(framework.path("mod:C.g"), framework.path("fixes:around"), {fingerprint(SOURCE, "C.g"): "1.0"}),
    )


@pytest.fixture
def applied(framework, engine) -> Iterator[Callable[[Patch], tuple[Status, str, object]]]:
    """What a new process would say of a patch, and the code of the rewritten function then."""

    def apply(patch: Patch) -> tuple[Status, str, object]:
        one = engine(patch)
        (row,) = one.apply()
        mod = framework.load()
        (row,) = one.report()
        code = mod.f.__code__
        results = mod.f(10), mod.C().g(10, b=3)
        one.revert()
        assert (mod.f(10), mod.C().g(10)) == ((9, 8), 9)
        if row.status is Status.APPLIED:
            assert results == ((11, 12), 107)
        positions = code.co_positions if sys.version_info >= (3, 11) else code.co_lines
        return row.status, row.reason, (code, code.co_filename, [*positions()])

    return apply


def test_found_once_per_machine(framework, applied, patch, work, cache):
    first = applied(patch)
    assert first[0] is Status.APPLIED
    assert {"_parse", "_compile", "_rewrite_code", "_by_line"} <= set(work)
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    before = file.stat().st_mtime_ns
    del work[:]
    assert applied(patch) == first
    assert not work
    assert file.stat().st_mtime_ns == before


def test_a_process_gives_it_to_the_next(framework, patch, tmp_path):
    """Two interpreters: the second one compiles nothing, and its functions do the same."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import builtins, sys
sys.path.insert(0, {str(framework.site)!r})
real = builtins.compile
def compile(text, *rest, **more):
    if isinstance(text, str) and "class C" in text:
        print("compiled")
    return real(text, *rest, **more)
builtins.compile = compile
from rlhf_patches import Guard, Patch, Rewrite, Variant
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.engine.engine import Engine
changes = (Rewrite("{framework.name}.mod:f", "a - 1", sys.argv[1]),)
patch = Patch("mod-bug", "s", "s", "c", "a fix", ("https://example.invalid/1",),
    (Variant(Guard("{framework.distribution}", ""), changes),), retire="never")
Engine(load=lambda: ([Registered(patch, "tests")], [])).apply()
from {framework.name}.mod import f
print(f(10))
"""
    )

    def run(replacement: str, *flags: str, **settings: str) -> list[str]:
        command = [sys.executable, *flags, str(script), replacement]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **settings}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    cold = ["compiled", "compiled", "compiled", "(11, 8)"]  # once by ast.parse
    assert run("a + 1") == cold
    assert run("a + 1") == ["(11, 8)"]
    assert run("a + 5")[-1] == "(15, 8)"
    assert run("a + 1", RLHF_PATCHES_CACHE="0") == cold
    assert run("a + 1", "-O") == cold  # other code: no assertions
    assert run("a + 1", "-O") == ["(11, 8)"]
    assert run("a + 1") == ["(11, 8)"]


def test_for_this_text_alone(framework, applied, patch, work):
    applied(patch)
    framework.write("mod", SOURCE.replace("a - 1,", "a - 1 - 0,"))
    for name in [name for name in sys.modules if name.startswith(framework.name)]:
        del sys.modules[name]
    del work[:]
    one, reason, _ = applied(framework.patch(Rewrite(framework.path("mod:f"), "a - 1 - 0", "a + 1"), *_rest(patch)))
    assert one is Status.APPLIED, reason
    assert "_rewrite_code" in work


def _rest(patch: Patch) -> tuple[object, ...]:
    return patch.variants[0].changes[1:]


def test_for_this_change_alone(framework, applied, patch, work):
    """Another edit, another pattern, another guard: each is looked at anew."""
    applied(patch)
    wrap = patch.variants[0].changes[2]
    target = framework.path("mod:f")
    others = [
        (Rewrite(target, "a - 1", "1 + a"), *_rest(patch)),
        (Rewrite(target, "$A - 1", "$A + 1"), *_rest(patch)),
        (Rewrite(target, "return a - 1, a - 2", "return a + 1, a + 2"), wrap),
    ]
    for changes in others:
        del work[:]
        status, reason, _ = applied(framework.patch(*changes))
        assert status is Status.APPLIED, reason
        assert "_by_line" in work
    refused = Wrap(wrap.target, wrap.implementation, {"0" * 16: "1.0"})
    assert applied(framework.patch(*patch.variants[0].changes[:2], refused))[0] is Status.REFUSED


def test_a_refusal_is_found_once_too(framework, engine, work):
    framework.write("mod", SOURCE)
    patch = framework.patch(Rewrite(framework.path("mod:f"), "a - 7", "a + 7"))
    rows = []
    for _ in range(2):
        del work[:]
        one = engine(patch)
        framework.load()
        rows += one.apply()
    first, second = rows
    assert first == second
    assert first.status is Status.REFUSED
    assert "0 times, expected 1" in first.reason
    assert not work


def test_another_release_of_ast_grep_looks_again(framework, applied, patch, work, monkeypatch):
    applied(patch)
    monkeypatch.setattr(sources, "remembered", _with_other_ast_grep(sources.remembered))
    del work[:]
    applied(patch)
    assert "_by_line" in work


def _with_other_ast_grep(real):
    from rlhf_patches.guards.versions import _Copy

    def remembered(key, make, small=False):
        return [_Copy("99.0", ())] if key[:2] == ("metadata", "ast-grep-py") else real(key, make, small)

    return remembered


def test_other_code_of_ours_finds_anew(applied, patch, work, monkeypatch):
    applied(patch)
    monkeypatch.setattr(stores, "_own_code", lambda: "edited")
    del work[:]
    applied(patch)
    assert "_rewrite_code" in work


def test_all_code_that_has_a_part_in_it_counts():
    """A result comes from these modules; what they import of ours decides nothing about it, or is among them."""
    counted = {f"{package}.{name.removesuffix('.py')}" for package, names in stores._OWN_CODE.items() for name in names}
    without_a_part = {
        "rlhf_patches.settings",  # whether files are used
        "rlhf_patches.import_system",  # which exceptions are a signal's
        "rlhf_patches.guards.versions",  # which release of ast-grep there is, which is in the key
        "rlhf_patches.definitions.status",
        "rlhf_patches.definitions.listed",  # what is known of a patch before there is a text
        "rlhf_patches.definitions.ranges",  # versions
    }
    for module in counted:
        text = Path(sys.modules[module].__file__).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = ".".join(module.split(".")[: -node.level])
                inner = f"{package}.{node.module}" if node.module else package
                names = {f"{inner}.{alias.name}" for alias in node.names}
                names = {name if name in sys.modules else inner for name in names}
                assert names <= counted | without_a_part, (module, names)


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a bit": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "its digest": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "no marshal": lambda data: hashlib.sha256(b"nothing").digest() + b"nothing",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_not_there(applied, patch, work, cache, damage):
    first = applied(patch)
    (file,) = cache.iterdir()
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    del work[:]
    assert applied(patch) == first
    assert "_rewrite_code" in work
    del work[:]
    assert applied(patch) == first
    assert not work


def _as_a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def _as_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _as_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir(mode=0o700)


FOREIGN = {
    "others may write to it": lambda file: file.chmod(0o666),
    "a link": _as_a_link,
    "a pipe": _as_a_pipe,
    "a folder": _as_a_folder,
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_is_not_surely_ours_is_not_read(applied, patch, work, cache, foreign):
    first = applied(patch)
    (file,) = cache.iterdir()
    FOREIGN[foreign](file)
    del work[:]
    assert applied(patch) == first
    assert "_rewrite_code" in work


def test_another_users_file_is_not_read(applied, patch, work, monkeypatch):
    first = applied(patch)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    del work[:]
    assert applied(patch) == first
    assert "_rewrite_code" in work


def _others_may_write(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def _a_file_is_there(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")


@pytest.mark.parametrize("make", [_others_may_write, _a_file_is_there])
def test_a_folder_that_cannot_be_used_is_in_nobodys_way(applied, patch, cache, make):
    make(cache)
    assert applied(patch)[0] is Status.APPLIED
    assert cache.is_file() or not [*cache.iterdir()]


def test_python_is_told_to_write_no_bytecode(applied, patch, cache, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert applied(patch)[0] is Status.APPLIED
    assert not cache.exists()


@pytest.mark.parametrize("settings", [{"RLHF_PATCHES_CACHE": "0"}, {"HOME": "nowhere", "XDG_CACHE_HOME": "relative"}])
def test_without_files(applied, patch, work, cache, monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        del work[:]
        assert applied(patch)[0] is Status.APPLIED
        assert "_rewrite_code" in work
    assert not cache.exists()
    assert not any(map(os.path.exists, settings.values()))


def test_two_patches_of_one_text_share_a_file(framework, engine, cache, work):
    framework.write("mod", SOURCE)
    target = framework.path("mod:f")
    patches = [
        framework.patch(Rewrite(target, f"a - {number}", f"a + {number}"), name=f"bug-{number}") for number in (1, 2)
    ]
    for _ in range(2):
        del work[:]
        one = engine(*patches)
        one.apply()
        assert framework.load().f(10) == (11, 12)
        seen = [*work]
        one.revert()
    assert not seen
    assert len([*cache.iterdir()]) == 1


def test_what_another_process_has_written_meanwhile_stays(tmp_path):
    one, other = stores.Store("file.py", "text"), stores.Store("file.py", "text")
    assert one.get(("a",), lambda: 1) == 1
    assert other.get(("b",), lambda: 2) == 2
    one.save()
    other.save()
    later = stores.Store("file.py", "text")
    assert later.get(("a",), lambda: 3) == 1
    assert later.get(("b",), lambda: 3) == 2


def test_many_at_once(tmp_path):
    """Whoever reads has all of a file or nothing of it."""
    wrong: list[object] = []

    def work(number: int) -> None:
        for step in range(30):
            store = stores.Store("file.py", "text")
            found = store.get(("key", step), lambda step=step: (step, "x" * 2000))
            if found != (step, "x" * 2000):
                wrong.append(found)
            store.save()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len([*Path(stores.folder(), "found").iterdir()]) == 1  # nothing half written is left


def test_a_replacement_uses_it(framework, engine, work):
    framework.write("mod", SOURCE)
    framework.write("fixes", "def new(a):\n    return a\n")
    patch = framework.patch(
        Replace(framework.path("mod:f"), framework.path("fixes:new"), {fingerprint(SOURCE, "f"): "1.0"})
    )
    for _ in range(2):
        del work[:]
        one = engine(patch)
        one.apply()
        assert framework.load().f(10) == 10
        one.revert()
    assert not work
