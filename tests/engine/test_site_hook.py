"""The site hook when the package is damaged, what `autoload` writes, and what `run` refuses."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from rlhf_patches import Rewrite, autoload
from rlhf_patches.cli import judge
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.runs import hook_files
from tests.harness import toy_slime
from tests.harness.installed import ROOT

ON = {"RLHF_PATCHES_AUTOLOAD": "1"}
SHIPPED = ("rlhf_patches.pth", "rlhf_patches.start", "rlhf_patches_start.py")
KINDS = ("pth", "start", "py") if sys.version_info >= (3, 15) else ("pth",)  # PEP 829
WRITTEN = [f"rlhf_patches_autoload.{kind}" for kind in KINDS]


# ------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    "remove", ["rlhf_patches", "rlhf_patches/site_hook.py", "rlhf_patches/settings.py", "rlhf_patches/patches"]
)
def test_a_half_removed_package_breaks_nothing_and_is_not_silent(make_installed, slime, remove):
    environment = make_installed()
    path = environment.site / remove
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for setting in ({}, ON):
        done = environment.run(environment.python, "-c", toy_slime.LOOK, cwd=slime, **setting)
        assert (done.returncode, done.stdout.strip()) == (0, "untouched"), done.stderr
        assert bool(done.stderr) == bool(setting)
        if setting:
            assert "[rlhf_patches]" in done.stderr or "could not be used" in done.stderr


# ------------------------------------------------------------------------------------- autoload on/off


def test_autoload_switches_the_environment(make_installed, slime):
    environment = make_installed()
    for file in environment.site.glob("rlhf_patches*.*"):  # as in an editable install
        file.is_dir() or file.unlink()

    refused = environment.run(environment.command, "run", "--", "true")
    assert refused.returncode == 2
    assert "autoload on" in refused.stderr

    assert "is off" in environment.run(environment.command, "autoload", "status").stdout
    assert "is on" in environment.run(environment.command, "autoload", "on").stdout
    assert environment.code(toy_slime.LOOK, cwd=slime) == "applied"
    assert environment.code(toy_slime.LOOK, cwd=slime, RLHF_PATCHES_AUTOLOAD="0") == "untouched"
    assert "is on" in environment.run(environment.command, "autoload", "on").stdout, "twice is fine"
    assert environment.run(environment.command, "run", "--", "true").returncode == 0

    shutil.move(environment.site / "rlhf_patches", environment.folder / "gone")
    broken = environment.run(environment.python, "-c", "print(1)")
    assert (broken.returncode, broken.stdout) == (0, "1\n")
    assert "NOT ACTIVE" in broken.stderr
    assert broken.stderr.count("\n") == 1, "in a virtual environment the file is run twice"
    shutil.move(environment.folder / "gone", environment.site / "rlhf_patches")

    assert "is off" in environment.run(environment.command, "autoload", "off").stdout
    assert environment.code(toy_slime.LOOK, cwd=slime) == "untouched"


@pytest.fixture
def pth(tmp_path, monkeypatch):
    """What `autoload on` writes, in a folder that is no environment's."""
    monkeypatch.setattr(hook_files, "folder", lambda: tmp_path)
    return tmp_path / "rlhf_patches_autoload.pth"


@pytest.mark.parametrize("mask", [0o077, 0o000, 0o027])
def test_everybody_can_read_the_hook_and_nobody_else_write_it(pth, mask):
    before = os.umask(mask)
    try:
        assert autoload.on().problems == ()
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in pth.parent.iterdir()} == dict.fromkeys(WRITTEN, 0o644)
    autoload.off()
    assert list(pth.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "said"),
    [(0o600, "not every user can read"), (0o640, "not every user can"), (0o666, "every user can write")],
)
@pytest.mark.parametrize("written", WRITTEN)
def test_a_hook_of_the_wrong_mode_is_said_and_repaired(pth, monkeypatch, written, mode, said):
    autoload.on()
    file = pth.with_name(written)
    file.chmod(mode)
    for text in (str(autoload.status()), judge._hook_state()):
        assert f"but {said} {file}" in text or f"but {said} read {file}" in text
        assert "`rlhf-patches autoload on` rewrites it" in text
        assert "every process" not in text
    assert "but" not in str(autoload.on())
    assert judge._hook_state() == f"site hook: on for every process of this environment ({pth})"
    # The wheel's own, installed under umask 077.
    for name in SHIPPED:
        pth.with_name(name).touch(0o644)
    autoload.off()
    assert "but" not in judge._hook_state()
    wheels = pth.with_name(written.replace("_autoload.py", "_start.py").replace("_autoload", ""))
    wheels.chmod(mode)
    assert f"{said} {wheels}" in judge._hook_state() or f"{said} read {wheels}" in judge._hook_state()
    assert "chmod" in judge._hook_state()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_hook_that_belongs_to_somebody_else_is_said(pth):
    autoload.on()
    os.chown(pth, 12345, -1)
    assert f"but {pth} belongs to user 12345, the environment does not: remove it" in str(autoload.status())
    assert autoload.on().problems == ()


def test_an_environment_that_cannot_be_switched_is_one_line(said, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(hook_files, "folder", lambda: tmp_path / "file")
    for switch, doing in (("on", "write"), ("off", "remove")):
        status, out, err = said("autoload", switch)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"rlhf-patches: cannot {doing} {tmp_path / 'file'}")


def test_the_wheels_hook_is_made_of_the_same_text():
    shipped = {file.name: file.read_text() for file in (ROOT / "site_hook").glob("*.*")}
    line = autoload.line("0")
    assert shipped == dict(zip(SHIPPED, (line, "rlhf_patches_start:install\n", autoload.module(line)), strict=True)), (
        "run `make docs`"
    )


def test_a_plugin_for_the_standard_library_is_not_waited_for(framework):
    targets = ("json.decoder:JSONDecoder.decode", framework.path("m:f"))
    patch = framework.patch(*(Rewrite(target, "$A - $B", "$A + $B") for target in targets))
    assert autoload.watch_list([Registered(patch, "tests")]) == (framework.name,)


# ------------------------------------------------------------------------------------- run


@pytest.fixture
def environment_is_kept():
    """`run` makes this process's environment variables those of the command."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "needs a command"),
        (("run", "--only", "verl-no-sync", "--", "true"), "did you mean 'verl-no-sync-reentry'?"),
        (("run", "--log", "loud", "--", "true"), "RLHF_PATCHES_LOG is 'loud'"),
        (("run", "--log", "info", "--quiet", "--", "true"), "not allowed with"),
        (("run", "--report", "missing/run.jsonl", "--", "true"), "cannot be written: No such file or directory"),
        (("run", "--report", "/dev/full", "--", "true"), "cannot be written: it is not a regular file"),
        (("run", "--report", "script", "--", "true"), "cannot be written: it has other content"),
        (("autoload", "maybe"), "maybe"),
    ],
)
def test_wrong_commands(said, tmp_path, monkeypatch, environment_is_kept, arguments, message):
    (tmp_path / "script").write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    status, out, err = said(*arguments)
    assert (status, out) == (2, "")
    assert message in err
