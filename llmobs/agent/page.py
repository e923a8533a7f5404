"""The agent's HTTP page: Prometheus text or OpenMetrics on /metrics, finished requests as JSON."""

import errno
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http.server import ThreadingHTTPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from llmobs.agent.collect import RunCollector
from llmobs.agent.run import Run
from llmobs.metrics import PHASES

log = logging.getLogger("llmobs.agent")

PORTS_TRIED = 100
FRESH_SECONDS = 0.25


class _Server(ThreadingHTTPServer, WSGIServer):
    """Threads, so that one slow scraper does not hold up another."""

    daemon_threads = True
    # SO_REUSEPORT and the like would let two servers share a port without a word.
    allow_reuse_address = True
    request_queue_size = 64

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # No descriptor is left: the connection still waits, and to try again at once would take
            # a whole core until there is one.
            time.sleep(0.1)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The default writes a traceback of each client that left early, into a log without end.
        log.debug("a request to the page failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = 10
    """Seconds that a client may be silent."""

    def log_message(self, *_: Any) -> None:
        pass


class _Rendered:
    """The metrics in one format, rendered a few times a second at most however many scrape: the
    agent's CPU is the server's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._lock = threading.Lock()
        self._cache: dict[tuple[str, bool], tuple[float, bytes]] = {}

    def answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        encode, content_type = choose_encoder(environ.get("HTTP_ACCEPT", ""))
        zipped = "gzip" in environ.get("HTTP_ACCEPT_ENCODING", "")
        with self._lock:
            made, body = self._cache.get((content_type, zipped), (-FRESH_SECONDS, b""))
            if time.monotonic() - made >= FRESH_SECONDS:
                body = encode(self.registry)
                body = gzip.compress(body, 1) if zipped else body
                self._cache[content_type, zipped] = time.monotonic(), body
        headers = [("Content-Type", content_type)]
        headers += [("Content-Encoding", "gzip")] if zipped else []
        start_response("200 OK", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _application(run: Run, registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    families = CollectorRegistry()
    families.register(RunCollector(run, openmetrics=True))
    text, openmetrics = _Rendered(registry), _Rendered(families)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/metrics":
            wanted = environ.get("HTTP_ACCEPT", "")
            metrics = openmetrics if "application/openmetrics-text" in wanted else text
            return metrics.answer(environ, start_response)
        if path == "/requests":
            run.poll()
            with run.lock:
                finished = [request._asdict() for request in run.requests.finished]
            body = json.dumps({"phases": PHASES, "requests": finished}).encode()
            start_response("200 OK", [("Content-Type", "application/json")])
            return [body]
        if path == "/families":
            content = [
                (f.name, f.documentation, f.type, [tuple(sample)[:5] for sample in f.samples])
                for f in families.collect()
                if f.name != "target_info"  # OpenTelemetry's own page has its own
            ]
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(content).encode()]
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"llmobs: /metrics (Prometheus), /requests (JSON)\n"]

    return application


def _serve(server: _Server) -> None:
    while True:
        try:
            server.serve_forever()
        except Exception:  # no memory just now, for example
            log.warning("the page failed, and goes on", exc_info=True)
            time.sleep(1)


def serve(run: Run, registry: CollectorRegistry, host: str, port: int) -> tuple[str, int]:
    """Serve on the port, or on the next free one (0: any); returns the address.

    Raises OSError if the host is none of this machine's or no port is free.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class Server(_Server):
        address_family = family

    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        try:
            server = Server((str(address[0]), candidate), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        server.set_app(_application(run, registry))
        threading.Thread(target=_serve, args=[server], name="page", daemon=True).start()
        return str(address[0]), int(server.server_address[1])
    raise OSError(errno.EADDRINUSE, f"no free port from {port} to {port + PORTS_TRIED - 1}")
