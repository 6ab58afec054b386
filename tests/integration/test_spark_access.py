"""The Spark source on a broker with access control, and several name servers; all but the pipeline
without a JVM."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")


from pyspark_rocketmq import DefaultSource
from sluicemq.client.core.names import Credentials
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import SluiceError
from sluicemq.model.message import Message
from sluicemq.pipelines.file import parse_pipeline
from sluicemq.pipelines.run import run
from sluicemq.spark import errors
from sluicemq.spark.sources.stream import create_stream_reader
from waiting import limit

ROOT = Path(__file__).parents[2]
ACCOUNTS = """\
accounts:
  - accessKey: operator
    secretKey: operator-secret
    admin: true
  - accessKey: analyst
    secretKey: reader-secret
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - open=SUB
"""
OPERATOR = Credentials("operator", "operator-secret")


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker with the accounts above, and three messages in each of two topics."""
    directory = tmp_path_factory.mktemp("access")
    (directory / "plain_acl.yml").write_text(ACCOUNTS)
    (directory / "broker.conf").write_text("aclEnable=true\n")
    command = [
        sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port", "0",
        "--store", str(directory / "store"), "-c", str(directory / "broker.conf"),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            ready = next(line for line in server.stdout if line.startswith("ready "))
            address = dict(part.split("=", 1) for part in ready.split()[1:])["nameserver"]
            fill(address)
            yield address
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(limit(30)) == 0


def fill(name_server: str) -> None:
    with Admin(name_server, credentials=OPERATOR) as admin:
        for topic in ("open", "closed"):
            admin.create_topic(topic, queues=1)
    with Producer(name_server, credentials=OPERATOR) as producer:
        for topic in ("open", "closed"):
            producer.send_batch([
                Message(topic, str(number).encode(), keys=(f"k{number}",)) for number in range(3)
            ])  # fmt: skip


@pytest.fixture(autouse=True)
def no_hidden_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.os, "environ", dict(os.environ))


def options_of(name_server: str, **options: str) -> dict[str, str]:
    given = {"nameServers": name_server, "topic": "open", "columns": "body,keys"}
    return given | {"accessKey": "analyst", "secretKey": "reader-secret"} | options


def read(options: dict[str, str]) -> list[int]:
    source = DefaultSource(options)
    reader = source.reader(source.schema())
    blocks = [block for part in reader.partitions() for block in reader.read(part)]
    return sorted(int(body) for block in blocks for body in block.column("body").to_pylist())


def test_an_account_reads_what_it_may(name_server: str) -> None:
    assert read(options_of(name_server)) == [0, 1, 2]
    assert read(options_of(name_server, **{"filter.sql": "KEYS = 'k1'"})) == [1]


@pytest.mark.parametrize("keys", [("analyst", "reader-secret"), ("operator", "operator-secret")])
def test_a_key_is_found_with_and_without_the_right_to_ask_for_the_index(
    name_server: str, keys: tuple[str, str]
) -> None:
    options = options_of(name_server, accessKey=keys[0], secretKey=keys[1])
    options["predicates"] = json.dumps([{"is": "EqualTo", "column": "keys", "value": "k1"}])
    assert read(options) == [1]


def test_a_name_server_that_is_away_is_passed_over(name_server: str) -> None:
    assert read(options_of(name_server, nameServers=f"127.0.0.1:1;{name_server}")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"topic": "closed"}, "No default permission for topic:closed"),
        ({"secretKey": "another-secret"}, "Check signature failed"),
        ({"accessKey": "nobody"}, "nobody"),
    ],
)
def test_what_is_denied_is_said_in_the_first_line(
    name_server: str, options: dict[str, str], why: str
) -> None:
    given = options_of(name_server, **options)
    with pytest.raises(SluiceError) as caught:
        read(given)
    assert why in str(caught.value).splitlines()[0]
    assert errors.os.environ[errors.HIDE_TRACEBACK] == "1", "the text comes first, no traceback"
    stream = create_stream_reader(given, DefaultSource(given).schema())
    with pytest.raises(SluiceError, match=why):
        stream.initialOffset()
    stream.stop()


PIPELINE = """\
cluster: {nameServers: "SERVER", accessKey: "${WHO}", secretKey: "${WHO_SECRET}"}
source: {topic: TOPIC, columns: [body]}
sinks: [{kind: topic, topic: made, value: body}]
"""


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_pipeline_signs_what_it_reads_and_writes(name_server: str, spark: Any) -> None:
    """And never prints the secret, denied or not."""
    told: list[str] = []

    def attempt(topic: str, key: str, secret: str) -> Any:
        text = PIPELINE.replace("SERVER", name_server).replace("TOPIC", topic)
        pipeline, problems = parse_pipeline(text, "p.yaml", {"WHO": key, "WHO_SECRET": secret})
        assert pipeline is not None, problems
        return run(pipeline, spark, listener=lambda event: told.append(event.text))

    assert attempt("open", "operator", "operator-secret").rows == {"topic-made": 3}
    with Admin(name_server, credentials=OPERATOR) as admin:
        assert sum(admin.offset_max(queue) for queue in admin.queues("made")) == 3
    for topic, target in (("closed", "closed"), ("open", "made")):
        with pytest.raises(SluiceError) as caught:
            attempt(topic, "analyst", "reader-secret")
        assert f"topic:{target}" in str(caught.value).splitlines()[0]
        told.append(str(caught.value))
    assert "-secret" not in "\n".join(told)
