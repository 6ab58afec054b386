"""TLS and plain connections on one port, over sockets, on the loops of asyncio and uvloop."""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from certificates import Authority, Certificate
from sluicemq.config.keys import TlsConfig
from sluicemq.errors import ConfigurationError, ConnectionLostError
from sluicemq.net import openssl
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.channel import dial
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import ServerLimits
from sluicemq.net.network import SOCKET_NETWORK, with_tls
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.net.selfsigned import make_self_signed_pem
from sluicemq.net.server import Connection, RemotingServer
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Command, encode
from waiting import limit, until

pytestmark = pytest.mark.slow

BIG = os.urandom(3 << 20)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "Somebody else")


@pytest.fixture(scope="session")
def server_certificate(authority: Authority) -> Certificate:
    return authority.issue("broker", ["127.0.0.1", "localhost"])


@pytest.fixture
def settings(server_certificate: Certificate) -> TlsConfig:
    return TlsConfig(tls_certificate=server_certificate.path, tls_key=server_certificate.key_path)


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    def run_it(coroutine: Any) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(coroutine, limit(30)))

    return run_it


def echo(command: Command, _: Peer) -> Command:
    return Command(0, {"size": str(len(command.body))}, bytes(command.body))


@contextlib.asynccontextmanager
async def serving(settings: TlsConfig | None, **options: Any) -> AsyncIterator[RemotingServer]:
    door = None if settings is None else TlsAcceptor(settings)
    server = RemotingServer(Dispatcher({10: echo}), tls=door, **options)
    await server.start("127.0.0.1", [0])
    try:
        yield server
    finally:
        await server.close()


def address(server: RemotingServer) -> str:
    return f"127.0.0.1:{server.ports[0]}"


async def echoed(server: RemotingServer, tls: Tls | None, body: bytes = b"x") -> None:
    channel = await dial(address(server), tls=tls)
    try:
        answer = await channel.call(Command(10, {}, body), 5)
        assert bytes(answer.body) == body
    finally:
        await channel.close()


def plain_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# ------------------------------------------------------------------------------- both on a port


def test_tls_and_plain_clients_share_a_permissive_port(
    run: Any, settings: TlsConfig, authority: Authority
) -> None:
    async def check() -> None:
        async with serving(settings) as server:
            tls = Tls(ca=authority.path)
            await asyncio.gather(
                *(echoed(server, chosen, BIG) for chosen in (tls, None, tls, None)),
                *(echoed(server, chosen) for chosen in (tls, None)),
            )
            assert server.tls is not None
            assert server.tls.completed_handshakes == 3
            await until(lambda: not server.peers)

    run(check())


def test_a_plain_connection_has_no_object_of_tls(run: Any, settings: TlsConfig) -> None:
    async def check() -> None:
        async with serving(settings) as server:
            channel = await dial(address(server))
            await channel.call(Command(10, {}, b"1"), 5)
            (connection,) = server._connections.values()
            assert type(connection._transport.get_protocol()) is Connection
            await channel.close()

    run(check())


def test_a_handshake_in_single_bytes_and_frames_right_behind_it(
    run: Any, settings: TlsConfig
) -> None:
    """Bytes that were read before TLS began are not lost, however they are divided."""

    async def check() -> None:
        async with serving(settings) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = plain_context().wrap_bio(incoming, outgoing)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    for byte in outgoing.read():
                        writer.write(bytes((byte,)))
                        await asyncio.sleep(0)
                    incoming.write(await reader.read(65536))
            # The client's last part of the handshake travels with forty frames.
            for opaque in range(40):
                tls.write(encode(Command(10, {}, b"body", opaque=opaque)))
            writer.write(outgoing.read())
            heard = b""
            while heard.count(b"body") < 40:
                incoming.write(await reader.read(65536))
                with contextlib.suppress(ssl.SSLWantReadError):
                    while True:
                        heard += tls.read(65536)
            writer.close()

    run(check())


