"""Compares `sluice mqadmin` with RocketMQ's mqadmin 5.5.0.

Both run the script of `peer.mqadmin`, each against a SluiceMQ cluster of its own. Every difference
must be listed in EXPLAINED with its reason. RocketMQ's tool takes three seconds for most calls, so
only the fast ones are compared, unless SLUICEMQ_TESTS=all.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from peer.clusters import Cluster, sluice_cluster
from peer.drivers import JVM_FLAGS, Driver, java_driver
from peer.mqadmin import (
    COMMANDS,
    FILES,
    GROUP,
    LEFT_OUT,
    MESSAGES,
    TOPIC,
    Places,
    normalised,
    words_of,
)
from peer.toolchain import HERE

from sluicemq.cli import main
from sluicemq.client.sync.admin import Admin
from sluicemq.mqadmin.table import COMMANDS as OURS
from thorough import ALL

QUICK = (
    "updateTopic ", "updateTopicList", "updateTopicPerm -c", "topicRoute", "updateSubGroup",
    "setConsumeMode", "queryMsgById", "queryCq", "exportConfigs", "queryMsgByOffset",
)  # fmt: skip
REFUSED = {command.name for command in OURS if command.refusal}
ONE_JVM = "the real tool calls this once in a JVM: it keeps its closed client"
NUMBERS = "counts of what was sent and how long it took"
EXPLAINED = {
    "updateTopic -b {broker} -t Torder -r 4 -w 4 -o true":
        "the real tool prints a stack trace because the topic has no order yet, and continues",
    "topicList": "pulls of the real tool make retry topics",
    "clusterList -m": NUMBERS,
    "brokerStatus": NUMBERS,
    "haStatus": NUMBERS,
    "checkMsgSendRT": NUMBERS,
    "sendMsgStatus": NUMBERS,
    "consumerProgress": "the consumer of the real tool knows its retry topic already; rates",
    "consumerStatus": "the same reason as for consumerProgress",
    "brokerConsumeStats": ONE_JVM,
    "queryMsgByUniqueKey": ONE_JVM,
    "consumeMessage": f"{ONE_JVM}; `sluice mqadmin` ends after the last requested message",
    "sendMessage": ONE_JVM,
    "resetOffsetByTime -g Goffline -t Tscript -s -1 -b broker-a -q 0 -o 1":
        "a name is not an address: the error texts differ",
    "queryMsgById -t Tscript -i {offset_id} -g Gscript -d 127.0.0.1@script":
        "the time that the consumer took",
    "exportPopRecord": "the text of an error",
    "producer": "the time of the last heartbeat, and the order",
    "statsAll": NUMBERS,
    **dict.fromkeys(
        ("clusterAclConfigVersion", "getAclConfig", "updateAclConfig", "deleteAclConfig",
         "updateGlobalWhiteAddr"),
        "a command of 4.9.8, which 5.5.0 does not have",
    ),
}  # fmt: skip


class Run:
    """A prepared cluster, on which one of the tools runs the script."""

    def __init__(self, cluster: Cluster, driver: Driver, directory: Path) -> None:
        for name, text in FILES.items():
            (directory / name).write_text(text)
        with Admin(cluster.name_server) as admin:
            admin.create_topic(TOPIC, queues=4)
            (broker,) = admin.masters().values()
        self.driver, self.cluster, self.directory = driver, cluster, directory
        events = driver.call(
            "prepare", ns=cluster.name_server, topic=TOPIC, group=GROUP, count=MESSAGES
        )
        sent = [event for event in events if "offset_id" in event][3]
        places = cluster.name_server, broker, str(directory), sent["id"], sent["offset_id"]
        self.places = Places(*places)

    def real(self, line: str) -> tuple[int, str]:
        """Run a command of the real tool and return its exit code and output.

        The tool waits 3 to 5 s for an answer. On a slow machine that is not enough now and then,
        which says nothing about the command: run it again.
        """
        words = "\t".join(words_of(line, self.places))
        name_server = self.cluster.name_server
        for _ in range(3):
            (event,) = self.driver.call("script", ns=name_server, lines=words, limit_ms=20_000)
            if "RemotingTimeoutException" not in event["text"]:
                break
        return int(event["code"]), event["text"]

    def ours(self, line: str) -> tuple[int, str]:
        words = ["mqadmin", *words_of(line, self.places)]
        done = CliRunner().invoke(main, words, env={"NAMESRV_ADDR": self.cluster.name_server})
        assert done.exception is None or isinstance(done.exception, SystemExit), line
        return done.exit_code, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Run]]:
    made = []
    with contextlib.ExitStack() as stack:
        for kind in ("real", "ours"):
            directory = tmp_path_factory.mktemp(kind)
            cluster = stack.enter_context(sluice_cluster(directory, brokerName="broker-a"))
            source = HERE / "java" / "Mqadmin.java"
            flags = (*JVM_FLAGS, "-Djava.security.manager=allow")
            driver = java_driver("client-5.5.0", directory, source=source, flags=flags)
            stack.callback(driver.close)
            made.append(Run(cluster, driver, directory))
        yield made[0], made[1]


_SAME = [
    (r"SubCommandException: \w+", "SubCommandException: COMMAND"),
    (r"MQ(Client|Broker)Exception", "MQException"),
    (r" BROKER: \S+", ""),
    (r"\n(See|For more information|sluice: ).*", ""),
    (r"(usage: .*\n(  .*\n)*)( -.*\n|  +\S.*\n)*", "USAGE\n"),
    (r"\b[0-9A-F]{40,56}\b", "ID"),
    (r"(Port +=) +\d+", r"\1 PORT"),
]


def lines(text: str, run: Run) -> list[str]:
    """Return the lines to compare, sorted, because Java's maps have another order."""
    text = text.replace(str(run.directory), "DIRECTORY")
    for pattern, name in _SAME:
        text = re.sub(pattern, name, text)
    return sorted(normalised(text).splitlines())


def explained(line: str) -> bool:
    name = line.partition(" ")[0]
    return line in EXPLAINED or name in EXPLAINED or name in REFUSED


def test_each_command_prints_what_the_real_one_prints(runs: tuple[Run, Run]) -> None:
    theirs, own = runs
    different = {}
    for line in COMMANDS:
        if line.partition(" ")[0] in LEFT_OUT or not (ALL or line.startswith(QUICK)):
            continue
        (code, text), (own_code, own_text) = theirs.real(line), own.ours(line)
        if line.partition(" ")[0] in REFUSED:
            assert (own_code, "is not supported" in own_text) == (1, True), line
        elif (code, lines(text, theirs)) != (own_code, lines(own_text, own)):
            different[line] = (lines(text, theirs), lines(own_text, own))
    surprising = {line: both for line, both in different.items() if not explained(line)}
    assert not surprising
