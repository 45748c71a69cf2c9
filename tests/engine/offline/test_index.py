"""What an index may say and what it may not: names that lead elsewhere, answers without end, redirections."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import socket
import threading
import time

import pytest

from rlhf_patches.offline import index as indexes
from rlhf_patches.offline.bounded_http import IndexProblem
from rlhf_patches.offline.index import File, Index

WHEEL = "toy-1.0-py3-none-any.whl"


@pytest.fixture
def server():
    """Serves ``answers``, by path: the parts of what goes down the wire. ``asked`` are the requests."""

    class Server:
        def __init__(self):
            self.answers, self.asked = {}, []
            self.listening = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
            self.open = True
            threading.Thread(target=self.serve, daemon=True).start()

        def serve(self):
            while self.open:
                with contextlib.suppress(OSError):
                    threading.Thread(target=self.answer, args=(self.listening.accept()[0],), daemon=True).start()

        def answer(self, connection):
            with connection, contextlib.suppress(OSError):
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(4096)
                self.asked.append(request.decode())
                for part in self.answers.get(request.split()[1].decode(), [page(b"", "404 Not Found")]):
                    if not self.open:
                        return
                    connection.sendall(part)

        def lists(self, **more):
            """The index lists one file, in JSON."""
            file = {"filename": WHEEL, "url": "/file", "hashes": {}, **more}
            self.answers["/simple/toy/"] = [page(json.dumps({"files": [file]}).encode(), kind=JSON)]

    made = Server()
    yield made
    made.open = False
    made.listening.close()


JSON = "application/vnd.pypi.simple.v1+json"


def page(body, status="200 OK", kind="text/html", **headers):
    said = {"Content-Type": kind, "Content-Length": len(body), **headers}
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in said.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def without_end(part, seconds=0.0):
    while True:
        yield part
        time.sleep(seconds)


def found(server):
    """The one file that is listed."""
    (release,) = Index(f"{server.url}/simple/").releases("Toy")
    return release.file


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
LINK = f'<a href="/file">{WHEEL}</a>\n'.encode()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (lambda: _slowly(HEAD + b"\r\n"), "exceeded the time limit"),
        (lambda: _slowly(b"HTTP/1.1 200 OK\r\nX: "), "exceeded the time limit"),
        (lambda: without_end(HEAD, 0.01), "HTTPException: got more than 100 headers"),
        (lambda: _then(HEAD + b"\r\n", without_end(LINK * 10_000)), "it has more than 1 MiB"),
        (
            lambda: _then(
                HEAD + b"Transfer-Encoding: chunked\r\n\r\n", without_end(b"400\r\n" + b"x" * 1024 + b"\r\n")
            ),
            "than 1 MiB",
        ),
        (lambda: [HEAD + b"Content-Length: 4000\r\n\r\n" + LINK], "bytes early"),
        (lambda: [page(b"[" * 100_000, kind=JSON)], "could not be queried"),
        (lambda: [page(b'{"files": 3}', kind=JSON)], "could not be queried"),
        (lambda: [page(b'{"files": [{"filename": 3, "url": 1}]}', kind=JSON)], "could not be queried"),
        (lambda: [page(LINK * 101)], "more than 100 files of toy"),
    ],
    ids=["a byte at a time", "headers", "many headers", "bytes", "chunks", "cut", "deep", "number", "name", "files"],
)
def test_a_page_is_bounded_as_a_whole(server, monkeypatch, parts, said):
    monkeypatch.setattr(indexes, "PAGE_SECONDS", 1 if said.endswith("in time") else 60)
    monkeypatch.setattr(indexes, "MAX_PAGE", 2**20)
    monkeypatch.setattr(indexes, "MAX_FILES", 100)
    server.answers["/simple/toy/"] = parts()
    with pytest.raises(IndexProblem, match=r"/simple/ (could not be queried for toy|lists)") as caught:
        found(server)
    assert said in str(caught.value)


def _slowly(first):
    return _then(first, without_end(b"x", 0.1))


def _then(first, others):
    yield first
    yield from others


def test_a_file_is_bounded_as_a_whole(server, monkeypatch, tmp_path):
    monkeypatch.setattr(indexes, "MAX_FILE", 2**20)
    monkeypatch.setattr(indexes, "FILE_SECONDS", 1)
    server.lists()
    cases = ((without_end(b"x" * 2**16), "more than 1 MiB"), (without_end(b"x", 0.1), "exceeded the time limit"))
    for parts, said in cases:
        server.answers["/file"] = _then(HEAD + b"\r\n", parts)
        with pytest.raises(IndexProblem, match=said):
            Index().fetch(found(server)._replace(url=f"{server.url}/file"), tmp_path / "new" / "folder")
        assert list(tmp_path.iterdir()) == [], "nothing is left of it"


NAMES = [
    "toy-1.0-py3-none-any/../../../victim.whl",
    "../victim.whl",
    "/victim.whl",
    "a\\victim.whl",
    "..",
    "x\0.whl",
    "",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["JSON", "HTML"])
def test_names_that_lead_elsewhere(server, tmp_path, name, kind):
    """An index could delete or overwrite what the user can write: a page's name was joined to a folder."""
    if kind == "JSON":
        server.lists(filename=name)
    else:
        server.answers["/simple/toy/"] = [page(f'<a href="/file">{name}</a>'.encode())]
    server.answers["/file"] = [page(b"new")]
    victim = tmp_path / "victim.whl"
    victim.write_text("mine")
    with pytest.raises(IndexProblem, match="is not a file name: it is malicious"):
        found(server)
    for hashes in ({}, {"sha256": hashlib.sha256(b"new").hexdigest()}):
        with pytest.raises(IndexProblem, match="is not a file name"):
            Index().fetch(File(name, f"{server.url}/file", hashes), tmp_path / "toy" / "1.0")
    assert victim.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["victim.whl"]


