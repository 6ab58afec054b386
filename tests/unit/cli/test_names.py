"""Test the scripts with RocketMQ's command names that `sluice install-names` writes."""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.cli.servers import names
from sluicemq.cli.servers.names import NAMES
from waiting import limit


def test_scripts_are_installed_again_but_never_replace_other_files(tmp_path: Path) -> None:
    for _ in range(2):
        result = CliRunner().invoke(main, ["install-names", str(tmp_path / "bin")])
        assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "bin").iterdir()} == set(NAMES)
    (tmp_path / "bin" / "mqbroker").write_text("#!/bin/sh\nexec java\n")
    result = CliRunner().invoke(main, ["install-names", str(tmp_path / "bin")])
    assert result.exit_code == 1
    assert "mqbroker exist" in result.output
    assert "--force" in result.output
    assert (tmp_path / "bin" / "mqbroker").read_text() == "#!/bin/sh\nexec java\n"


def test_a_script_accepts_rocketmqs_flags(tmp_path: Path) -> None:
    CliRunner().invoke(main, ["install-names", str(tmp_path)])
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerName=b-7\n")
    told = subprocess.run(
        ["sh", str(tmp_path / "mqbroker"), "-c", str(conf), "-p"],
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=True,
    )
    assert "brokerName=b-7\n" in told.stdout
    nobody = subprocess.run(
        ["sh", str(tmp_path / "mqshutdown"), "proxy"],
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert nobody.returncode == 255
    assert nobody.stdout.splitlines()[0] == "No mqproxy running."


PYTHON = "/venv/bin/python -m sluicemq.cli.servers.names"


def test_find_servers_returns_the_directory_of_each_server() -> None:
    listed = "\n".join(
        [
            f"  11 {PYTHON} mqnamesrv --installation=/opt/a/bin -c conf",
            f"  12 {PYTHON} mqnamesrv --installation=/opt/a/bin2",
            f"  13 {PYTHON} mqnamesrv --installation=/opt/a%20b/bin",
            f"  14 {PYTHON} mqnamesrv -c --installation=/opt/a/bin",
            f"  15 {PYTHON} mqnamesrv",
            f"  16 {PYTHON} mqbroker --installation=/opt/a/bin",
            f"  17 {PYTHON} mqshutdown --installation=/opt/a/bin namesrv",
            "  18 grep sluicemq.cli.servers.names",
            "  19 sluice nameserver",
        ]
    )
    assert names.find_servers(listed, "mqnamesrv") == {
        11: "/opt/a/bin",
        12: "/opt/a/bin2",
        13: "/opt/a b/bin",
        14: "",
        15: "",
    }


def test_mqshutdown_does_not_stop_servers_of_another_directory(tmp_path: Path) -> None:
    conf = tmp_path / "namesrv.conf"
    conf.write_text("listenPort=0\nbindAddress=127.0.0.1\nmetricsExporterType=DISABLE\n")
    environment = os.environ | {"HOME": str(tmp_path)}

    def shut_down(one: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(one / "mqshutdown"), "namesrv"],
            capture_output=True,
            text=True,
            timeout=limit(60),
            check=False,
            env=environment,
        )

    directories = [tmp_path / "one dir", tmp_path / "one"]
    servers = []
    with contextlib.ExitStack() as stack:
        for one in directories:
            CliRunner().invoke(main, ["install-names", str(one)])
            server = subprocess.Popen(
                ["sh", str(one / "mqnamesrv"), "-c", str(conf)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            stack.enter_context(server)
            stack.callback(server.kill)
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready ")
            servers.append(server)
        first, second = servers
        told = shut_down(directories[0])
        assert (told.returncode, str(first.pid) in told.stdout) == (0, True)
        assert str(second.pid) not in told.stdout
        assert first.wait(limit(60)) == 0
        assert second.poll() is None
        again = shut_down(directories[0])
        assert again.returncode == 255
        assert again.stdout.startswith("No mqnamesrv running.\nNot stopped, from other directories")
        assert f"{second.pid} ({directories[1]})" in again.stdout
        shut_down(directories[1])
        assert second.wait(limit(60)) == 0


def test_an_error_of_a_script_is_one_sentence(tmp_path: Path) -> None:
    CliRunner().invoke(main, ["install-names", str(tmp_path)])
    told = subprocess.run(
        ["sh", str(tmp_path / "mqnamesrv"), "-p", "-c", str(tmp_path / "missing.conf")],
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert told.returncode == 1
    assert "missing.conf cannot be read" in told.stderr
    assert "Traceback" not in told.stderr


# ------------------------------------------------------------- no option is ignored silently


def outcome(command: click.Command, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the server command that a script would run, its output and its exit code."""
    ran: list[list[str]] = []

    def serve(_name: str, words: list[str]) -> None:
        ran.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(names, "_run_server", serve)
    result = CliRunner().invoke(command, words)
    return ran, result.output, result.exit_code, repr(result.exception)


def options_of(command: click.Command) -> list[click.Option]:
    return [it for it in command.params if isinstance(it, click.Option)]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command in (names.mqnamesrv, names.mqbroker, names.mqproxy)
        for option in options_of(command)
    ],
    ids=lambda it: str(it.name),
)
def test_every_option_has_an_effect_or_a_warning(
    command: click.Command, option: click.Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "some.conf"
    conf.write_text("{}" if "proxy" in str(option.name) else "listenPort=1234\n")
    value = {"mode": "local", "name_servers": "a:9876"}.get(str(option.name), str(conf))
    words = [option.opts[0], *([] if option.is_flag else [value])]
    assert outcome(command, words, monkeypatch) != outcome(command, [], monkeypatch)


def test_an_option_without_effect_prints_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    _, output, code, _ = outcome(names.mqnamesrv, ["-n", "a:9876"], monkeypatch)
    assert (output, code) == (
        "warning: -n a:9876 has no effect: name servers do not know each other.\n",
        0,
    )
    ran, output, _, _ = outcome(names.mqproxy, ["-bc", "broker.conf"], monkeypatch)
    assert ran == [["proxy"]]
    assert output.startswith("warning: -bc broker.conf has no effect with -pm cluster")


def test_the_configuration_file_of_the_proxy_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, *_ = outcome(names.mqbroker, ["--enable-proxy", "-pc", "p.json"], monkeypatch)
    assert ran == [["broker", "--enable-proxy", "--proxy-config", "p.json"]]
    ran, *_ = outcome(names.mqproxy, ["-pm", "local", "-pc", "p.json"], monkeypatch)
    assert ran == [["broker", "--enable-proxy", "--proxy-config", "p.json"]]
    ran, _, _, error = outcome(names.mqbroker, ["-pc", "p.json"], monkeypatch)
    assert ran == []
    assert "-pc p.json configures a proxy, but no proxy is started. Add --enable-proxy" in error


def test_printed_settings_contain_the_name_servers_of_the_command_line() -> None:
    result = CliRunner().invoke(names.mqbroker, ["-n", "a:9876", "-p"])
    assert "namesrvAddr=a:9876\n" in result.stdout
