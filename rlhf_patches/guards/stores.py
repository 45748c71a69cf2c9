"""What was found in a text by an earlier process: one file per text, in the user's cache folder.

As Python keeps bytecode, so that a module is compiled once per machine and not once per process. A result depends on
nothing but the text, the key, this interpreter and this package's own code, and a file is for one combination of these:
it cannot be out of date. A file that is damaged, of another user, or that others may write to counts as not there.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import pkgutil
import stat
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from .. import settings
from ..import_system import no_signal

_Made = TypeVar("_Made")

_OWN_CODE = {
    __package__: ("stores.py", "sources.py", "rewriting.py", "shapes.py"),
    f"{__package__.rpartition('.')[0]}.definitions": ("patch.py",),
}
"""Whatever has a part in a result."""

_DIGEST = 32  # bytes, at the beginning of a file, of what follows


def is_on() -> bool:
    """Whether files are used: RLHF_PATCHES_CACHE does not switch them off, and there is a place for them."""
    try:
        return settings.truth("CACHE", default=True) and folder() is not None
    except settings.SettingsError:  # told by `settings.from_environment`
        return False


def folder() -> str | None:
    """``$XDG_CACHE_HOME/rlhf-patches``, as the XDG specification has it; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser(os.path.join("~", ".cache"))
    return os.path.join(base, "rlhf-patches") if os.path.isabs(base) else None


class Store:
    """The results for one text."""

    def __init__(self, filename: str, text: str) -> None:
        self._path = _path(filename, text)
        self._results = _read(self._path) if self._path else {}
        self._is_new = False

    def get(self, key: tuple[Any, ...], find: Callable[[], _Made]) -> _Made:
        """The result for a key; what ``find()`` returns if there is none yet."""
        # Named tuples are plain ones in a file.
        plain = repr(_plain(key))
        if plain not in self._results:
            self._results[plain] = _plain(find())
            self._is_new = True
        return self._results[plain]  # type: ignore[no-any-return]

    def save(self) -> None:
        """Keep what is new. Where that cannot be done, the next process has to find it again."""
        if not self._is_new or self._path is None or sys.dont_write_bytecode:
            return
        self._is_new = False
        # Another process may have written others; of two that write at once one is lost, and found again.
        try:
            _write(self._path, {**_read(self._path), **self._results})
        except no_signal(OSError, ValueError):
            pass


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    assert value is None or isinstance(value, (str, int, CodeType)), value
    return value


def _path(filename: str, text: str) -> str | None:
    import hashlib  # OpenSSL: milliseconds, and only where something is patched

    own, home = _own_code(), folder()
    if own is None or home is None:
        return None
    # The interpreter decides about code: which version, and whether it leaves out assertions or docstrings.
    parts = (own, sys.version, str(sys.flags.optimize), filename, text)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return os.path.join(home, "found", digest.hexdigest()[:32])


@functools.cache
def _own_code() -> str | None:
    import hashlib

    digest = hashlib.sha256()
    try:
        for package, names in _OWN_CODE.items():
            for name in names:
                digest.update(pkgutil.get_data(package, name) or b"")
    except no_signal(OSError, ImportError):  # installed without its text
        return None
    return digest.hexdigest()


def _read(path: str) -> dict[str, Any]:
    import hashlib

    try:
        with open(os.open(path, _TO_READ), "rb") as file:
            state = os.fstat(file.fileno())
            _check_ours(state)
            data = file.read() if stat.S_ISREG(state.st_mode) else b""
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            return {}
        return marshal.loads(data[_DIGEST:])  # type: ignore[no-any-return]
    except no_signal(OSError, ValueError, EOFError, TypeError):
        return {}


_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""At once, if it is a pipe that nobody writes to."""


def _write(path: str, results: dict[str, Any]) -> None:
    import hashlib

    home = os.path.dirname(path)
    os.makedirs(home, mode=0o700, exist_ok=True)
    _check_ours(os.stat(home))
    data = marshal.dumps(results)
    temporary = f"{path}.{os.urandom(8).hex()}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _check_ours(found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("it is another user's, or others may write to it")
