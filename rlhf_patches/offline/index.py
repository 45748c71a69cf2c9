"""The releases of a distribution on a package index, and their files: the simple API (PEP 503, 691), JSON or HTML.

pip, which `download` runs, does not report withdrawn releases or releases with an sdist alone, runs code from an sdist
to fetch it, and takes a second for each file.

An index is treated as hostile: only plain file names are accepted, and the bytes and seconds of each response are
limited as a whole.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import html
import http.client
import io
import itertools
import json
import os
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import Version

from .bounded_http import SILENT_SECONDS, IndexProblem, of_netrc, opener, without_login

if TYPE_CHECKING:
    pass

PYPI = "https://pypi.org/simple/"
PAGE_SECONDS = 180
"""Time limit for a whole page; PyPI takes one second."""
FILE_SECONDS = 3600
MAX_PAGE = 16 * 2**20
"""Limit of bytes of a page. The largest page of a framework, transformers', has 0.6 MiB."""
MAX_FILE = 4 * 2**30
"""Limit of bytes of a file. torch's largest has 1 GiB."""
MAX_FILES = 100_000
"""Limit of files on a page. The largest page of a framework has 1,000."""

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPTED = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}")
_SDIST = (".tar.gz", ".tgz", ".zip")
# Other files: only their existence counts.
_OTHERS = re.compile(r"([^-]+?)(?:\.(?:win|linux|macosx)[-\w.]*|-py\d.*|-\d+\.\w+)?\.(?:egg|exe|msi|rpm|tar\.\w+|tbz)")

