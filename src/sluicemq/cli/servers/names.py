"""RocketMQ's own command names: `mqnamesrv`, `mqbroker`, `mqproxy`, `mqadmin`, `mqshutdown`.

`sluice install-names DIR` writes five small shell scripts, so that `nohup sh bin/mqbroker -n
localhost:9876 &` goes on working, and units and scripts around it with it. Each runs this module
with its name, which makes RocketMQ's flags those of `sluice`, and with the directory, by which
`mqshutdown` tells the servers of its own scripts from those of others. Their servers log where
RocketMQ's do: to `~/logs/rocketmqlogs`, or as `conf/rmq.NAME.logback.xml` below ROCKETMQ_HOME says.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import click

from sluicemq.cli import main
from sluicemq.cli.ending import run, speaking
from sluicemq.config.keys import Part
from sluicemq.errors import ConfigurationError

MODULE: Final = "sluicemq.cli.servers.names"
LOGS: Final = "~/logs/rocketmqlogs"
LOCAL, CLUSTER = "local", "cluster"
INSTALLATION: Final = "--installation="
"""The prefix of the argument that names the directory of the scripts. The directory is
percent-encoded, because a process list shows arguments without quotes."""
_MARK: Final = "# written by sluice install-names"
_HELP: Final = {"help_option_names": ["-h", "--help"]}
_name_servers: Final = click.option("-n", "--namesrvAddr", "name_servers", help="Name servers.")
_print_all: Final = click.option(
    "-p", "--printConfigItem", "prints", is_flag=True, help="Print every setting and leave."
)


@click.command("install-names")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace files of these names that are not ours.")
def install_names(directory: Path, force: bool) -> None:
    """Write mqnamesrv, mqbroker, mqproxy, mqadmin and mqshutdown into DIRECTORY."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in NAMES]
    foreign = [path for path in paths if path.exists() and _MARK not in path.read_text("utf-8")]
    if foreign and not force:
        raise ConfigurationError(
            f"{', '.join(map(str, foreign))} exist and are not of `sluice install-names`.",
            fix="Name another directory, or replace them with --force.",
        )
    for path in paths:
        installation = INSTALLATION + quote(str(directory.resolve()))
        words = shlex.join([sys.executable, "-m", MODULE, path.name, installation])
        path.write_text(f'#!/bin/sh\n{_MARK}\nexec {words} "$@"\n')
        path.chmod(0o755)
        click.echo(path)


# ------------------------------------------------------------------------- what the scripts run


@click.command(context_settings=_HELP)
@click.option("-c", "--configFile", "path", help="A namesrv.conf.")
@_name_servers
@_print_all
def mqnamesrv(path: str | None, name_servers: str | None, prints: bool) -> None:
    """Run a name server. `-n` has no effect: name servers do not know each other."""
    if name_servers is not None:
        _warn(f"-n {name_servers} has no effect: name servers do not know each other.")
    if prints:
        _print_settings(Part.NAME_SERVER, path)
    _serve("namesrv", ["nameserver", *_option("-c", path)])


@click.command(context_settings=_HELP)
@click.option("-c", "--configFile", "path", help="A broker.conf.")
@_name_servers
@_print_all
@click.option("-m", "--printImportantConfig", "prints", is_flag=True, help="The same.")
@click.option("--enable-proxy", is_flag=True, help="Serve gRPC clients too.")
@click.option("-pc", "--proxyConfigPath", "proxy_path", help="A rmq-proxy.json.")
def mqbroker(
    path: str | None,
    name_servers: str | None,
    prints: bool,
    enable_proxy: bool,
    proxy_path: str | None,
) -> None:
    """Run a broker. `-pc` needs `--enable-proxy`."""
    if proxy_path is not None and not enable_proxy:
        raise ConfigurationError(
            f"-pc {proxy_path} is the file of a proxy, and none is started.",
            fix="Add --enable-proxy, or leave out -pc.",
        )
    if prints:
        _print_settings(Part.BROKER, path, name_servers)
    proxy = ["--enable-proxy", *_option("--proxy-config", proxy_path)] if enable_proxy else []
    _serve("broker", ["broker", *_option("-c", path), *_option("-n", name_servers), *proxy])


