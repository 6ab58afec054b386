"""Test the names, stores and settings of the broker processes of `sluice up`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.cli.servers.processes import broker_names, check_root, check_settings
from sluicemq.errors import ConfigurationError


def test_broker_names_end_with_letters_and_replica_names_with_numbers() -> None:
    assert broker_names(3, None) == ["broker-a", "broker-b", "broker-c"]
    assert broker_names(None, 2) == ["broker-1", "broker-2"]
    assert broker_names(26, None)[-1] == "broker-z"
    assert broker_names(None, None) == []


@pytest.mark.parametrize(
    ("entries", "are_replicas", "said"),
    [
        ({"brokerName": "mine"}, False, "mine.conf contains brokerName = mine"),
        ({"brokerId": "1"}, False, "brokerId = 1"),
        ({"brokerRole": "SLAVE"}, False, "brokerRole = SLAVE"),
        ({"storePathCommitLog": "/log"}, False, "storePathCommitLog = /log"),
        ({"storePathCommitLog": "/log"}, True, "storePathCommitLog = /log"),
        ({"haListenPort": "10912"}, True, "haListenPort = 10912"),
    ],
)
def test_settings_that_brokers_cannot_share_are_refused(
    entries: dict[str, str], are_replicas: bool, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{said}, .* Remove it from the file"):
        check_settings(
            "mine.conf", entries, broker_names(None, 2) if are_replicas else broker_names(2, None)
        )


def test_settings_that_brokers_can_share_are_accepted() -> None:
    stock = {"brokerId": "0", "brokerRole": "ASYNC_MASTER", "fileReservedTime": "48"}
    check_settings("broker.conf", stock, broker_names(2, None))
    check_settings("broker.conf", {"brokerName": "mine"}, broker_names(None, 2))


def stores(root: Path, *names: str) -> None:
    for name in names:
        (root / name / "commitlog").mkdir(parents=True)


def test_a_store_that_would_not_be_served_is_an_error(tmp_path: Path) -> None:
    """This also applies to `sluice up` without --brokers."""
    stores(tmp_path, "broker-a", "broker-b", "broker-c", "broker-east")
    for names in (broker_names(2, None), broker_names(None, 3), []):
        with pytest.raises(ConfigurationError, match=r"broker-c\. Start with --brokers 3, or"):
            check_root(str(tmp_path), names)
    check_root(str(tmp_path), broker_names(3, None))
    check_root(str(tmp_path), broker_names(4, None))


def test_fewer_replicas_than_stores_are_allowed(tmp_path: Path) -> None:
    stores(tmp_path, "broker-1", "broker-2", "broker-3")
    check_root(str(tmp_path), broker_names(None, 2))
    for names in (broker_names(2, None), []):
        with pytest.raises(ConfigurationError, match="Start with --replicas 3, or"):
            check_root(str(tmp_path), names)


def test_the_store_of_one_broker_is_refused_for_several(tmp_path: Path) -> None:
    stores(tmp_path, ".")
    for names in (broker_names(2, None), broker_names(None, 2)):
        with pytest.raises(
            ConfigurationError, match=f"Move its content except namesrv to {tmp_path}/{names[0]}"
        ):
            check_root(str(tmp_path), names)
    stores(tmp_path, "broker-a")  # a broker of its own, started by its own command
    check_root(str(tmp_path), [])


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--brokers", "4", "--replicas", "2"], 2, "sluice broker --name … --consensus … --id …"),
        (["--brokers", "2", "--read-only"], 2, "one server for each: --store DIRECTORY/broker-a"),
        (["--replicas", "2", "--read-only"], 2, "cannot be combined"),
        (["--brokers", "27"], 2, "1<=x<=26"),
        (["--brokers", "2", "-c", "mine.conf"], 1, "mine.conf contains brokerName = mine"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(
    options: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.conf").write_text("brokerName = mine\n")
    found = CliRunner().invoke(main, ["up", *options, "--store", str(tmp_path / "store")])
    assert found.exit_code == code, found.output
    assert said in " ".join(found.output.split())
