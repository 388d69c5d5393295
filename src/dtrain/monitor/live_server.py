"""Serves the page of a run in progress to a browser on this machine, and tells it of each change.

It listens on the loopback interface only, and answers only whoever knows the address: a random token is part
of it. It serves the page and its events, and no file.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import secrets
import socketserver
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from dtrain.errors import PortInUseError
from dtrain.monitor.live_run import INTERVAL, LiveRun
from dtrain.monitor.report import LIVE_POLICY

_HOST = "127.0.0.1"
_EVENTS = "events"
_MOST_CONNECTIONS = 32
_LOOK = 0.1  # seconds between two looks whether the server is to end
_PATIENCE = 10.0  # seconds for a request, and for a browser to take what is sent
_SILENCE = 15.0  # seconds after which a line shows whether the browser is still there
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{LIVE_POLICY}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveServer(http.server.ThreadingHTTPServer):
    """Serves one run's page. Use `serving`, or `serve_forever` and then `server_close`.

    Args:
        run: the run.
        port: the port on the loopback interface; 0 takes a free one.

    Raises:
        PortInUseError: the port is taken, or may not be used.

    Attributes:
        run: as given.
        ended: set when the server is closed, so that streams of events end.
    """

    daemon_threads = True  # the process need not wait for a browser

    def __init__(self, run: LiveRun, port: int = 0) -> None:
        self.run = run
        self.ended = threading.Event()
        self._token = secrets.token_urlsafe(32)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise PortInUseError(
                f"The page cannot be served at {_HOST}:{port}: {error.strerror or error}.",
                hint="Choose another port, or leave it out for a free one.",
            ) from None

    @property
    def address(self) -> str:
        """The page's address, with the token: whoever knows it can read the page on this machine."""
        return f"http://{_HOST}:{self.server_port}/{self._token}/"

    def server_bind(self) -> None:
        """Binds the socket, without the look-up of a host name that the class would make."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = _HOST, self.server_address[1]

    def server_close(self) -> None:
        """Closes the socket, and ends the streams of events."""
        self.ended.set()
        super().server_close()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Serves in a thread, inside the `with` block."""
        thread = threading.Thread(
            target=self.serve_forever, args=[_LOOK], name="dtrain-live-page", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

    def knows(self, host: list[str]) -> bool:
        """Whether a request's `Host` headers name this server.

        A page of another site can make its own name lead to this machine, but its requests bear that name.
        """
        return host in ([f"{name}:{self.server_port}"] for name in (_HOST, "localhost"))

    def part_of(self, path: str) -> str | None:
        """What a request's path asks for: "" is the page; None if it lacks the token."""
        given, slash, rest = path.removeprefix("/").partition("/")
        known = hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._token.encode())
        return rest if known and slash and path.startswith("/") else None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own; one too many is closed at once."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection in this thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error to show among the lines of a job."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _PATIENCE

    def do_GET(self) -> None:
        if not self.server.knows(self.headers.get_all("Host", [])):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"This address is not known here.\n")
            return
        part = self.server.part_of(self.path)
        if part == "":
            page = self.server.run.page(_EVENTS).encode("utf-8", "replace")
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page)
        elif part == _EVENTS:
            self._stream()
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing at this address.\n")

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._head(status, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        """Sends the blocks of the page that have changed, until the server or the browser ends."""
        clock = self.server.run.clock
        sent: dict[str, str] | None = None
        self._head(HTTPStatus.OK, "text/event-stream")
        last = clock.now()
        while not self.server.ended.is_set():
            blocks: dict[str, str] = {**self.server.run.blocks()}
            if blocks != sent:
                changed = {name: html for name, html in blocks.items() if (sent or {}).get(name) != html}
                self._tell("data: " + json.dumps({"blocks": changed, "order": list(blocks)}))
                sent, last = blocks, clock.now()
            elif clock.now() - last >= _SILENCE:
                self._tell(":")
                last = clock.now()
            clock.sleep(INTERVAL)

    def _tell(self, line: str) -> None:
        self.wfile.write(f"{line}\n\n".encode())

    def version_string(self) -> str:
        """What the `Server` header says: no versions."""
        return "dtrain"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they hold the token."""
