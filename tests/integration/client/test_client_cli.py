"""Test the client commands of `sluice` with servers of SluiceMQ."""

import dataclasses
import json
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer
from sluicemq.net.blocking import BlockingChannel
from sluicemq.wire.frames import Command
from waiting import limit


@pytest.fixture
def sluice(cluster):
    """Return a function that runs a command. Its result has output, stderr and exit_code."""

    def run(*arguments, **options):
        runner = CliRunner()
        environment = {"NAMESRV_ADDR": ";".join(cluster.addresses), "COLUMNS": "200"}
        return runner.invoke(main, list(arguments), env=environment, **options)

    return run


def records(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_topic_keeps_type_and_attributes_of_its_creation(sluice, cluster):
    created = sluice(
        "topic", "create", "t", "--type", "FIFO", "--attribute", "reserve.time=7"
    )  # fmt: skip
    assert created.exit_code == 0, created.output
    assert attributes_of(cluster, "t") == {"message.type": "FIFO", "reserve.time": "7"}
    assert sluice("topic", "create", "t", "-q", "9").exit_code == 0
    with Admin(cluster.addresses) as admin:
        admin.create_topic("t", type="delay")
    assert attributes_of(cluster, "t") == {"message.type": "DELAY", "reserve.time": "7"}


@pytest.mark.parametrize("command", ["create", "update"])
def test_removing_queues_with_messages_requires_force(sluice, cluster, command):
    sluice("topic", "create", "t", "-q", "4")
    with Producer(cluster.addresses) as producer, Admin(cluster.addresses) as admin:
        for queue in admin.queues("t"):
            producer.send("t", b"x", queue=queue)
    refused = sluice("topic", command, "t", "-q", "2")
    assert refused.exit_code == 1
    assert "no consumer would read 2 stored messages of topic t" in refused.stderr
    assert len(records(sluice("topic", "show", "t", "--json"))[0]["queues"]) == 4
    done = sluice("topic", command, "t", "-q", "2", "--force")
    assert done.stdout == "Topic t has 2 queues on broker-a.\n"


def test_an_attribute_is_shown_and_can_be_removed(sluice, cluster):
    sluice(
        "topic", "create", "t", "-q", "3", "-o", "--type", "FIFO", "--attribute", "reserve.time=7"
    )
    (shown,) = records(sluice("topic", "show", "t", "--json"))
    attributes = {"message.type": "FIFO", "reserve.time": "7"}
    assert shown["brokers"] == [{"broker": "broker-a", "type": "fifo", "attributes": attributes}]
    assert "Type fifo; reserve.time=7." in sluice("topic", "show", "t").output
    updated = sluice("topic", "update", "t", "--attribute", "-reserve.time")
    assert updated.stdout == "Topic t has 3 queues on broker-a.\n"
    with Admin(cluster.addresses) as admin:
        assert admin.topic_configs("t")["broker-a"].order
    assert attributes_of(cluster, "t") == {"message.type": "FIFO"}
    with Admin(cluster.addresses) as admin:
        admin.create_topic("t", attributes={"message.type": None, "reserve.time": "5"})
    assert attributes_of(cluster, "t") == {"reserve.time": "5"}
    refused = sluice("topic", "create", "t", "--attribute", "-no.such")
    assert (refused.exit_code, "no.such" in refused.stderr) == (1, True)
    for wrong in ("", "-", "=", "k=", "-k=v", "k"):
        assert sluice("topic", "create", "t", "--attribute", wrong).exit_code == 2, wrong


def attributes_of(cluster, topic):
    with Admin(cluster.addresses) as admin:
        (address,) = admin.masters().values()
    with closing(BlockingChannel(address)) as channel:
        answer = channel.call(Command(351, {"topic": topic, "lo": "true"}))
        return json.loads(bytes(answer.body))["attributes"]


def test_produced_messages_are_consumed(sluice):
    assert sluice("topic", "create", "t", "-q", "2").output == "Topic t has 2 queues on broker-a.\n"
    (sent,) = records(
        sluice("produce", "t", "hello", "--tag", "A", "--key", "k1", "--key", "k2",
               "-p", "n=5", "--json")
    )  # fmt: skip
    assert sent["status"] == "OK"
    (got,) = records(sluice("consume", "t", "--max", "1", "--json"))
    assert got["message_id"] == sent["message_id"]
    assert (got["body"], got["tag"], got["keys"]) == ("hello", "A", ["k1", "k2"])
    assert got["properties"]["n"] == "5"
    assert (got["queue_id"], got["queue_offset"]) == (sent["queue_id"], sent["queue_offset"])


def test_lines_of_stdin_and_of_a_file_are_sent_in_order(sluice, tmp_path):
    sluice("topic", "create", "t", "-q", "1")
    result = sluice("produce", "t", "-", input="".join(f"{n}\n" for n in range(1500)))
    assert "1,500 messages stored in t." in result.output
    path = tmp_path / "lines"
    path.write_bytes(b"x\ny\r\n\xff")
    assert len(records(sluice("produce", "t", "--file", str(path), "--json"))) == 3
    got = records(sluice("consume", "t", "--timeout", "0.5", "--json"))
    assert [one.get("body", one.get("body_hex")) for one in got] == [
        *map(str, range(1500)), "x", "y", "ff",
    ]  # fmt: skip


def test_a_count_numbers_the_messages(sluice):
    sluice("topic", "create", "t", "-q", "1")
    sluice("produce", "t", "no {}", "--count", "3")
    assert [one["body"] for one in records(sluice("consume", "t", "--max", "3", "--json"))] == [
        "no 0", "no 1", "no 2",
    ]  # fmt: skip


def test_filters_and_groups_of_consume(sluice):
    sluice("topic", "create", "t", "-q", "1")
    for n in range(6):
        sluice("produce", "t", str(n), "--tag", "AB"[n % 2], "-p", f"n={n}")
    consume = ("consume", "t", "--timeout", "0.5", "--json")
    assert [one["body"] for one in records(sluice(*consume, "--tags", "B"))] == ["1", "3", "5"]
    assert [one["body"] for one in records(sluice(*consume, "--where", "n > 3"))] == ["4", "5"]
    assert len(records(sluice(*consume, "--group", "g", "--max", "4"))) == 4
    assert len(records(sluice(*consume, "--group", "g"))) == 2, "the group goes on where it was"
    assert records(sluice(*consume, "--from", "last")) == []
    groups = {one["group"] for one in records(sluice("group", "list", "--json"))}
    assert groups == {"g"}, "consuming without a group leaves no trace"


def test_topics_are_listed_shown_and_deleted(sluice):
    assert sluice("topic", "list").exit_code == 0
    sluice("topic", "create", "t", "-q", "3", "--perm", "6")
    sluice("produce", "t", "x")
    assert records(sluice("topic", "list", "--json")) == [
        {
            "topic": "t",
            "brokers": 1,
            "read_queues": 3,
            "write_queues": 3,
            "permission": "read+write",
        }
    ]
    everything = {one["topic"] for one in records(sluice("topic", "list", "--all", "--json"))}
    assert {"t", "TBW102"} <= everything
    (shown,) = records(sluice("topic", "show", "t", "--json"))
    assert sum(queue["messages"] for queue in shown["queues"]) == 1
    assert "1 messages" in sluice("topic", "show", "t").output
    refused = sluice("topic", "delete", "t", input="n\n")
    assert refused.exit_code == 1
    assert records(sluice("topic", "delete", "t", "--yes", "--json")) == [
        {"topic": "t", "deleted": True}
    ]
    assert records(sluice("topic", "list", "--json")) == []


def test_a_group_is_shown_with_its_members_and_lag(sluice, cluster):
    sluice("topic", "create", "t", "-q", "2")
    with Producer(cluster.addresses) as producer:
        for _ in range(10):
            producer.send("t", b"x")
    with (
        Consumer(cluster.addresses, "t", group="g") as first,
        Consumer(cluster.addresses, "t", group="g") as second,
        Consumer(cluster.addresses, "t", group="g") as third,
    ):
        for consumer in (first, second, third):
            consumer.receive(0.3)
        (report,) = records(sluice("group", "show", "g", "--json"))
        text = sluice("group", "show", "g").output
    assert sorted(len(member["queues"]) for member in report["members"]) == [0, 1, 1]
    assert "3 members share 2 queues" in text
    assert report["lag"] == 10
    assert "3 members (1 idle). The lag is 10 messages." in text
    assert "No member of g is online" in sluice("group", "show", "g").output
    assert records(sluice("group", "create", "h", "--json")) == [
        {"group": "h", "brokers": ["broker-a"]}
    ]


def test_the_cluster_is_shown(sluice, cluster):
    (broker,) = records(sluice("cluster", "list", "--json"))
    assert broker["broker"] == "broker-a"
    assert broker["state"] == "up"
    (runtime,) = records(sluice("cluster", "show", "broker-a", "--json"))
    assert "putTps" in runtime
    assert "putTps" in sluice("cluster", "show", cluster.brokers["broker-a"].address).output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["topic", "show", "nosuch"], 1, "sluice topic create nosuch"),
        (["group", "show", "nosuch"], 1, "no broker knows the group 'nosuch'"),
        (["cluster", "show", "nosuch"], 1, "Choose one of the registered brokers: broker-a"),
        (["consume", "t", "--where", "n > 'x'"], 1, "character 5"),
        (["consume", "t", "--from", "yesterday"], 2, "2013-01-01T00:00"),
        (["produce", "t", "x", "-p", "novalue"], 2, "NAME=VALUE"),
        (["produce", "t", "x", "--tag", "a|b"], 1, "contains '|'"),
        (["produce", "t", "x", "--access-key", "only"], 1, "SLUICE_SECRET_KEY"),
        (["produce", "t"], 2, "give either BODY"),
        (["topic", "create", "t", "-q", "0"], 1, "at least 1 queue"),
        (["topic", "create", "t", "--type", "lite"], 2, "'normal', 'fifo', 'delay', 'transaction'"),
        (["topic", "create", "t", "--attribute", "foo"], 2, "KEY=VALUE"),
        (["topic", "create", "t", "--attribute", "foo=1"], 1, "unsupported key: foo"),
        (["topic", "create", "t", "--attribute", "message.type=LITE"], 1, "not in set"),
        (["topic", "list", "-n", "127.0.0.1:1"], 1, "no name server responded"),
        (["topic", "list", "-n", "host:port"], 1, "Write host:port"),
    ],
)
def test_an_error_is_one_sentence_with_its_fix(sluice, arguments, code, text):
    result = sluice(*arguments)
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.output


