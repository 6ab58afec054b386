"""Test how client commands end: the exit code of each failure, Ctrl-C, and a closed pipe.

The commands are processes. What they print about their progress must be what the brokers store.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from waiting import limit, wait_for

SOURCE = Path(__file__).parents[3] / "src"
MANY = "100000000"
ID = "7F0000010001D41A00000BD5A5F30000"


@pytest.fixture
def sluice(cluster):
    def run(*arguments, **options):
        environment = {"NAMESRV_ADDR": ";".join(cluster.addresses)}
        return CliRunner().invoke(main, list(arguments), env=environment, **options)

    return run


@pytest.fixture
def start(cluster):
    """Return a function that starts a command as a process that Ctrl-C reaches."""
    started = []

    def run(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "sluicemq", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE),
                 "NAMESRV_ADDR": ";".join(cluster.addresses)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def interrupt(process):
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=limit(60))
    return process.returncode, out, errors


def held(cluster, topic):
    with Admin(cluster.addresses) as admin:
        return sum(stats.offset_max for stats in admin.topic_offsets(topic).values())


def filled(cluster, topic, count):
    with Admin(cluster.addresses) as admin:
        admin.create_topic(topic, queues=2)
    with Producer(cluster.addresses) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number)


# ------------------------------------------------------------------------------- exit codes


ENDS = [
    ("topic show ordres", 1, "Did you mean 'orders'?"),
    ("topic update ordres", 1, "Did you mean 'orders'?"),
    ("topic delete ordres --yes", 1, "Did you mean 'orders'?"),
    ("topic delete orders", 1, "not confirmed"),
    ("topic create a/b", 1, "'/'"),
    ("topic create t --attribute k", 2, "KEY=VALUE"),
    ("topic create t --perm 5", 2, "--perm"),
    ("consume ordres", 1, "Did you mean 'orders'?"),
    ("consume orders --from abc", 2, "'abc'"),
    ("consume orders --where a>>", 1, "is not allowed here"),
    ("consume", 2, "TOPIC"),
    ("produce orders", 2, "BODY"),
    ("produce orders x -p foo", 2, "NAME=VALUE"),
    ("produce orders x --delay soon", 2, "--delay"),
    ("produce orders x --delay-level 99", 1, "from 0 to 18"),
    ("produce orders --file /nonexistent", 2, "/nonexistent"),
    ("filter test a>5 -t ordres", 1, "Did you mean 'orders'?"),
    ("filter test a>5 -t orders --since soon", 2, "'soon'"),
    ("filter eval /nonexistent", 2, "/nonexistent"),
    ("group show biling", 1, "Did you mean 'billing'?"),
    ("group lag biling", 1, "Did you mean 'billing'?"),
    ("group delete biling --yes", 1, "Did you mean 'billing'?"),
    ("group delete billing", 1, "not confirmed"),
    ("group reset biling -t orders --to latest", 1, "Did you mean 'billing'?"),
    ("group reset billing -t orders --to soon", 2, "'soon'"),
    ("group update billing --contract none", 2, "--contract"),
    ("group update billing", 2, "--contract"),
    ("consumer list biling", 1, "Did you mean 'billing'?"),
    ("explain group biling", 1, ""),
    ("doctor --topic ordres", 1, ""),
    (f"message show {ID}", 1, ID),
    ("message query -t ordres -k x", 1, "Did you mean 'orders'?"),
    ("message query -t orders -k x --begin soon", 2, "'soon'"),
    ("trace show x", 1, "traceTopicEnable"),
    ("delay cancel x", 1, "no message with key x"),
    ("transaction resolve x --commit", 1, "no broker has"),
    ("transaction resolve x", 2, "--commit"),
    ("cluster show broker-x", 1, "broker-a"),
    ("cluster switch", 1, "no master"),
    ("cluster elect 2 --yes", 2, "--unclean"),
    ("acl check --topic t --file /nonexistent", 1, "/nonexistent"),
    ("acl check", 2, "--topic"),
    ("store info /nonexistent", 1, "/nonexistent"),
    ("store verify /nonexistent", 2, "/nonexistent"),
    ("store dump /nonexistent --offsets x", 2, "not a range"),
    ("pipeline run /nonexistent", 1, "/nonexistent"),
    ("pipeline run /nonexistent --conf x", 2, "KEY=VALUE"),
    ("sql --since soon x", 2, "'soon'"),
    ("sql --format parquet x", 2, "--output"),
    ("install-names /dev/null/x", 1, "/dev/null"),
    ("topic list -n 127.0.0.1:1", 1, "127.0.0.1:1"),
    ("topic list --tls-ca /nonexistent", 2, "--tls-ca"),
    ("produce orders x -n 127.0.0.1:1", 1, "127.0.0.1:1"),
    ("consume orders -n 127.0.0.1:1", 1, "127.0.0.1:1"),
    ("proxy status 127.0.0.1:1", 1, "127.0.0.1:1"),
    ("up --brokers 99", 2, "--brokers"),
    ("up --metrics-port 70000", 2, "--metrics-port"),
    ("broker -c /nonexistent", 1, "/nonexistent"),
]


def test_each_failure_has_its_exit_code_and_one_sentence(sluice, cluster):
    filled(cluster, "orders", 1)
    assert sluice("group", "create", "billing").exit_code == 0
    wrong = []
    for words, code, said in ENDS:
        result = sluice(*words.split())
        is_told = said in result.stderr and ("sluice: " in result.stderr or not said)
        if result.exit_code != code or not is_told or "Traceback" in result.output:
            wrong.append((words, result.exit_code, result.output))
    assert not wrong


def test_group_delete_deletes_what_its_options_name(sluice, cluster):
    filled(cluster, "orders", 4)
    consume = ("consume", "orders", "--group", "billing", "--timeout", "0.3", "--json")
    assert len(sluice(*consume).stdout.splitlines()) == 4
    result = sluice("group", "delete", "billing", input="y\n")
    assert result.exit_code == 0
    assert "Group billing is deleted on broker-a: its settings." in result.stdout
    with Admin(cluster.addresses) as admin:
        assert "billing" not in admin.groups()
        assert "%RETRY%billing" in admin.topics()
    assert sluice(*consume).stdout == "", "its offsets are there"
    result = sluice("group", "delete", "billing", "--offsets", "--topics", "--yes", "--json")
    assert json.loads(result.stdout) == {
        "group": "billing", "deleted": True, "brokers": ["broker-a"]
    }  # fmt: skip
    with Admin(cluster.addresses) as admin:
        assert "%RETRY%billing" not in admin.topics()
    assert sluice("group", "delete", "billing", "--yes").exit_code == 1
    assert len(sluice(*consume).stdout.splitlines()) == 4, "it begins anew"


# ------------------------------------------------------------------------------------ Ctrl-C


def test_an_interrupted_produce_prints_how_many_messages_are_stored(start, cluster):
    filled(cluster, "t", 0)
    process = start("produce", "t", "no {}", "--count", MANY)
    wait_for(lambda: held(cluster, "t") > 2000)
    code, out, errors = interrupt(process)
    assert (code, errors) == (
        130, f"sluice: interrupted: {held(cluster, 't'):,} messages stored in t.\n"
    )  # fmt: skip
    assert len(out.splitlines()) == 10


def test_lines_of_a_pipe_are_sent_at_once_until_ctrl_c(start, cluster):
    filled(cluster, "t", 0)
    process = start("produce", "t", "-", "--json")
    process.stdin.write("a\nb\nc\nhalf a li")
    process.stdin.flush()
    wait_for(lambda: held(cluster, "t") == 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(limit(60)) == 130
    assert process.stderr.read() == "sluice: interrupted: 3 messages stored in t.\n"
    assert len(process.stdout.read().splitlines()) == 3


def test_a_failed_produce_prints_how_many_messages_are_stored(sluice, cluster, tmp_path):
    filled(cluster, "t", 0)
    lines = tmp_path / "lines"
    lines.write_text("good\n" + "x" * 5_000_000 + "\n")
    result = sluice("produce", "t", "--file", str(lines))
    assert (result.exit_code, held(cluster, "t")) == (1, 1)
    assert result.stdout.endswith("1 messages stored in t.\n")


def test_consume_commits_exactly_the_printed_messages(start, cluster):
    filled(cluster, "t", 300)
    process = start("consume", "t", "--group", "g")
    lines = [process.stdout.readline() for _ in range(300)]
    assert all(lines)
    code, out, errors = interrupt(process)
    assert (code, out, errors) == (0, "", "300 messages.\n")
    with Admin(cluster.addresses) as admin:
        assert sum(one.committed for one in admin.progress("g") if one.queue.topic == "t") == 300


@pytest.mark.parametrize("words", [("produce", "t", "x", "--count", MANY, "--json"),
                                   ("consume", "t", "--json")])  # fmt: skip
def test_a_closed_pipe_ends_the_command(start, cluster, words):
    filled(cluster, "t", 1000)
    process = start(*words)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(limit(60)) == 141
    assert process.stderr.read() == ""


def test_an_interrupted_change_may_have_been_made(sluice, cluster, monkeypatch):
    filled(cluster, "t", 1)
    assert sluice("group", "create", "g").exit_code == 0

    def asked(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Admin, "reset_offsets", asked)
    reset = ("group", "reset", "g", "-t", "t", "--to", "latest")
    result = sluice(*reset)
    assert (result.exit_code, "`sluice group show g` shows it" in result.stderr) == (130, True)
    assert sluice(*reset, "--dry-run").exit_code == 0
