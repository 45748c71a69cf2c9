"""A package index on 127.0.0.1, whose releases a test makes: wheels and sdists of ``toy``, behind the simple API."""

from __future__ import annotations

import functools
import hashlib
import html
import http.server
import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest


class Index:
    """A folder of releases. ``requests`` are the names of what was asked for, ``parts`` the bytes sent of parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "simple" / "toy").mkdir(parents=True)
        self.requests: list[str] = []
        self.parts: list[int] = []
        self.yanked: dict[str, str] = {}
        handler = functools.partial(self._handler(), directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(index) -> type[http.server.SimpleHTTPRequestHandler]:
        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                index.requests.append(self.path.rpartition("/")[2])
                asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
                if asked is None:
                    super().do_GET()
                    return
                data = Path(self.translate_path(self.path)).read_bytes()
                first, last = asked[1], asked[2]
                begin = int(first) if first else max(0, len(data) - int(last))
                end = min(int(last) + 1, len(data)) if first and last else len(data)
                index.parts.append(end - begin)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
                self.send_header("Content-Length", str(end - begin))
                self.end_headers()
                self.wfile.write(data[begin:end])

        return Handler

    def publish(
        self,
        version: str,
        text: str | None,
        *,
        sdist: bool = False,
        yanked: str | None = None,
        cut: int = 0,
        more: dict[str, str] | None = None,
    ) -> Path:
        """Publish a release.

        Args:
            version: its version.
            text: of toy/steps.py; None leaves the module out.
            sdist: whether it is an sdist, not a wheel.
            yanked: why it is withdrawn.
            cut: bytes that are missing at its end, though the checksum is right.
            more: other files, by their names.
        """
        files = {"toy/__init__.py": "raise SystemExit('imported!')\n"} | (
            {} if text is None else {"toy/steps.py": text}
        )
        files |= more or {}
        metadata = f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n"
        file = self.folder / (f"toy-{version}.tar.gz" if sdist else f"toy-{version}-py3-none-any.whl")
        if sdist:
            with tarfile.open(file, "w:gz") as archive:
                for name, content in {**files, "PKG-INFO": metadata}.items():
                    member = tarfile.TarInfo(f"toy-{version}/{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content.encode()))
        else:
            with zipfile.ZipFile(file, "w") as wheel:
                for name, content in {**files, f"toy-{version}.dist-info/METADATA": metadata}.items():
                    wheel.writestr(name, content)
        if cut:
            file.write_bytes(file.read_bytes()[:-cut])
        if yanked is not None:
            self.yanked[file.name] = yanked
        self._list()
        return file

    def announce(self, name: str) -> None:
        """List a file of another kind."""
        (self.folder / name).touch()
        self._list()

    def _list(self) -> None:
        links = [
            f'<a href="/{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}"{self._mark(file)}>'
            f"{file.name}</a>"
            for file in sorted(self.folder.glob("toy-*"))
        ]
        (self.folder / "simple" / "toy" / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(links))

    def _mark(self, file: Path) -> str:
        return f' data-yanked="{html.escape(self.yanked[file.name])}"' if file.name in self.yanked else ""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """One that is empty."""
    made = Index(tmp_path / "index")
    yield made
    made.server.shutdown()