def test_an_enforcing_port_closes_plain_connections_and_says_so(
    run: Any, settings: TlsConfig, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(replace(settings, tls_mode="enforcing")) as server:
            await echoed(server, Tls(ca=authority.path))
            with pytest.raises(ConnectionLostError, match=r"tls=True \(.*--tls-ca FILE\)"):
                await echoed(server, None)
            await asyncio.to_thread(blocking_plain_is_refused, address(server))

    run(check())
    assert "does not use TLS" in caplog.text


def blocking_plain_is_refused(where: str) -> None:
    with (
        closing(BlockingChannel(where)) as channel,
        pytest.raises(ConnectionLostError, match="tls=True"),
    ):
        channel.call(Command(10, {}, b""))


def test_a_port_without_tls_refuses_it_and_both_sides_say_why(
    run: Any, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(None) as server:
            with pytest.raises(ConnectionLostError, match=r"TLS handshake.*tls.server.mode"):
                await dial(address(server), tls=Tls(ca=authority.path))

    run(check())
    assert "Turn TLS off" in caplog.text


def test_the_blocking_channel_speaks_tls(settings: TlsConfig, authority: Authority) -> None:
    with served(settings) as server:
        where = address(server)
        with closing(BlockingChannel(where, tls=Tls(ca=authority.path))) as channel:
            for body in (b"x", BIG, b"y"):
                assert bytes(channel.call(Command(10, {}, body)).body) == body
        with pytest.raises(ConnectionLostError, match="was rejected: unable to get"):
            BlockingChannel(where, tls=Tls(ca=None))


@contextlib.contextmanager
def served(settings: TlsConfig) -> Iterator[RemotingServer]:
    """Serve on the event loop of another thread, and yield the server."""
    loop = asyncio.new_event_loop()
    server: list[RemotingServer] = []
    ready, stop = threading.Event(), asyncio.Event()

    async def live() -> None:
        async with serving(settings) as made:
            server.append(made)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(live()))
    thread.start()
    assert ready.wait(limit(10))
    try:
        yield server[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(limit(10))
        loop.close()


# ----------------------------------------------------------------------------------- who is who


@pytest.mark.parametrize(
    ("make", "host", "says", "fix"),
    [
        (lambda one, other: Tls(ca=other.path), "127.0.0.1", "unable to get", "Set ca"),
        (lambda one, other: Tls(), "127.0.0.1", "self.signed|unable to get", "ca"),
        (lambda one, other: Tls(ca=one.path), "127.0.0.2", "IP address mismatch", "server_name"),
        (
            lambda one, other: Tls(ca=one.path, server_name="x.example"),
            "127.0.0.1",
            "Hostname mismatch",
            "server_name",
        ),
    ],
    ids=["wrong authority", "system authorities", "another address", "another name"],
)
def test_a_certificate_that_is_not_trusted_is_an_error_with_its_cure(
    run: Any,
    settings: TlsConfig,
    authority: Authority,
    stranger: Authority,
    make: Callable[[Authority, Authority], Tls],
    host: str,
    says: str,
    fix: str,
) -> None:
    async def check() -> None:
        async with serving(settings) as server:
            server_address = f"{host}:{server.ports[0]}"
            if host == "127.0.0.2":  # Linux answers on all of 127.0.0.0/8 only when bound there
                await server.start(host, [0])
                server_address = f"{host}:{server.ports[0]}"
            with pytest.raises(ConnectionLostError, match=says) as caught:
                await dial(server_address, tls=make(authority, stranger))
            assert fix in caught.value.fix
            await dialled(server_address, Tls(ca=authority.path, verify="ca"))
            await dialled(server_address, Tls(verify=False))
            await dialled(server_address, Tls(ca=authority.path, server_name="localhost"))

    run(check())


async def dialled(where: str, tls: Tls) -> None:
    channel = await dial(where, tls=tls)
    assert (await channel.call(Command(10, {}, b""), 5)).code == 0
    await channel.close()


def test_an_expired_certificate_is_an_error_with_its_cure(run: Any, authority: Authority) -> None:
    old = authority.issue("old", ["127.0.0.1"], days=-1)

    async def check() -> None:
        async with serving(TlsConfig(tls_certificate=old.path, tls_key=old.key_path)) as server:
            with pytest.raises(ConnectionLostError, match="expired") as caught:
                await dial(address(server), tls=Tls(ca=authority.path))
            assert "new one" in caught.value.fix

    run(check())


def test_mutual_tls_lets_in_whom_the_authority_knows_and_nobody_else(
    run: Any,
    settings: TlsConfig,
    authority: Authority,
    stranger: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, foreign = authority.issue("client"), stranger.issue("client")
    mutual = replace(settings, tls_client_auth="require", tls_ca=authority.path)

    def client(certificate: Certificate | None) -> Tls:
        if certificate is None:
            return Tls(ca=authority.path)
        return Tls(ca=authority.path, certificate=certificate.path, key=certificate.key_path)

    async def check() -> None:
        async with serving(mutual) as server:
            await echoed(server, client(mine))
            for certificate in (None, foreign):
                with pytest.raises(
                    ConnectionLostError, match="refused the TLS handshake"
                ) as caught:
                    await echoed(server, client(certificate))
                assert "certificate" in caught.value.fix
            await asyncio.to_thread(blocking_without_certificate, address(server), client(None))
        async with serving(replace(mutual, tls_client_auth="optional")) as server:
            await echoed(server, client(None))
            await echoed(server, client(mine))
            with pytest.raises(ConnectionLostError):
                await echoed(server, client(foreign))

    run(check())
    assert "peer did not return a certificate" in caplog.text
    assert "the certificate of the client was rejected" in caplog.text


def blocking_without_certificate(where: str, tls: Tls) -> None:
    with (
        pytest.raises(ConnectionLostError, match="refused the TLS handshake"),
        closing(BlockingChannel(where, tls=tls)) as channel,
    ):
        channel.call(Command(10, {}, b""))


def test_a_key_with_a_password(run: Any, authority: Authority) -> None:
    locked = authority.issue("locked", ["127.0.0.1"], password="open sesame")
    right = TlsConfig(
        tls_certificate=locked.path, tls_key=locked.key_path, tls_key_password="open sesame"
    )
    assert "sesame" not in repr(right)

    async def check() -> None:
        async with serving(right) as server:
            await echoed(server, Tls(ca=authority.path))
        for wrong in ("", "another"):
            with pytest.raises(ConfigurationError, match="password"):
                async with serving(replace(right, tls_key_password=wrong)):
                    pass

    run(check())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tls_certificate": "/nowhere.pem"}, "/nowhere.pem does not exist"),
        ({"tls_certificate": "nowhere.pem"}, f"{Path.cwd()}/nowhere.pem does not exist"),
        ({"tls_key": "/nowhere.key"}, "/nowhere.key does not exist"),
        ({"tls_client_auth": "require"}, "trustCertPath"),
        ({"tls_client_auth": "require", "tls_ca": "/nowhere.ca"}, "/nowhere.ca does not exist"),
        (
            {"tls_mode": "enforcing", "tls_certificate": "", "tls_key": "", "tls_test_mode": False},
            "certPath",
        ),
    ],
)
def test_settings_that_cannot_hold_refuse_the_start(
    settings: TlsConfig, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        openssl.load_server_context(replace(settings, **change))


def test_a_key_of_another_certificate_refuses_the_start(
    settings: TlsConfig, authority: Authority, tmp_path: Path
) -> None:
    other = authority.issue("other")
    with pytest.raises(ConfigurationError, match="another certificate"):
        openssl.load_server_context(replace(settings, tls_key=other.key_path))
    text = tmp_path / "text.pem"
    text.write_text("this is no certificate")
    with pytest.raises(ConfigurationError, match="PEM"):
        openssl.load_server_context(replace(settings, tls_certificate=str(text)))


# ------------------------------------------------------------------------------------ test mode


def test_without_a_certificate_test_mode_makes_one_and_warns(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(TlsConfig()) as server:
            await asyncio.gather(*(echoed(server, Tls(verify=False)) for _ in range(5)))
            await echoed(server, None)
            with pytest.raises(ConnectionLostError, match=r"self.signed") as caught:
                await echoed(server, Tls())
            assert "test mode" in caught.value.fix

    run(check())
    assert caplog.text.count("UNSAFE") == 1


def test_without_certificate_and_test_mode_tls_is_refused(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(TlsConfig(tls_test_mode=False)) as server:
            with pytest.raises(ConnectionLostError, match="TLS handshake"):
                await echoed(server, Tls(verify=False))
            await echoed(server, None)

    run(check())
    assert "the server has no certificate" in caplog.text


def test_without_a_place_for_the_certificate_test_mode_says_what_to_do(
    run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")

    async def check() -> None:
        async with serving(TlsConfig()) as server:
            with pytest.raises(ConnectionLostError):
                await echoed(server, Tls(verify=False))
            await echoed(server, None)

    run(check())
    assert "TMPDIR to a writable directory, or set tls.server.certPath" in caplog.text


def test_what_is_made_is_a_certificate_to_others_too(tmp_path: Path) -> None:
    made = [make_self_signed_pem(), make_self_signed_pem()]
    assert made[0] != made[1]
    path = tmp_path / "made.pem"
    path.write_text(made[0])
    for words in (f"verify -check_ss_sig -CAfile {path} {path}", f"ec -in {path} -check -noout"):
        found = subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
        assert b"OK" in found.stdout or b"valid" in found.stderr


# --------------------------------------------------------------------------------------- reload


def test_a_new_certificate_is_in_force_while_old_connections_live(
    run: Any, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    paths = [str(tmp_path / "server.pem"), str(tmp_path / "server.key")]
    first, second = (one.issue("broker", ["127.0.0.1"]) for one in (authority, stranger))
    put(first, paths)

    async def check() -> None:
        async with serving(TlsConfig(tls_certificate=paths[0], tls_key=paths[1])) as server:
            channel = await dial(address(server), tls=Tls(ca=authority.path))
            await channel.call(Command(10, {}, b"1"), 5)
            watched = server.tls._reloading  # type: ignore[union-attr]
            assert watched is not None
            put(second, paths)
            await until(lambda: watched.loads == 2)
            await echoed(server, Tls(ca=stranger.path))
            with pytest.raises(ConnectionLostError):
                await echoed(server, Tls(ca=authority.path))
            answer = await channel.call(Command(10, {}, BIG), 5)
            assert bytes(answer.body) == BIG
            await channel.close()

    run(check())


def put(certificate: Certificate, paths: list[str]) -> None:
    for source, target in zip(certificate, paths, strict=True):
        shutil.copy(source, f"{target}.new")
        Path(f"{target}.new").replace(target)


def test_half_a_change_and_a_wrong_one_leave_the_old_certificate_in_force(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    paths = [str(tmp_path / "server.pem"), str(tmp_path / "server.key")]
    first, second = (authority.issue(name, ["127.0.0.1"]) for name in ("first", "second"))
    put(first, paths)
    watched = openssl.load_server_context(TlsConfig(tls_certificate=paths[0], tls_key=paths[1]))
    assert watched is not None
    old = watched.context
    assert watched.reload_if_changed() is old
    shutil.copy(second.path, paths[0])  # the key follows later
    assert watched.reload_if_changed() is old
    shutil.copy(second.key_path, paths[1])
    assert watched.reload_if_changed() is old, "it has been at rest for no look"
    new = watched.reload_if_changed()
    assert new is not old
    assert "ERROR" not in caplog.text
    Path(paths[0]).write_text("rubbish")
    for _ in range(5):
        assert watched.reload_if_changed() is new
    assert caplog.text.count("the previous files stay in use") == 1
    Path(paths[0]).unlink()
    for _ in range(3):
        assert watched.reload_if_changed() is new
    put(first, paths)
    assert [watched.reload_if_changed() is new, watched.reload_if_changed() is new] == [True, False]


def test_a_client_reads_its_files_again_when_they_change(
    run: Any, settings: TlsConfig, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "ca.pem"
    shutil.copy(stranger.path, path)

    async def check() -> None:
        async with serving(settings) as server:
            with pytest.raises(ConnectionLostError):
                await echoed(server, Tls(ca=path))
            shutil.copy(authority.path, path)
            await echoed(server, Tls(ca=path))

    run(check())


# --------------------------------------------------------------------------------------- limits


def test_a_slow_handshake_is_closed(
    run: Any,
    settings: TlsConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openssl, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def check() -> None:
        async with serving(settings) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            writer.write(b"\x16\x03\x01")
            assert await reader.read() == b""
            assert server.tls is not None
            assert server.tls.open_handshakes == 0
            await until(lambda: not server.peers)
            writer.close()

    run(check())
    assert "was not finished within 0.2 s" in caplog.text


def test_unfinished_handshakes_are_bounded_and_do_not_hold_up_others(
    run: Any,
    settings: TlsConfig,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openssl, "HANDSHAKES_MAX", 8)
    monkeypatch.setattr(openssl, "HANDSHAKE_TIMEOUT_S", 1)

    async def check() -> None:
        async with serving(settings) as server:
            pairs = [await asyncio.open_connection("127.0.0.1", server.ports[0]) for _ in range(20)]
            for _, writer in pairs:
                writer.write(b"\x16\x03\x01\x02")
            door = server.tls
            assert door is not None
            await until(lambda: door.failed_handshakes == 12)
            assert door.open_handshakes == 8
            await echoed(server, None)  # plain connections are not affected
            await until(lambda: door.open_handshakes == 0)
            await echoed(server, Tls(ca=authority.path))
            for _, writer in pairs:
                writer.close()

    run(check())
    assert "8 TLS handshakes are unfinished, which is the limit" in caplog.text


def test_one_address_may_not_take_all_handshakes(
    run: Any,
    settings: TlsConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = openssl.AddressLimit
    monkeypatch.setattr(openssl, "AddressLimit", lambda count: crowd(count, lambda address: False))
    monkeypatch.setattr(openssl, "HANDSHAKES_PER_ADDRESS_MAX", 2)

    async def check() -> None:
        async with serving(settings) as server:
            pairs = [await asyncio.open_connection("127.0.0.1", server.ports[0]) for _ in range(5)]
            for _, writer in pairs:
                writer.write(b"\x16\x03\x01\x02")
            door = server.tls
            assert door is not None
            await until(lambda: door.failed_handshakes == 3)
            for _, writer in pairs:
                writer.close()
            await until(lambda: door.open_handshakes == 0)

    run(check())
    assert "2 TLS handshakes of its address" in caplog.text


def test_a_handshake_that_never_ends_is_bounded_in_bytes(run: Any, settings: TlsConfig) -> None:
    """A client that sends fragments of a 16 MB ClientHello is stopped by OpenSSL or the limit."""

    async def check() -> None:
        async with serving(settings) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            fragment = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + bytes(16380)
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    writer.write(fragment)
                    await writer.drain()
                    await asyncio.sleep(0)
                while await reader.read(65536):
                    pass
            await until(lambda: not server.peers)
            writer.close()

    run(check())


def test_rubbish_after_the_first_byte_closes_the_connection(
    run: Any, settings: TlsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(settings) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.ports[0])
            writer.write(b"\x16" + b"rubbish" * 10)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            await until(lambda: not server.peers)
            writer.close()

    run(check())
    assert "TLS handshake failed" in caplog.text


def test_a_stream_that_is_tampered_with_is_closed(
    run: Any, settings: TlsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(settings) as server:
            raw = socket.create_connection(("127.0.0.1", server.ports[0]))
            secure = await asyncio.to_thread(plain_context().wrap_socket, raw)
            await until(lambda: server.tls is not None and server.tls.completed_handshakes == 1)
            os.write(secure.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
            await until(lambda: not server.peers)
            secure.close()

    run(check())
    assert "its TLS stream is broken" in caplog.text


def test_a_client_that_does_not_read_is_not_read_from_either(
    run: Any, settings: TlsConfig, authority: Authority
) -> None:
    """Flow control passes through TLS, so many requests without reading use bounded memory."""

    async def check() -> None:
        async with serving(settings, limits=ServerLimits(write_buffer_bytes_max=65536)) as server:
            channel = await dial(address(server), tls=Tls(ca=authority.path))
            transport: Any = channel._transport
            transport.pause_reading()
            calls = [asyncio.create_task(channel.call(Command(10, {}, BIG), 20)) for _ in range(12)]
            (connection,) = server._connections.values()
            await until(lambda: connection._is_writing_paused)
            transport.resume_reading()
            for answer in await asyncio.gather(*calls):
                assert bytes(answer.body) == BIG
            await channel.close()

    run(check())


def test_a_turn_of_the_loop_computes_few_handshakes(run: Any, settings: TlsConfig) -> None:
    """So a thousand clients that connect at once do not stop the connected ones."""

    async def check() -> None:
        door = TlsAcceptor(settings)
        door.start()
        turn, steps = 0, []

        class Stream:
            def step(self) -> None:
                steps.append(turn)

        streams: list[Any] = [Stream() for _ in range(9)]
        for stream in (*streams, *streams):  # scheduled twice, one step
            door.schedule_step(stream)
        for turn in range(1, 9):  # noqa: B007 - `step` reads it
            await asyncio.sleep(0)
        assert len(steps) == 9
        assert max(steps.count(number) for number in steps) == openssl.HANDSHAKES_PER_ITERATION
        door.close()

    run(check())


def test_disabled_serves_plain_connections_only(run: Any, settings: TlsConfig) -> None:
    async def check() -> None:
        network = with_tls(SOCKET_NETWORK, None, replace(settings, tls_mode="disabled"))
        listener: Any = network.listener(Dispatcher({10: echo}))
        await listener.start("127.0.0.1", [0])
        await echoed(listener, None)
        with pytest.raises(ConnectionLostError, match="TLS handshake"):
            await echoed(listener, Tls(verify=False))
        await listener.close()

    run(check())
