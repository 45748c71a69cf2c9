"""HTTP with a time limit for a whole response, for http and https addresses only."""

from __future__ import annotations

import functools
import http.client
import io
import netrc
import os
import socket
import ssl
import time
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SILENT_SECONDS = 60
"""The longest time without data from an index."""


class IndexProblem(RuntimeError):
    """A request to an index failed, or a file could not be fetched; the message has the reason and what to do."""


class _Raw(io.RawIOBase):
    """A server's data until a deadline: a socket's own timeout applies to each piece, which may be one byte."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until

    def readable(self) -> bool:
        """As a file's."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """As a file's."""
        left = self._until - time.monotonic()
        self._connection.settimeout(max(0.001, min(SILENT_SECONDS, left)))
        try:
            if left > 0:
                return self._connection.recv_into(buffer)
        except TimeoutError:
            pass
        raise IndexProblem("the response exceeded the time limit")

    def close(self) -> None:
        """As a file's."""
        self._connection.close()
        super().close()


class _Connection:
    """A socket for http.client."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.sendall = connection.sendall
        self._raw = _Raw(connection, until)

    def makefile(self, mode: str) -> io.BufferedReader:
        """A reader of the socket."""
        return io.BufferedReader(self._raw)

    def close(self) -> None:
        """Do nothing: the reader closes the socket."""


def _bounded(kind: type[http.client.HTTPConnection], until: float, *arguments: Any, **more: Any) -> Any:
    class Bounded(kind):  # type: ignore[valid-type,misc]
        sock: Any

        def connect(self) -> None:
            super().connect()
            self.sock = _Connection(self.sock, until)

    return Bounded(*arguments, **more)


class _Unread:
    """A redirect: its body, which has no limit, is not read."""

    def __init__(self, answer: Any) -> None:
        self.close = answer.close

    def read(self) -> bytes:
        """Nothing."""
        return b""


class _Redirections(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        return super().http_error_302(req, _Unread(fp), code, msg, headers)  # type: ignore[arg-type]

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class _Http(urllib.request.HTTPHandler):
    until = 0.0

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(functools.partial(_bounded, http.client.HTTPConnection, self.until), req)


class _Https(urllib.request.HTTPSHandler):
    until = 0.0

    def https_open(self, req: urllib.request.Request) -> Any:
        made = functools.partial(_bounded, http.client.HTTPSConnection, self.until)
        return self.do_open(made, req, context=_context())


def opener(until: float) -> urllib.request.OpenerDirector:
    """An opener for HTTP only: Python's default also opens files, FTP and data, to which a page could redirect."""
    director = urllib.request.OpenerDirector()
    for each in (_Http(), _Https()):
        each.until = until
        director.add_handler(each)
    for kind in (
        urllib.request.ProxyHandler,
        _Redirections,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        director.add_handler(kind())
    return director


@functools.cache
def _context() -> ssl.SSLContext:
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # OpenSSL reads SSL_CERT_FILE itself
    place = next(filter(None, map(os.environ.get, names)), None)
    is_folder = place is not None and os.path.isdir(place)
    return ssl.create_default_context(cafile=None if is_folder else place, capath=place if is_folder else None)


def of_netrc(host: str | None) -> tuple[str, str] | None:
    """User and password of a host, from ``~/.netrc``."""
    try:
        login = netrc.netrc().authenticators(host or "")
    except (OSError, netrc.NetrcParseError, UnicodeError):
        return None
    return (login[0], login[2] or "") if login else None


def without_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """An address without its user and password, and the two."""
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    login = (urllib.parse.unquote(name), urllib.parse.unquote(password)) if user else None
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), login
