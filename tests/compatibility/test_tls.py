"""TLS between ours and RocketMQ's own: the Java clients against our enforcing servers, with mutual
TLS and with the certificate of test mode; our clients against the real broker 5.3.3.

Ours enforces, so that nothing can travel plainly unnoticed; the real one is permissive (the tests'
own probe speaks plainly) and our client demands its authority's certificate.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from peer.clusters import Cluster, rocketmq_cluster, sluice_cluster, write_properties
from peer.drivers import JVM_FLAGS, Driver, DriverFailedError, java_driver, python_driver
from peer.names import own

from certificates import Authority, Certificate
from conftest import missing_tool_is_a_reason
from sluicemq.client.aio.sluice import Sluice
from sluicemq.errors import SluiceError
from sluicemq.net.tls import Tls

JAVA = ["java-5.3.3", pytest.param("java-4.9.8", marks=pytest.mark.thorough)]
PYTHON = ["aio", "sync"]


class Papers:
    """Who shows what: an authority, a server, a client, and somebody else's authority."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "authority")
        self.stranger = Authority(directory / "stranger", "Somebody else")
        self.server = self.authority.issue("server", ["127.0.0.1"], kind="rsa")
        self.client = self.authority.issue("client")

    def java(self, client: Certificate | None, ca: str | None = None) -> tuple[str, ...]:
        flags = [
            "-Dtls.enable=true",
            "-Dtls.test.mode.enable=false",
            "-Dtls.client.authServer=true",
            f"-Dtls.client.trustCertPath={ca or self.authority.path}",
        ]
        if client is not None:
            flags.append(f"-Dtls.client.certPath={client.path}")
            flags.append(f"-Dtls.client.keyPath={client.key_path}")
        return (*JVM_FLAGS, *flags)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def ours(papers: Papers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Mutual TLS on every port; the settings stand in the file that Java would read too."""
    directory = tmp_path_factory.mktemp("ours")
    file = write_properties(
        directory / "tls.properties",
        {
            "tls.test.mode.enable": "false",
            "tls.server.certPath": papers.server.path,
            "tls.server.keyPath": papers.server.key_path,
            "tls.server.need.client.auth": "require",
            "tls.server.authClient": "true",
            "tls.server.trustCertPath": papers.authority.path,
            "tls.client.authServer": "true",
            "tls.client.trustCertPath": papers.authority.path,
            "tls.client.certPath": papers.client.path,
            "tls.client.keyPath": papers.client.key_path,
        },
    )
    settings = {"tls.config.file": str(file), "tls.server.mode": "enforcing"}
    with sluice_cluster(directory, **settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def real(papers: Papers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("real")
    file = write_properties(
        directory / "tls.properties",
        {
            "tls.test.mode.enable": "false",
            "tls.server.certPath": papers.server.path,
            "tls.server.keyPath": papers.server.key_path,
            "tls.server.need.client.auth": "optional",
            "tls.server.authClient": "true",
            "tls.server.trustCertPath": papers.authority.path,
        },
    )
    with pytest.MonkeyPatch.context() as patch, missing_tool_is_a_reason():
        patch.setenv("JAVA_TOOL_OPTIONS", f"-Dtls.config.file={file}")
        cluster = rocketmq_cluster(directory)
        running = cluster.__enter__()
    try:
        yield running
    finally:
        cluster.__exit__(None, None, None)


@contextlib.contextmanager
def java(client: str, directory: Path, flags: tuple[str, ...]) -> Iterator[Driver]:
    with missing_tool_is_a_reason():
        driver = java_driver(client.replace("java", "client"), directory, flags=flags)
    try:
        yield driver
    finally:
        driver.close()


def works(call: Callable[..., list[dict[str, object]]], topic: str, *, push: bool = True) -> None:
    """Sends of three kinds and, with `push`, a group that gets each message once."""
    sent = []
    for mode in ("sync", "batch"):
        sent += call("send", topic=topic, mode=mode, count=20, prefix=mode, size=5000)
    assert len(sent) == 40
    if push:
        got = call("push", topic=topic, group=own(f"G_{topic}"), tag="*", expect=40, timeout_s=40)
        bodies = [event["body"] for event in got if event["event"] == "got"]
        assert sorted(bodies) == sorted(event["body"] for event in sent)  # type: ignore[type-var]


@pytest.mark.parametrize("client", JAVA)
def test_java_clients_with_a_certificate_against_our_enforcing_servers(
    client: str, ours: Cluster, papers: Papers, tmp_path: Path
) -> None:
    with java(client, tmp_path, papers.java(papers.client)) as driver:
        works(partial(driver.call, ns=ours.name_server), own(f"T_{client}").replace(".", "_"))


def test_a_java_client_without_certificate_or_tls_gets_nowhere(
    ours: Cluster, papers: Papers, tmp_path: Path
) -> None:
    for flags in (papers.java(None), JVM_FLAGS):
        with (
            java("java-5.3.3", tmp_path, flags) as driver,
            pytest.raises(DriverFailedError, match=r"(?i)route|connect|failed"),
        ):
            driver.call("send", ns=ours.name_server, topic=own("T_nobody"), mode="sync", count=1)


@pytest.mark.thorough
def test_a_java_client_refuses_our_server_when_it_trusts_somebody_else(
    ours: Cluster, papers: Papers, tmp_path: Path
) -> None:
    flags = papers.java(papers.client, papers.stranger.path)
    with (
        java("java-5.3.3", tmp_path, flags) as driver,
        pytest.raises(DriverFailedError, match=r"(?i)route|connect|failed"),
    ):
        driver.call("send", ns=ours.name_server, topic=own("T_stranger"), mode="sync", count=1)


@pytest.mark.parametrize("client", JAVA)
def test_java_clients_with_nothing_but_use_tls_against_our_test_mode(
    client: str, tmp_path: Path
) -> None:
    """RocketMQ's defaults on both sides: any certificate will do."""
    with (
        sluice_cluster(tmp_path, **{"tls.server.mode": "enforcing"}) as cluster,
        java(client, tmp_path, (*JVM_FLAGS, "-Dtls.enable=true")) as driver,
    ):
        works(partial(driver.call, ns=cluster.name_server), own("T_test_mode"))
    assert "UNSAFE" in (tmp_path / "sluice.log").read_text()


@pytest.mark.parametrize("client", PYTHON)
def test_our_clients_verify_the_real_servers(
    client: str, real: Cluster, papers: Papers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_TLS_CA", papers.authority.path)
    monkeypatch.setenv("SLUICE_TLS_CERTIFICATE", papers.client.path)
    monkeypatch.setenv("SLUICE_TLS_KEY", papers.client.key_path)
    driver = python_driver(client, tmp_path)
    try:
        call = partial(driver.call, ns=real.name_server)
        works(call, own(f"T_python_{client}"), push=client == "aio")
    finally:
        driver.close()


@pytest.mark.thorough
def test_our_client_refuses_the_real_server_when_it_trusts_somebody_else(
    real: Cluster, papers: Papers
) -> None:
    async def send(tls: Tls) -> None:
        async with Sluice(real.name_server, tls=tls) as mq:
            await mq.send(own("T_python_refuses"), b"x")

    asyncio.run(send(Tls(ca=papers.authority.path)))
    with pytest.raises(SluiceError, match="was rejected: unable to get local issuer"):
        asyncio.run(send(Tls(ca=papers.stranger.path)))


@pytest.mark.thorough
def test_our_client_speaks_tls_to_the_real_test_mode(tmp_path: Path) -> None:
    """The real servers as they are when nothing is set."""

    async def send(tls: Tls) -> None:
        async with Sluice(cluster.name_server, tls=tls) as mq:
            await mq.send(own("T_default"), b"x")

    with missing_tool_is_a_reason():
        started = rocketmq_cluster(tmp_path)
        cluster = started.__enter__()
    try:
        asyncio.run(send(Tls(verify=False)))
        with pytest.raises(SluiceError, match="certificate"):
            asyncio.run(send(Tls()))
    finally:
        started.__exit__(None, None, None)
