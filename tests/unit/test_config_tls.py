"""Settings of TLS: where they come from, and what they become."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluicemq.cli.output import resolve_tls
from sluicemq.cli.servers.serve import make_name_server_config
from sluicemq.cli.servers.settings import load_tls_settings, read_config_file
from sluicemq.config import (
    NameServerConfig,
    load_broker_config,
    load_name_server_config,
    settings_text,
)
from sluicemq.config.keys import Part, TlsConfig
from sluicemq.config.load import key_files
from sluicemq.errors import ConfigurationError
from sluicemq.net.tls import Tls, broker_client_tls, default_tls, tls_from_environment

FILE = """\
tls.test.mode.enable=false
tls.server.need.client.auth=require
tls.server.keyPath=/etc/server.key
tls.server.keyPassword=1234
tls.server.certPath=/etc/server.pem
tls.server.authClient=true
tls.server.trustCertPath=/etc/ca.pem
tls.client.keyPath=/etc/client.key
tls.client.certPath=/etc/client.pem
tls.client.authServer=true
tls.client.trustCertPath=/etc/ca.pem
"""


def served(config: TlsConfig) -> dict[str, Any]:
    names = ("mode", "certificate", "key", "key_password", "client_auth", "ca", "test_mode")
    return {name: getattr(config, f"tls_{name}") for name in names}


def test_rocketmqs_own_file_serves_brokers_and_name_servers_without_a_warning() -> None:
    broker, _, warnings = load_broker_config(FILE, environment={})
    assert warnings == []
    assert served(broker) == served(
        TlsConfig(
            tls_certificate="/etc/server.pem",
            tls_key="/etc/server.key",
            tls_key_password="1234",
            tls_client_auth="require",
            tls_ca="/etc/ca.pem",
            tls_test_mode=False,
        )
    )
    names, _ = load_name_server_config("", environment={}, overrides=dict(part(FILE)))
    assert served(names) == served(broker)


def part(text: str) -> list[tuple[str, str]]:
    pairs = (line.partition("=")[::2] for line in text.splitlines())
    return [pair for pair in pairs if not pair[0].startswith("tls.client.")]


def test_the_tls_config_file_wins_over_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "tls.properties"
    file.write_text(FILE + "other=1\n")
    text = f"tls.config.file={file}\ntls.server.certPath=/weaker.pem\n"
    entries = load_tls_settings(text, Part.NAME_SERVER)
    assert entries == dict(part(FILE))
    names, warnings = load_name_server_config(text, overrides=entries, environment={})
    assert names.tls_certificate == "/etc/server.pem"
    assert warnings == []
    assert "tls.client.certPath" in load_tls_settings(text, Part.BROKER)
    with pytest.raises(ConfigurationError, match=r"tls\.config\.file"):
        load_tls_settings(f"tls.config.file={tmp_path}/nowhere", Part.BROKER)


def test_the_options_of_a_java_start_script_count() -> None:
    environment = {"JAVA_OPT": "-server -Dtls.server.mode=enforcing -Dtls.enable=true -Xmx1g"}
    broker, _, warnings = load_broker_config("", environment=environment)
    assert (broker.tls_mode, broker.tls_dials) == ("enforcing", "true")
    assert "clients cannot verify" in warnings[0]
    names, _ = load_name_server_config("", environment=environment)
    assert names.tls_mode == "enforcing"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tls.server.authClient=true", "Set that to require"),
        ("tls.server.mode=enforcing", "clients cannot verify"),
        ("tls.client.trustCertPath=/ca.pem", "are not verified"),
    ],
)
def test_what_is_less_safe_than_it_looks_is_a_warning(text: str, says: str) -> None:
    assert says in load_broker_config(text, environment={})[2][0]


def test_a_broker_dials_with_tls_when_it_enforces_it_or_is_told_to() -> None:
    def dials(text: str) -> Tls | None:
        return broker_client_tls(load_broker_config(text, environment={})[0])

    assert dials("") is None
    assert dials("tls.server.mode=enforcing") == Tls(verify=False)
    assert dials("tls.server.mode=enforcing\nuseTLS=false") is None
    assert dials("useTLS=true\ntls.client.authServer=true\ntls.client.trustCertPath=/ca.pem") == (
        Tls(ca="/ca.pem", verify="ca")
    )


def test_the_name_server_of_sluice_up_has_the_brokers_tls() -> None:
    broker, store, _ = load_broker_config(FILE, environment={})
    assert served(make_name_server_config(broker, store, 9876)) == served(broker)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_with_a_password_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(FILE)
    path.chmod(mode)
    assert read_config_file(str(path)) == FILE
    path.write_text("tls.server.keyPassword=\n")
    read_config_file(str(path))
    assert len(caplog.messages) == (mode == 0o644)


def test_private_keys_are_where_the_settings_say() -> None:
    broker, _, _ = load_broker_config(FILE, environment={})
    assert key_files(broker) == ["/etc/server.key", "/etc/client.key"]
    broker, _, _ = load_broker_config("tls.server.certPath=/etc/both.pem", environment={})
    assert key_files(broker) == ["/etc/both.pem"]
    assert key_files(NameServerConfig()) == []


def test_passwords_are_shown_to_nobody() -> None:
    text = FILE + "tls.client.keyPassword=1234\n"
    broker, store, _ = load_broker_config(text, environment={})
    configs = {Part.BROKER: broker, Part.STORE: store}
    shown = settings_text(configs, configs) + repr(broker) + repr(broker_client_tls(broker))
    shown += repr(Tls(certificate="c", key_password="1234"))
    assert "1234" not in shown


@pytest.mark.parametrize(
    ("environment", "tls"),
    [
        ({}, None),
        ({"SLUICE_TLS": "false", "SLUICE_TLS_CA": "/ca"}, None),
        ({"SLUICE_TLS": "true"}, Tls()),
        ({"SLUICE_TLS_CA": "/ca"}, Tls(ca="/ca")),
        (
            {"SLUICE_TLS_CERTIFICATE": "/c", "SLUICE_TLS_KEY": "/k", "SLUICE_TLS_VERIFY": "ca"},
            Tls(certificate="/c", key="/k", verify="ca"),
        ),
    ],
)
def test_the_environment(environment: dict[str, str], tls: Tls | None) -> None:
    assert tls_from_environment(environment) == tls


@pytest.mark.parametrize("environment", [{"SLUICE_TLS": "maybe"}, {"SLUICE_TLS_VERIFY": "perhaps"}])
def test_a_wrong_word_in_the_environment_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(environment))):
        tls_from_environment({"SLUICE_TLS_CA": "/ca"} | environment)


def test_what_tls_may_be_given_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLUICE_TLS", raising=False)
    assert (Tls.resolve(None), Tls.resolve(False), Tls.resolve(True)) == (None, None, Tls())
    assert Tls(ca=tmp_path).ca == str(tmp_path)
    with default_tls(Tls(ca="/ca")):
        assert Tls.resolve(None) == Tls(ca="/ca")
        assert Tls.resolve(False) is None
    monkeypatch.setenv("SLUICE_TLS", "true")
    assert Tls.resolve(None) == Tls()
    with default_tls(None):
        assert Tls.resolve(None) is None
    for wrong in ("yes", 1, {}):
        with pytest.raises(ConfigurationError, match="tls must be"):
            Tls.resolve(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="without its certificate"):
        Tls(key="/k")
    with pytest.raises(ConfigurationError, match="verify"):
        Tls(verify="maybe")  # type: ignore[arg-type]


def test_options_of_a_command_come_on_top_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resolve_tls(None, {}, None) is None
    assert resolve_tls(True, {}, "none") == Tls(verify=False)
    monkeypatch.setenv("SLUICE_TLS_CA", "/ca")
    monkeypatch.setenv("SLUICE_TLS_VERIFY", "ca")
    wanted = dataclasses.replace(Tls(ca="/ca", verify="ca"), certificate="/c", key="/k")
    assert resolve_tls(None, {"certificate": "/c", "key": "/k"}, None) == wanted
    assert resolve_tls(False, {}, None) is None
