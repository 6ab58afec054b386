"""Compares the output of RocketMQ's mqadmin with a Java broker and with SluiceMQ.

Each call of the script in `peer/mqadmin.py` must print the same lines and columns and have the same
exit code, unless a table there declares the difference and its reason (docs/mqadmin.md).

The releases 5.3.3 and 4.9.7 (in place of 4.9.8) run with SLUICEMQ_TESTS=all, each against a broker
of its own release and against SluiceMQ.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from peer import clusters, mqadmin
from peer.mqadmin import COMMANDS, Outcome
from peer.toolchain import MissingTool

from thorough import ALL

RELEASES = {"5.3.3": "client-5.3.3", "4.9.7": "client-acl-4.9.7"}
NAMES = {"brokerName": "broker-a", "brokerClusterName": "DefaultCluster"}


def ours(directory: Path, release: str) -> dict[str, Outcome]:
    directory.mkdir()
    with clusters.sluice_cluster(directory, **NAMES) as cluster:
        driver = mqadmin.tool(release, directory)
        try:
            return mqadmin.played(driver, cluster, directory)
        finally:
            driver.close()


def java(directory: Path, release: str, client: str) -> dict[str, Outcome]:
    directory.mkdir()
    with clusters.rocketmq_cluster(directory, release=release) as cluster:
        driver = mqadmin.tool(client, directory)
        try:
            return mqadmin.played(driver, cluster, directory)
        finally:
            driver.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_what_differs_is_explained(tmp_path: Path) -> None:
    try:
        mqadmin.tool("client-5.5.0", tmp_path).close()  # compiled once, before both use it
        with ThreadPoolExecutor() as pool:
            theirs = pool.submit(java, tmp_path / "java", "5.5.0", "client-5.5.0")
            own = pool.submit(ours, tmp_path / "ours", "client-5.5.0")
            expected, outcomes = theirs.result(), own.result()
    except MissingTool as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))
    found = {line: mqadmin.differs(line, expected[line], outcomes[line]) for line in COMMANDS}
    assert not {line: texts for line, texts in found.items() if texts is not None}


@pytest.mark.parametrize(
    ("line", "theirs", "mine", "is_excused"),
    [
        ("topicList", "Tscript\nTstatic", "Tscript", True),
        ("topicList", "Tscript\nTother", "Tscript", False),
        ("clusterList", "broker-a V5_5_0 0", "broker-a V5_3_3 0", True),
        ("clusterList", "broker-a V5_5_0 0", "broker-a V5_3_3 1", False),
        ("brokerStatus -b {broker}", "a : 1\nruns : 2", "own : 3\na : 1", True),
        ("brokerStatus -b {broker}", "a : 1", "a : 2", False),
        ("topicRoute -t Tscript", "a", "b", False),
        ("listUser -b {broker}", "a", "x CODE: 3 DESC: Use accounts.", True),
        ("listUser -b {broker}", "a", "x CODE: 1 DESC: null", False),
    ],
)
def test_an_explanation_covers_what_it_names(
    line: str, theirs: str, mine: str, is_excused: bool
) -> None:
    found = mqadmin.differs(line, Outcome(theirs, 0), Outcome(mine, 0))
    assert (found is None) is is_excused
    assert mqadmin.differs(line, Outcome(theirs, 0), Outcome(mine, 1))


@pytest.mark.skipif(not ALL, reason="runs only with SLUICEMQ_TESTS=all")
@pytest.mark.parametrize("release", RELEASES)
def test_an_older_tool_prints_the_same_as_with_a_broker_of_its_release(
    tmp_path: Path, release: str
) -> None:
    outcomes = ours(tmp_path / "ours", RELEASES[release])
    expected = java(tmp_path / "java", release, RELEASES[release])
    found = {
        line: mqadmin.differs(line, expected[line], outcomes[line], release) for line in COMMANDS
    }
    assert not {line: texts for line, texts in found.items() if texts is not None}
    assert '"readQueueNums"' in outcomes["topicRoute -t Tscript"].text.replace(" ", "")
