"""Test `sluice up` with access control.

Its name server also requires signatures, and its own processes sign without configuration.
"""

import http.cookiejar
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Processes
from sluicemq import PermissionDeniedError
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import RequestError
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.grpc import CallError
from sluicemq.proxy import fetch_proxy_status
from sluicemq.wire.frames import Command
from sluicemq.wire.signature import sign_command
from waiting import limit

OPERATOR = ("operator", "secret-of-operator")
WRITER = ("writer12", "secret-of-writer")
RULES = f"""\
accounts:
- accessKey: {WRITER[0]}
  secretKey: {WRITER[1]}
  topicPerms: [T=PUB|SUB]
- accessKey: {OPERATOR[0]}
  secretKey: {OPERATOR[1]}
  admin: true
"""
TABLE = {
    "topicConfigSerializeWrapper": {
        "topicConfigTable": {
            "T": {
                "topicName": "T", "readQueueNums": 8, "writeQueueNums": 8, "perm": 6,
                "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False,
            }
        },
        "dataVersion": {"timestamp": 1, "counter": 99},
    },
    "filterServerList": [],
}  # fmt: skip
REGISTRATION = {
    "brokerName": "evil", "brokerAddr": "127.0.0.1:36999", "clusterName": "DefaultCluster",
    "haServerAddr": "127.0.0.1:36998", "brokerId": "0", "compressed": "false", "bodyCrc32": "0",
}  # fmt: skip
ATTACKS = {
    103: (REGISTRATION, json.dumps(TABLE).encode()),
    205: ({"brokerName": "broker-a"}, b""),
    216: ({"topic": "T"}, b""),
    100: ({"namespace": "x", "key": "k", "value": "v"}, b""),
    104: ({**REGISTRATION, "brokerName": "broker-a"}, b""),
    318: ({}, b"needWaitForService=true"),
    105: ({"topic": "T"}, b""),
    206: ({}, b""),
}
"""Requests of a client without an account to a name server: code -> fields and body."""


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


def ask(
    address: str, code: int, fields: dict[str, str], body: bytes, account: tuple[str, str] | None
) -> Command:
    command = Command(code, fields, body)
    if account is not None:
        sign_command(command, *account)
    channel = BlockingChannel(address, 10.0)
    try:
        return channel.call(command)
    finally:
        channel.close()


def started(
    processes: Processes, directory: Path, *options: str
) -> tuple[int, dict[str, str], str]:
    """Return the process id, the words of the `ready` line, and the line itself."""
    rules = directory / "plain_acl.yml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    file = directory / "broker.conf"
    file.write_text("aclEnable = true\nmappedFileSizeCommitLog = 8388608\n")
    process, line = processes.ready(
        "up", "-c", str(file), "--store", str(directory / "store"), "--nameserver-port", "0",
        "--broker-port", "0", "--metrics-port", "0", *options,
    )  # fmt: skip
    assert line.startswith("ready "), line
    words = dict(word.partition("=")[::2] for word in line.split())
    return process.pid, words, line


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def is_sealed_and_works(words: dict[str, str], brokers: int) -> None:
    """Check that requests without an account are refused and that accounts work as usual."""
    names = words["nameserver"]
    with Admin(names, credentials=OPERATOR) as admin:
        assert len(admin.masters()) == brokers
        admin.create_topic("T", queues=2)
        before = admin.route("T")
        for account in (None, ("nobody12", "no-secret")):
            for code, (fields, body) in ATTACKS.items():
                answer = ask(names, code, fields, body, account)
                assert answer.code == 1, (code, answer)
                assert "AclException" in (answer.remark or "")
        assert admin.route("T") == before
    with Admin(names) as stranger, pytest.raises((PermissionDeniedError, RequestError)):
        stranger.route("T")
    with Producer(names, credentials=WRITER) as producer:
        assert producer.send("T", b"x").queue_offset >= 0
    # A broker with an admin account, as a Java broker signs, is let in.
    answer = ask(names, 103, {**REGISTRATION, "brokerName": "java"}, ATTACKS[103][1], OPERATOR)
    assert answer.code == 0, answer
    assert ask(names, 103, REGISTRATION, ATTACKS[103][1], WRITER).code == 1


def secret_is_nowhere(pid: int, directory: Path, line: str) -> None:
    """Check that the inner account is in no command line, no file and no output."""
    found = set()
    for child in children_of(pid):
        environment = Path(f"/proc/{child}/environ").read_text()
        found |= set(re.findall(r'"secretKey": "([^"]+)"', environment))
        found |= set(re.findall(r"SLUICE_SECRET_KEY=([^\0]+)", environment))
    for secret in found:
        assert secret not in line
        for process in (pid, *children_of(pid)):
            assert secret not in Path(f"/proc/{process}/cmdline").read_text()
        for path in directory.rglob("*"):
            if path.is_file() and path.stat().st_size < 1 << 20:
                assert secret.encode() not in path.read_bytes(), path
    assert len(found) <= 1


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks at processes in /proc")  # noqa: PTH110
def test_up_in_one_process(processes: Processes, tmp_path: Path) -> None:
    pid, words, line = started(processes, tmp_path, "--proxy-port", "0", "--console")
    is_sealed_and_works(words, 1)
    assert fetch_proxy_status(words["proxy"], OPERATOR)["mode"] == "local"
    secret_is_nowhere(pid, tmp_path, line)
    opener = urllib.request.build_opener(
        urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    )
    link = line.split("console=", 1)[1].split()[0]
    opener.open(link, timeout=limit(20)).read()
    base = link.partition("?")[0].rstrip("/")
    root = "/".join(base.split("/")[:3])
    shown = opener.open(f"{root}/topics", timeout=limit(20)).read().decode()
    assert ">T<" in shown


def test_up_with_brokers_and_their_proxy(processes: Processes, tmp_path: Path) -> None:
    pid, words, line = started(processes, tmp_path, "--proxy-port", "0", "--brokers", "2")
    is_sealed_and_works(words, 2)
    assert len(children_of(pid)) == 3, "two brokers and a proxy"
    secret_is_nowhere(pid, tmp_path, line)
    assert fetch_proxy_status(words["proxy"], OPERATOR)["mode"] == "cluster"
    with pytest.raises(CallError, match="UNAUTHORIZED"):
        fetch_proxy_status(words["proxy"], None)


@pytest.mark.slow
def test_up_with_replicas(processes: Processes, tmp_path: Path) -> None:
    pid, words, line = started(processes, tmp_path, "--replicas", "2", "--no-proxy")
    is_sealed_and_works(words, 1)
    secret_is_nowhere(pid, tmp_path, line)