# Each link is matched in its own piece of the page, so that no expression takes more than linear time.
_LINK = re.compile(r"""((?:[^>"']|"[^"]*"|'[^']*')*)>([^<]*)""")
_ATTRIBUTE = re.compile(r"""(?<![\w-])([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_BARE_YANKED = re.compile(r"(?<![\w-])data-yanked(?![\w-])")
_LONGEST_LINK = 8192
_LONGEST_REASON = 500


class File(NamedTuple):
    """A wheel or an sdist on an index.

    Attributes:
        filename: a plain file name.
        url: the address.
        hashes: the checksums by algorithm; empty if the index states none.
        yanked: the reason for the withdrawal; None if not withdrawn.
        size: the size in bytes; 0 if the index states none.
    """

    filename: str
    url: str
    hashes: Mapping[str, str]
    yanked: str | None = None
    size: int = 0

    @property
    def is_sdist(self) -> bool:
        """Whether the file is an sdist."""
        return self.filename.endswith(_SDIST)


class Published(NamedTuple):
    """A release.

    Attributes:
        version: the version.
        files: the wheels and sdists.
    """

    version: Version
    files: tuple[File, ...]

    @property
    def file(self) -> File | None:
        """The wheel that most users would install; without a wheel the sdist; None if there is neither."""
        order = ("py3-none-any", "cp311-cp311-manylinux", "-cp311-", ".whl")
        return min(
            self.files, key=lambda file: ([mark not in file.filename for mark in order], file.filename), default=None
        )

    @property
    def sdist(self) -> File | None:
        """The sdist; None if there is none."""
        return next((file for file in self.files if file.is_sdist), None)

    @property
    def yanked(self) -> str | None:
        """The reason for the withdrawal of `file`; None if not withdrawn."""
        return self.file.yanked if self.file else None


class Index:
    """One index, by its address.

    Raises:
        IndexProblem: the address is not valid.
    """

    def __init__(self, url: str = PYPI) -> None:
        try:
            self.label, self._login = without_login(url)
            self._host = urllib.parse.urlsplit(self.label).hostname
        except ValueError as error:
            raise IndexProblem(f"{_without_password(url)!r:.300} is not an index address: {error}") from error

    def releases(self, name: str) -> list[Published]:
        """All releases with a PEP 440 version, oldest first, including withdrawn ones and pre-releases.

        Raises:
            IndexProblem: the distribution does not exist, or the index does not respond correctly.
        """
        name = canonicalize_name(name)
        page = io.BytesIO()
        try:
            url, kind = self._get(f"{self.label.rstrip('/')}/{name}/", page, MAX_PAGE, PAGE_SECONDS)
            listed = _of_json(page.getvalue()) if kind == _JSON else _of_html(page.getvalue())
            files = list(itertools.islice(listed, MAX_FILES + 1))
        except Exception as error:  # network, HTTP, or an invalid page
            if isinstance(error, urllib.error.HTTPError) and error.code == http.HTTPStatus.NOT_FOUND:
                raise IndexProblem(f"{self.label} has no distribution {name!r}") from error
            raise IndexProblem(f"{self.label} could not be queried for {name}: {_reason(error)}") from error
        if len(files) > MAX_FILES:
            raise IndexProblem(f"{self.label} lists more than {MAX_FILES} files of {name}: too many for a distribution")
        by_version: dict[Version, list[File]] = {}
        for file in files:
            version = _version(file.filename, name)
            if version is None:
                continue
            known = by_version.setdefault(version, [])
            if file.filename.endswith((".whl", *_SDIST)):
                known.append(file._replace(url=urllib.parse.urljoin(url, file.url)))
        return [Published(version, tuple(by_version[version])) for version in sorted(by_version)]

    def release(self, name: str, version: str) -> Published | None:
        """One release of a distribution; None if it does not exist.

        Raises:
            IndexProblem: see `releases`.
        """
        wanted = _parsed(version)
        return next((each for each in self.releases(name) if each.version == wanted), None)

    def fetch(self, file: File, folder: Path) -> Path:
        """Fetch the file into ``folder``, unless it exists; the result is complete and has the stated checksum.

        Raises:
            IndexProblem: the file could not be fetched, or has another checksum.
        """
        try:
            place = folder / _checked(file.filename)
            if file.hashes and place.is_file() and not _wrong(place, file.hashes):
                return place
            return put(folder, functools.partial(self._fetch, file))
        except Exception as error:
            raise IndexProblem(f"{file.filename[:300]} could not be fetched: {_reason(error)}") from error

    def _fetch(self, file: File, incoming: Path) -> Path:
        place = incoming / file.filename
        with place.open("xb") as stream:
            self._get(file.url, stream, MAX_FILE, FILE_SECONDS)
        wrong = _wrong(place, file.hashes)
        if wrong:
            raise IndexProblem(f"its {wrong} differs from the one that the index states")
        return place

    def _get(self, url: str, to: io.BufferedIOBase, most: int, seconds: float) -> tuple[str, str]:
        """Write the contents of an address to ``to``. Returns the final address and the content type."""
        until = time.monotonic() + seconds
        url, login = without_login(url)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise IndexProblem(f"{url!r:.300} is not a web address: expected http:// or https://")
        request = urllib.request.Request(url, headers={"Accept": _ACCEPTED, "User-Agent": "rlhf-patches"})
        login = login or (self._login if parts.hostname == self._host else None) or of_netrc(parts.hostname)
        if login:  # for this host only: a redirect does not pass it on
            coded = base64.b64encode(":".join(login).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {coded}")
        with contextlib.closing(opener(until).open(request, timeout=min(SILENT_SECONDS, seconds))) as answer:
            size = 0
            while chunk := answer.read1(2**16):
                size += len(chunk)
                if size > most:
                    raise IndexProblem(f"it has more than {most >> 20} MiB")
                to.write(chunk)
            if answer.length:
                raise IndexProblem(f"it ends {answer.length} bytes early")
            return answer.url, answer.headers.get_content_type()


def put(folder: Path, get: Callable[[Path], Path]) -> Path:
    """Let ``get`` create a file in a temporary folder, and move the file into ``folder``. Returns its final path.

    An interrupted run leaves neither a partial file nor a new folder.
    """
    # The temporary folder is on the same file system, and ``folder`` is created once there is something to put in it:
    # a failure has nothing to take away that another thread or process may be using.
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    with tempfile.TemporaryDirectory(dir=nearest, prefix=".incoming-") as incoming:
        file = get(Path(incoming))
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(file, folder / file.name)
        return folder / file.name


# ------------------------------------------------------------------------------------------- pages


def _of_json(page: bytes) -> Iterator[File]:
    """PEP 691."""
    for each in json.loads(page)["files"]:
        yanked, size = each.get("yanked") or None, each.get("size")
        yield File(
            _checked(each["filename"]),
            str(each["url"]),
            _known(each.get("hashes") or {}),
            yanked and (str(yanked)[:_LONGEST_REASON] if yanked is not True else "no reason given"),
            size if type(size) is int and 0 <= size <= MAX_FILE else 0,
        )


def _of_html(page: bytes) -> Iterator[File]:
    """PEP 503."""
    for piece in re.split(r"<[aA]\s", page.decode("utf-8", "replace"), maxsplit=MAX_FILES + 1)[1:]:
        link = _LINK.match(piece[:_LONGEST_LINK])
        if link is None:
            continue
        attributes = {name.lower(): html.unescape("".join(value)) for name, *value in _ATTRIBUTE.findall(link[1])}
        if "data-yanked" not in attributes and _BARE_YANKED.search(link[1]):
            attributes["data-yanked"] = ""
        url, _, fragment = attributes.get("href", "").partition("#")
        name, _, value = fragment.partition("=")
        yanked = attributes.get("data-yanked")
        if yanked is not None:
            yanked = (yanked or "no reason given")[:_LONGEST_REASON]
        yield File(_checked(html.unescape(link[2]).strip()), url, _known({name: value}), yanked)


def _known(hashes: Mapping[Any, Any]) -> dict[str, str]:
    """The checksums with a known algorithm."""
    known = {name for name in hashlib.algorithms_guaranteed if "shake" not in name}
    return {str(name): str(value).lower() for name, value in hashes.items() if name in known}


def _checked(filename: object) -> str:
    """A plain file name; anything that could be a path is refused."""
    if not isinstance(filename, str) or re.search(r"[/\\\0]", filename) or filename in ("", ".", ".."):
        raise IndexProblem(f"it lists {filename!r:.300}, which is not a file name: it is malicious")
    return filename


def _version(filename: str, name: str) -> Version | None:
    """The version in a file's name; None if it is no PEP 440 version, or the file has another name."""
    if not _NAME.fullmatch(filename):
        return None
    if filename.endswith(".whl"):
        parts = filename[: -len(".whl")].split("-")
        own, text = (parts[0], parts[1]) if len(parts) in (5, 6) else ("", "")
    else:
        end = next((end for end in _SDIST if filename.endswith(end)), "")
        # A name may contain dashes.
        dash = next((at for at, c in enumerate(filename) if c == "-" and canonicalize_name(filename[:at]) == name), 0)
        own, rest = filename[:dash], filename[dash + 1 :]
        other = None if end else _OTHERS.fullmatch(rest)
        text = rest[: len(rest) - len(end)] if end else other[1] if other else ""
    if canonicalize_name(own) != name:
        return None
    return _parsed(text)


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return None


def _wrong(file: Path, hashes: Mapping[str, str]) -> str:
    """An algorithm whose checksum differs from the stated one; empty if all are right."""
    made = {name: hashlib.new(name, usedforsecurity=False) for name in hashes}
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            for each in made.values():
                each.update(chunk)
    return next((name for name, each in made.items() if each.hexdigest() != hashes[name]), "")


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    kind = "" if isinstance(error, IndexProblem) else f"{type(error).__name__}: "
    return f"{kind}{error}".rstrip(": ")[:500]