def test_what_a_page_lists(server):
    """JSON and HTML: names, addresses beside the page, checksums, what is withdrawn; and what is no release is not."""
    files = [
        {
            "filename": "toy-0.9.tar.gz",
            "url": "../../a",
            "hashes": {"sha256": "AB", "odd": "1"},
            "yanked": "bad & worse",
            "size": 10**4000,
        },
        {"filename": WHEEL, "url": "https://files.invalid/b", "hashes": {}, "yanked": True, "size": 7},
        {"filename": "toy-1.1.win32.exe", "url": "c", "hashes": {}},
        {"filename": f"toy-{'1' * 4500}.zip", "url": "d", "hashes": {}},
        {"filename": "toy-1.2-3.zip", "url": "d", "hashes": {}},
        {"filename": "other-1.0.zip", "url": "d", "hashes": {}},
        {"filename": "toy-more-1.0.zip", "url": "d", "hashes": {}},
    ]
    links = [
        '<a\n href="../../a#sha256=ab" data-yanked="bad &amp; worse">toy-0.9.tar.gz</a>',
        f'<A data-requires-python=">3" HREF=https://files.invalid/b data-yanked>{WHEEL}</A>',
        *(f"<a href='d'>{file['filename']}</a>" for file in files[2:]),
    ]
    for kind, body in ((JSON, json.dumps({"files": files})), ("text/html", "<!DOCTYPE html><b>" + "\n".join(links))):
        server.answers["/simple/toy/"] = [page(body.encode(), kind=kind)]
        releases = Index(f"{server.url}/simple").releases("Toy")
        assert [str(release.version) for release in releases] == ["0.9", "1.0", "1.1", "1.2.post3"]
        assert releases[0].file == File("toy-0.9.tar.gz", f"{server.url}/a", {"sha256": "ab"}, "bad & worse")
        size = 7 if kind == JSON else 0
        assert releases[1].file == File(WHEEL, "https://files.invalid/b", {}, "no reason given", size)
        assert releases[2].file is None


@pytest.mark.parametrize("to", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,x"])
def test_only_the_web_is_read(server, tmp_path, to):
    server.lists(url=to)
    with pytest.raises(IndexProblem, match="is not a web address"):
        Index().fetch(found(server), tmp_path)
    server.answers["/simple/toy/"] = [page(b"", "302 Found", Location=to)]
    with pytest.raises(IndexProblem, match="could not be queried"):
        found(server)
    assert list(tmp_path.iterdir()) == []


def test_a_redirection_is_followed_unread_and_without_the_password(server, monkeypatch):
    monkeypatch.setattr(indexes, "PAGE_SECONDS", 5)
    elsewhere = server.url.replace("127.0.0.1", "localhost")
    moved = f"HTTP/1.1 301 Moved\r\nLocation: {elsewhere}/other/\r\n\r\n".encode()
    server.answers["/simple/toy/"] = _then(moved, without_end(b"x" * 2**16))
    server.answers["/other/"] = [page(LINK)]
    source = Index(server.url.replace("//", "//user:secret@") + "/simple")
    assert source.releases("toy")[0].file.url == f"{elsewhere}/file"
    assert ["Authorization: Basic dXNlcjpzZWNyZXQ=" in request for request in server.asked] == [True, False]
    assert "secret" not in source.label


@pytest.mark.parametrize("url", ["http://[::1/simple", "nowhere", "file:///opt/simple", "http://user:secret@[/"])
def test_what_is_no_index(url):
    with pytest.raises(IndexProblem) as caught:
        Index(url).releases("toy")
    assert "secret" not in str(caught.value)


def test_a_file_that_fails_does_not_take_the_folder_from_another(tmp_path):
    # In one cache of releases several threads fetch at once, and `put` removes a folder that it created in vain.
    def fetched(incoming, number):
        if number % 2:
            raise IndexProblem("not what its checksum says")
        (incoming / f"{number}.whl").touch()
        return incoming / f"{number}.whl"

    def put(number):
        with contextlib.suppress(IndexProblem):
            return indexes.put(folder, lambda incoming: fetched(incoming, number))

    for number in range(100):
        folder = tmp_path / str(number) / "toy"
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            assert list(pool.map(put, range(6))) == [
                None if number % 2 else folder / f"{number}.whl" for number in range(6)
            ]
