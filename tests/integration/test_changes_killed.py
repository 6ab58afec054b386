"""kill -9 of the real process during changes of topics, groups and settings: what was answered is
there after the next start, in the table and in RocketMQ's JSON.

SLUICEMQ_SEEDS says how many kills (default 4).
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from sluicemq.errors import SluiceError
from sluicemq.model.topic import GroupConfig
from sluicemq.net.blocking import BlockingChannel
from sluicemq.wire import tables
from sluicemq.wire.frames import Command
from thorough import seeds

KILLS = seeds(4)
NAMES = 10
SETTING = "fileReservedTime"
Changes = dict[str, int]
"""Topic, group or setting -> its number of queues, of retries, its value; 0: it is gone."""


def started(directory: Path) -> tuple[subprocess.Popen[str], str]:
    config = directory / "broker.conf"
    if not config.exists():
        config.write_text("brokerName=broker-a\nmetricsExporterType=DISABLE\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port", "0",
         "--store", str(directory / "store"), "-c", str(config)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), line
    return process, dict(part.split("=", 1) for part in line.split()[1:])["broker"]


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def change(rng: random.Random) -> tuple[str, int, Command]:
    """A random change: whose, what it is then, and the request for it."""
    number, kind = rng.randrange(1, 60), rng.random()
    name = f"Topic{rng.randrange(NAMES)}"
    if kind < 0.1:
        return name, 0, Command(215, {"topic": name})
    if kind < 0.5:
        fields = {
            "topic": name, "defaultTopic": "TBW102", "readQueueNums": str(number),
            "writeQueueNums": str(number), "perm": "6", "order": "false",
        }  # fmt: skip
        return name, number, Command(17, fields)
    if kind < 0.8:
        name = f"Group{rng.randrange(NAMES)}"
        body = tables.encode_group_config(GroupConfig(name, retry_times_max=number))
        return name, number, Command(200, {}, body)
    return SETTING, number, Command(25, {}, f"{SETTING}={number}".encode())


def changed(address: str, rng: random.Random, acknowledged: Changes) -> tuple[str, int]:
    """Changes one after the other until the connection breaks; the one without an answer."""
    with closing(BlockingChannel(address, 20.0)) as channel:
        while True:
            name, number, command = change(rng)
            try:
                answer = channel.call(command)
            except SluiceError:
                return name, number
            assert answer.code == 0, answer.remark
            acknowledged[name] = number


def found(address: str, directory: Path) -> Changes:
    """What the broker says, which its JSON says as well."""
    with closing(BlockingChannel(address, 20.0)) as channel:
        topics = tables.decode_topic_table(channel.call(Command(21, {})).body)
        groups = tables.decode_group_table(channel.call(Command(201, {})).body)
        settings = bytes(channel.call(Command(26, {})).body).decode()
    table = json.loads((directory / "store/config/topics.json").read_text())["topicConfigTable"]
    assert table.keys() == topics.topics.keys()
    values = dict(line.split("=", 1) for line in settings.splitlines() if "=" in line)
    return (
        {name: topic.write_queues for name, topic in topics.topics.items()}
        | {name: group.retry_times_max for name, group in groups.groups.items()}
        | {SETTING: int(values[SETTING])}
    )


@pytest.mark.timeout(60 + 20 * KILLS)
def test_every_change_that_was_answered_survives_a_kill(tmp_path: Path) -> None:
    rng = random.Random(1)
    acknowledged: Changes = {}
    for kill in range(KILLS):
        process, address = started(tmp_path)
        timer = threading.Timer(rng.uniform(0.01, 0.8), process.send_signal, [signal.SIGKILL])
        try:
            timer.start()
            open_name, open_number = changed(address, rng, acknowledged)
        finally:
            timer.join()
            ended(process)
        again, address = started(tmp_path)
        try:
            now = found(address, tmp_path)
        finally:
            ended(again)
        for name, number in acknowledged.items():
            allowed = {number} | ({open_number} if name == open_name else set())
            assert now.get(name, 0) in allowed, (kill, name)
        if now.get(open_name, 0) == open_number:
            acknowledged[open_name] = open_number
    assert acknowledged