def test_consume_exits_0_on_a_signal_and_has_committed(cluster):
    with Producer(cluster.addresses) as producer:
        producer.send("t", b"x")
    process = subprocess.Popen(
        [sys.executable, "-c", "from sluicemq.cli import main; main()",
         "consume", "t", "--group", "g", "-n", cluster.addresses[0]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline().rstrip().endswith("x")
    process.terminate()
    _, errors = process.communicate(timeout=limit(10))
    assert process.returncode == 0, errors
    with Consumer(cluster.addresses, "t", group="g") as consumer:
        assert consumer.receive(0.5) is None


def test_messages_are_found_by_key_and_by_both_ids(sluice):
    sluice("topic", "create", "t", "-q", "2")
    sluice("topic", "create", "other", "-q", "1")
    sent = [
        records(sluice("produce", "t", f"no {n}", "--key", "k", "--key", f"k{n}", "--json"))[0]
        for n in range(3)
    ]
    sluice("produce", "other", "not this", "--key", "k")
    found = records(sluice("message", "query", "-t", "t", "-k", "k", "--json"))
    assert [one["body"] for one in found] == ["no 2", "no 1", "no 0"]
    (one,) = records(sluice("message", "query", "-t", "t", "-k", "k1", "--json"))
    assert (one["message_id"], one["keys"]) == (sent[1]["message_id"], ["k", "k1"])
    assert (
        len(records(sluice("message", "query", "-t", "t", "-k", "k", "--max", "2", "--json"))) == 2
    )
    for identity in (one["message_id"], one["offset_message_id"]):
        assert records(sluice("message", "show", identity, "--json")) == [one]
    assert records(sluice("message", "show", one["message_id"], "-t", "t", "--json")) == [one]
    shown = sluice("message", "show", one["message_id"]).output
    assert "no 1" in shown
    assert one["offset_message_id"] in shown
    assert "no 2" in sluice("message", "query", "-t", "t", "-k", "k").output


def test_a_query_by_key_reports_that_there_are_more(sluice, cluster):
    sluice("topic", "create", "t", "-q", "1")
    with Producer(cluster.addresses) as producer:
        for number in range(100):
            producer.send("t", b"%d" % number, keys="common" if number < 64 else ("common", "k"))
    query = ("message", "query", "-t", "t", "--json", "-k")
    for key, count_max, shown, is_all in (
        ("common", 64, 64, False), ("common", 100, 64, False), ("k", 64, 36, True),
        ("k", 36, 36, True), ("k", 35, 35, False),
    ):  # fmt: skip
        result = sluice(*query, key, "--max", str(count_max))
        found = records(result)
        assert len(found) == shown
        if is_all:
            assert result.stderr == ""
        else:
            oldest = found[-1]["store_time_ms"]
            assert f"There are more messages with the key {key} than these {shown}" in result.stderr
            assert f"--end {oldest}." in result.stderr


def test_messages_are_found_within_a_time_range(sluice):
    sluice("topic", "create", "t", "-q", "1")
    sluice("produce", "t", "x", "--key", "k")
    query = ("message", "query", "-t", "t", "-k", "k", "--json")
    (one,) = records(sluice(*query))
    stored = one["store_time_ms"]
    assert records(sluice(*query, "--begin", str(stored), "--end", str(stored))) == [one]
    assert records(sluice(*query, "--begin", str(stored + 1))) == []
    assert records(sluice(*query, "--end", str(stored - 1))) == []
    assert records(sluice(*query, "--begin", "2013-01-01T00:00")) == [one]


def test_a_missing_message_is_an_error_with_its_fix(sluice):
    sluice("topic", "create", "t", "-q", "1")
    result = sluice("message", "show", "7F0000010001D41A00000BD5A5F30000")
    assert result.exit_code == 1
    assert "no message with the ID '7F0000010001D41A00000BD5A5F30000' was found" in result.stderr
    result = sluice("message", "query", "-t", "t", "-k", "k")
    assert (result.exit_code, result.stderr) == (0, "No message of t has the key k.\n")
    result = sluice("message", "query", "-t", "t", "-k", "two words")
    assert (result.exit_code, "separated by spaces" in result.stderr) == (1, True)
    result = sluice("message", "query", "-t", "t", "-k", "k", "--begin", "soon")
    assert (result.exit_code, "--begin 'soon' is not a time" in result.stderr) == (2, True)
    result = sluice("message", "query", "-t", "nowhere", "-k", "k")
    assert (result.exit_code, "nowhere" in result.stderr) == (1, True)
    result = sluice("message", "query", "-t", "t", "-k", "k", "--begin", "9", "--end", "8")
    assert (result.exit_code, "Exchange the two times" in result.stderr) == (1, True)


def test_a_topic_with_strict_order_warns_about_the_name_server(sluice, cluster):
    result = sluice("topic", "create", "t", "-q", "2", "--order")
    assert result.exit_code == 0
    assert "Set orderMessageEnable=true" in result.stderr
    assert (
        cluster.name_servers[0].requests.key_values.get("ORDER_TOPIC_CONFIG", "t") == "broker-a:2"
    )
    parts = cluster.name_servers[0].requests
    parts.config = dataclasses.replace(parts.config, order_message_enable=True)
    assert sluice("topic", "create", "t", "-q", "2", "-o").stderr == ""
    assert sluice("topic", "delete", "t", "-y").exit_code == 0
    assert parts.key_values.get("ORDER_TOPIC_CONFIG", "t") is None


def test_an_update_without_order_keeps_the_order(sluice, cluster):
    sluice("topic", "create", "t", "-q", "2", "--order")
    sluice("topic", "create", "t", "-q", "2")
    key_values = cluster.name_servers[0].requests.key_values
    assert key_values.get("ORDER_TOPIC_CONFIG", "t") == "broker-a:2"
    sluice("topic", "create", "t", "-q", "2", "--no-order")
    assert key_values.get("ORDER_TOPIC_CONFIG", "t") is None


def test_cluster_wait_returns_when_a_broker_that_starts_later_responds(sluice, cluster):
    port = cluster.stop_broker()
    results = []
    waiting = threading.Thread(target=lambda: results.append(sluice("cluster", "wait", "--json")))
    waiting.start()
    cluster.start_broker(port=port)
    waiting.join(limit(20))
    assert records(results[0]) == [{"broker": "broker-a", "address": f"127.0.0.1:{port}"}]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--brokers", "2"], "1 of 2 brokers are registered"),
        (["-n", "127.0.0.1:1"], "no name server responded (127.0.0.1:1: connection refused)"),
    ],
)
def test_cluster_wait_fails_with_the_reason_at_its_timeout(sluice, cluster, options, reason):
    result = sluice("cluster", "wait", "--timeout", "0.2", *options)
    assert result.exit_code == 1
    assert f"the cluster is not ready after 0.2 s: {reason}" in result.stderr
