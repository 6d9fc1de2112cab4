"""A broker behind TLS: a proxy with a certificate of its own ends it before a plain server."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from flowspec.client import Client
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.errors import BrokerUnreachable
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import Listen, PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.link.inbox import free_port
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.wire.keys import Keys
from tests.clients import RedisControlAndClient
from tests.toy import TARGET
from tests.toy_cluster import ToyCluster, ids_of

HOST = "127.0.0.1"
OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificate")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of this machine's address, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "made.pem", folder / "key.pem"
    names = ("-subj", "/CN=broker", "-addext", f"subjectAltName=IP:{HOST}")
    files = ("-keyout", str(key), "-out", str(made))
    kind = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    subprocess.run(
        [str(OPENSSL), "req", "-x509", *kind, *names, *files], check=True, capture_output=True
    )
    return made, key


class TlsProxy:
    """Accepts TLS connections at ``port`` and passes their bytes on to a plain server."""

    def __init__(self, certificate: tuple[Path, Path], behind: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)
        self._behind = behind
        self._listening = socket.create_server((HOST, 0))
        self.port = int(self._listening.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listening.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(plain,)))
                self._threads[-1].start()

    def _serve(self, plain: socket.socket) -> None:
        with plain, suppress(OSError):
            near = self._context.wrap_socket(plain, server_side=True)
            with near, socket.create_connection((HOST, self._behind)) as far:
                self._open += [near, far]
                back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
                back.start()
                _pass_on(near, far)
                back.join()

    def close(self) -> None:
        """Accept no more, and end what is connected."""
        for connected in (self._listening, *self._open):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(5)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def place(certificate: tuple[Path, Path]) -> Iterator[str]:
    """``user:password@host:port`` of a broker behind TLS."""
    with PrivateBroker(listen=Listen(HOST, free_port(HOST))) as broker:
        password, _, address = broker.url.removeprefix("redis://:").partition("@")
        proxy = TlsProxy(certificate, int(address.partition(":")[2].partition("/")[0]))
        yield f":{password}@{HOST}:{proxy.port}/0"
        proxy.close()


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_a_pipeline_runs_over_tls(place: str, certificate: tuple[Path, Path], scheme: str) -> None:
    url = f"{scheme}://{place}?ssl_ca_certs={certificate[0]}"
    cluster = ToyCluster(
        lambda: RedisControlAndClient(url, Keys()),
        lambda address, holder: LiveLink(url, Keys(), address, 2, holder=holder),
        2,
    )
    try:
        ids, _, error = cluster.run(JobSpec("abcde", max_new_tokens=12))
        assert error == ""
        assert ids == TARGET.decode(ids_of("abcde"), 12, Sampling())
        with Client(url) as client:
            assert client.submit("abcde", max_new_tokens=12).result().token_ids == ids
    finally:
        cluster.stop()


def test_a_certificate_that_nobody_vouches_for_is_refused(place: str) -> None:
    with pytest.raises(BrokerUnreachable, match="certificate verify failed") as refused:
        RedisControl(f"rediss://{place}", Keys())
    assert "\n" not in str(refused.value)


def test_tls_to_a_port_without_it_says_so() -> None:
    with PrivateBroker(listen=Listen(HOST, free_port(HOST))) as broker:
        plain = broker.url.partition("://")[2]
        with pytest.raises(BrokerUnreachable, match="takes no TLS: use redis://"):
            RedisControl(f"rediss://{plain}", Keys())


def test_a_broker_behind_tls_answers_nobody_without(place: str) -> None:
    with connect(f"redis://{place}") as client, pytest.raises(redis.ConnectionError):
        client.ping()