@click.command(context_settings=_HELP)
@click.option("-bc", "--brokerConfigPath", "broker_path", help="A broker.conf, in mode local.")
@click.option("-pc", "--proxyConfigPath", "path", help="A rmq-proxy.json.")
@_name_servers
@click.option(
    "-pm", "--proxyMode", "mode", type=click.Choice([LOCAL, CLUSTER], case_sensitive=False),
    default=CLUSTER, help="cluster: before brokers; local: with a broker in its process.",
)  # fmt: skip
def mqproxy(broker_path: str | None, path: str | None, name_servers: str | None, mode: str) -> None:
    """Run a proxy."""
    named = _option("-n", name_servers)
    if mode.lower() == LOCAL:
        files = [*_option("-c", broker_path), *_option("--proxy-config", path)]
        _serve("proxy", ["broker", "--enable-proxy", *files, *named])
    if broker_path is not None:
        _warn(f"-bc {broker_path} has no effect with -pm cluster: no broker is started.")
    _serve("proxy", ["proxy", *_option("-c", path), *named])


@click.command(context_settings=_HELP)
@click.argument("server", type=click.Choice(["broker", "namesrv", "proxy"]))
def mqshutdown(server: str) -> None:
    """End the servers of this user that mqbroker, mqnamesrv or mqproxy of the same directory
    runs."""
    listed = subprocess.run(
        ["ps", "-x", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    found = servers_in(listed, f"mq{server}")
    own = [pid for pid, installation in found.items() if installation == _installation]
    others = [f"{pid} ({found[pid] or 'without one'})" for pid in found if pid not in own]
    if not own:
        click.echo(f"No mq{server} running.")
        if others:
            click.echo(f"Left alone, of other installations: {', '.join(others)}.")
        raise SystemExit(255)  # as RocketMQ's script, whose -1 a shell sees like this
    for pid in own:
        click.echo(f"The mq{server}({pid}) is running...")
        os.kill(pid, signal.SIGTERM)
        click.echo(f"Send shutdown request to mq{server}({pid}) OK")


def servers_in(listed: str, name: str) -> dict[int, str]:
    """Return the processes that run the script `name` in a list of processes with their arguments:
    process id -> directory of the script, "" if it was written by an older `install-names`."""
    found = {}
    for line in listed.splitlines():
        pid, *words = line.split()
        if MODULE not in words:
            continue
        given = words[words.index(MODULE) + 1 :]
        if given[:1] == [name]:
            mark = given[1] if len(given) > 1 and given[1].startswith(INSTALLATION) else ""
            found[int(pid)] = unquote(mark.removeprefix(INSTALLATION))
    return found


def mqadmin() -> None:
    """Administration: `sluice mqadmin`."""
    main.main(["mqadmin", *sys.argv[1:]], prog_name="mqadmin")


def _option(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


def _serve(name: str, words: list[str]) -> None:
    """Run a server of ours that logs where RocketMQ's does. Does not return."""
    home = os.environ.get("ROCKETMQ_HOME")
    logback = Path(home or "/") / f"conf/rmq.{name}.logback.xml"
    if home and logback.is_file():
        words = [*words, "--log-config", str(logback)]
    elif "SLUICE_LOG_FILE" not in os.environ:
        words = [*words, "--log-file", str(Path(LOGS).expanduser() / f"{name}.log")]
    main.main(words, prog_name=f"mq{name}")


def _warn(text: str) -> None:
    """Tell of an option that has no effect, on stderr: the log goes to a file."""
    click.echo(f"warning: {text}", err=True)


def _print_settings(part: Part, path: str | None, name_servers: str | None = None) -> None:
    """Every setting as it would be in force, `key=value`. Does not return."""
    from sluicemq.cli.servers.serve import settings_of  # noqa: PLC0415 - not for mqadmin

    click.echo(settings_of(part, path, name_servers), nl=False)
    raise SystemExit(0)


def _call(name: str) -> None:
    command = NAMES[name]
    with speaking(name):
        if isinstance(command, click.Command):
            raise SystemExit(command.main(prog_name=name, standalone_mode=False) or 0)
        command()


NAMES: Final[Mapping[str, Callable[..., Any]]] = {
    "mqnamesrv": mqnamesrv,
    "mqbroker": mqbroker,
    "mqproxy": mqproxy,
    "mqadmin": mqadmin,
    "mqshutdown": mqshutdown,
}

_installation = ""
"""The directory of the script that runs; "" for one of an older `install-names`."""

if __name__ == "__main__":
    chosen = sys.argv.pop(1)
    if sys.argv[1:] and sys.argv[1].startswith(INSTALLATION):
        _installation = unquote(sys.argv.pop(1).removeprefix(INSTALLATION))
    run(lambda: _call(chosen))
