"""Which ports a path really has, by connector: only what is hurt there can be judged there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from chaos.paths import asked_end, data_end, registered, side_channel
from pdgate.facts.model import UnknownFact
from tests.build import engine

WORKERS = {"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://127.0.0.1:41001"}, "1": {"0": "tcp://127.0.0.1:41002"}}}}


@pytest.fixture
def bootstrap() -> Iterator[HTTPServer]:
    """A bootstrap server that answers what stands in its `says`."""

    class Query(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(self.server.says).encode())  # type: ignore[attr-defined]

        def log_message(self, *words: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Query)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_behind_a_bootstrap_server_the_side_channel_is_where_its_workers_listen(bootstrap: HTTPServer) -> None:
    bootstrap.says = WORKERS  # type: ignore[attr-defined]
    port = bootstrap.server_address[1]
    assert side_channel(engine("p0", connector="MooncakeConnector", address="127.0.0.1", kv_port=port)) == [41001, 41002]
    assert side_channel(engine("p0", connector="NixlConnector", kv_port=5600)) == [5600]


@pytest.mark.parametrize("says", [{}, [], {"0": {}}, {"0": {"worker_addr": {"0": "tcp://"}}}, None])
def test_a_bootstrap_server_that_names_no_worker_leaves_the_side_channel_unknown(bootstrap: HTTPServer, says: object) -> None:
    bootstrap.says = says  # type: ignore[attr-defined]
    with pytest.raises(UnknownFact, match=r"127\.0\.0\.1"):
        registered(f"http://127.0.0.1:{bootstrap.server_address[1]}/query")


def test_a_bootstrap_server_that_is_gone_leaves_the_side_channel_unknown() -> None:
    with pytest.raises(UnknownFact, match="does not say"):
        registered("http://127.0.0.1:9/query")


@pytest.mark.parametrize(("connector", "end"), [("MooncakeConnectorV1", "p0"), ("NixlConnector", "p0"), ("MooncakeConnector", "d0"), ("MooncakeLayerwiseConnector", "d0")])
def test_kv_connections_come_to_the_side_that_does_not_move_it(connector: str, end: str) -> None:
    p, d = engine("p0", connector=connector), engine("d0", role="decode", connector=connector)
    assert data_end([p], [d])[0].name == end


@pytest.mark.parametrize(("connector", "end"), [("MooncakeConnectorV1", "p0"), ("MooncakeLayerwiseConnector", "d0")])
def test_the_side_channel_is_that_of_the_side_that_is_asked(connector: str, end: str) -> None:
    assert asked_end([engine("p0", connector=connector)], [engine("d0", role="decode", connector=connector)]).name == end
