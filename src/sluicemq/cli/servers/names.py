"""RocketMQ's command names: `mqnamesrv`, `mqbroker`, `mqproxy`, `mqadmin` and `mqshutdown`.

`sluice install-names DIR` writes five shell scripts with these names, so that existing commands
such as `nohup sh bin/mqbroker -n localhost:9876 &`, units and scripts keep working. Each script
runs this module with two arguments: its name, by which the module translates RocketMQ's flags to
those of `sluice`; and its directory, by which `mqshutdown` recognises the servers that were started
by scripts of the same directory. The servers log to the same files as RocketMQ: to
`~/logs/rocketmqlogs`, or as `$ROCKETMQ_HOME/conf/rmq.NAME.logback.xml` configures.
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
from sluicemq.cli.ending import report_errors, run
from sluicemq.config.keys import Part
from sluicemq.errors import ConfigurationError

MODULE: Final = "sluicemq.cli.servers.names"
LOGS: Final = "~/logs/rocketmqlogs"
LOCAL = "local"
CLUSTER = "cluster"
INSTALLATION_PREFIX: Final = "--installation="
"""The prefix of the argument that names the directory of the scripts. The directory is
percent-encoded, because a process list shows arguments without quotes."""
_MARK: Final = "# written by sluice install-names"
_HELP: Final = {"help_option_names": ["-h", "--help"]}
_name_servers: Final = click.option(
    "-n",
    "--namesrvAddr",
    "name_servers",
    help="Addresses of the name servers, as host:port;host:port.",
)
_print_all: Final = click.option(
    "-p", "--printConfigItem", "prints", is_flag=True, help="Print all settings, and exit."
)


@click.command("install-names")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--force",
    is_flag=True,
    help="Replace existing files that `sluice install-names` has not written.",
)
def install_names(directory: Path, force: bool) -> None:
    """Write mqnamesrv, mqbroker, mqproxy, mqadmin and mqshutdown into DIRECTORY."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in NAMES]
    foreign_paths = [path for path in paths if path.exists() and not _is_own_script(path)]
    if foreign_paths and not force:
        raise ConfigurationError(
            f"{', '.join(map(str, foreign_paths))} exist and were not written by "
            "`sluice install-names`.",
            fix="Name another directory, or replace them with --force.",
        )
    installation = INSTALLATION_PREFIX + quote(str(directory.resolve()))
    for path in paths:
        command = shlex.join([sys.executable, "-m", MODULE, path.name, installation])
        path.write_text(f'#!/bin/sh\n{_MARK}\nexec {command} "$@"\n')
        path.chmod(0o755)
        click.echo(path)


def _is_own_script(path: Path) -> bool:
    """Return whether `sluice install-names` has written the file."""
    return _MARK in path.read_text("utf-8")


# ------------------------------------------------------------------- the commands of the scripts


@click.command(context_settings=_HELP)
@click.option("-c", "--configFile", "path", help="Configuration file of the name server.")
@_name_servers
@_print_all
def mqnamesrv(path: str | None, name_servers: str | None, prints: bool) -> None:
    """Run a name server. `-n` has no effect: name servers do not know each other."""
    if name_servers is not None:
        _warn(f"-n {name_servers} has no effect: name servers do not know each other.")
    if prints:
        _print_settings_and_exit(Part.NAME_SERVER, path)
    _run_server("namesrv", ["nameserver", *_make_option("-c", path)])


@click.command(context_settings=_HELP)
@click.option("-c", "--configFile", "path", help="Configuration file of the broker.")
@_name_servers
@_print_all
@click.option("-m", "--printImportantConfig", "prints", is_flag=True, help="Same as -p.")
@click.option("--enable-proxy", is_flag=True, help="Also serve gRPC clients.")
@click.option("-pc", "--proxyConfigPath", "proxy_path", help="File rmq-proxy.json of the proxy.")
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
            f"-pc {proxy_path} configures a proxy, but no proxy is started.",
            fix="Add --enable-proxy, or remove -pc.",
        )
    if prints:
        _print_settings_and_exit(Part.BROKER, path, name_servers)
    arguments = ["broker", *_make_option("-c", path), *_make_option("-n", name_servers)]
    if enable_proxy:
        arguments += ["--enable-proxy", *_make_option("--proxy-config", proxy_path)]
    _run_server("broker", arguments)


@click.command(context_settings=_HELP)
@click.option(
    "-bc",
    "--brokerConfigPath",
    "broker_path",
    help="Configuration file of the broker, for mode local.",
)
@click.option("-pc", "--proxyConfigPath", "path", help="File rmq-proxy.json of the proxy.")
@_name_servers
@click.option(
    "-pm",
    "--proxyMode",
    "mode",
    type=click.Choice([LOCAL, CLUSTER], case_sensitive=False),
    default=CLUSTER,
    help="Mode: cluster runs a proxy for existing brokers, local also runs a broker in the same "
    "process.",
)
def mqproxy(broker_path: str | None, path: str | None, name_servers: str | None, mode: str) -> None:
    """Run a proxy for gRPC clients."""
    name_server_option = _make_option("-n", name_servers)
    if mode.lower() == LOCAL:
        files = [*_make_option("-c", broker_path), *_make_option("--proxy-config", path)]
        _run_server("proxy", ["broker", "--enable-proxy", *files, *name_server_option])
    if broker_path is not None:
        _warn(f"-bc {broker_path} has no effect with -pm cluster: no broker is started.")
    _run_server("proxy", ["proxy", *_make_option("-c", path), *name_server_option])


@click.command(context_settings=_HELP)
@click.argument("server", type=click.Choice(["broker", "namesrv", "proxy"]))
def mqshutdown(server: str) -> None:
    """Stop the servers of this user that were started by scripts of the same directory."""
    process_list = subprocess.run(
        ["ps", "-x", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    directory_by_pid = find_servers(process_list, f"mq{server}")
    pids_to_stop = [pid for pid, path in directory_by_pid.items() if path == _installation]
    if not pids_to_stop:
        click.echo(f"No mq{server} running.")
        _print_foreign_servers(directory_by_pid)
        raise SystemExit(255)  # RocketMQ's script exits with -1, which a shell reports as 255
    for pid in pids_to_stop:
        click.echo(f"The mq{server}({pid}) is running...")
        os.kill(pid, signal.SIGTERM)
        click.echo(f"Send shutdown request to mq{server}({pid}) OK")


def _print_foreign_servers(directory_by_pid: Mapping[int, str]) -> None:
    """Print the servers that are not stopped, because scripts of other directories started them."""
    if directory_by_pid:
        servers = [f"{pid} ({path or 'unknown'})" for pid, path in directory_by_pid.items()]
        click.echo(f"Not stopped, from other directories: {', '.join(servers)}.")


def find_servers(process_list: str, name: str) -> dict[int, str]:
    """Return process id -> installation directory, for each process of the script `name`.

    `process_list` has a line for each process: its id and its command line. The directory is "" for
    a process of a script that an older `install-names` has written.
    """
    directory_by_pid = {}
    for line in process_list.splitlines():
        pid, *command = line.split()
        if MODULE not in command:
            continue
        script, *arguments = command[command.index(MODULE) + 1 :] or [""]
        if script != name:
            continue
        directory = ""
        if arguments and arguments[0].startswith(INSTALLATION_PREFIX):
            directory = unquote(arguments[0].removeprefix(INSTALLATION_PREFIX))
        directory_by_pid[int(pid)] = directory
    return directory_by_pid


def mqadmin() -> None:
    """Run `sluice mqadmin` with the arguments of this process. Raises SystemExit."""
    main.main(["mqadmin", *sys.argv[1:]], prog_name="mqadmin")


def _make_option(name: str, value: str | None) -> list[str]:
    """Return an option with its value as arguments; none if the value is None."""
    return [] if value is None else [name, value]


def _run_server(name: str, arguments: list[str]) -> None:
    """Run `sluice ARGUMENTS` as RocketMQ's server `name`, with a log file as RocketMQ has it.

    If $ROCKETMQ_HOME/conf/rmq.NAME.logback.xml exists, it configures the log. Otherwise the log is
    a file in `LOGS`, unless SLUICE_LOG_FILE is set. Raises SystemExit at the end.
    """
    home = os.environ.get("ROCKETMQ_HOME")
    logback_path = Path(home or "/") / f"conf/rmq.{name}.logback.xml"
    if home and logback_path.is_file():
        arguments = [*arguments, "--log-config", str(logback_path)]
    elif "SLUICE_LOG_FILE" not in os.environ:
        arguments = [*arguments, "--log-file", str(Path(LOGS).expanduser() / f"{name}.log")]
    main.main(arguments, prog_name=f"mq{name}")


def _warn(warning: str) -> None:
    """Print a warning to stderr, because the server's log goes to a file."""
    click.echo(f"warning: {warning}", err=True)


def _print_settings_and_exit(
    server_part: Part, path: str | None, name_servers: str | None = None
) -> None:
    """Print all settings that the server would have, as `key=value`, and raise SystemExit.

    `path` is the configuration file, and `name_servers` the value of `-n`; None means not given.
    """
    from sluicemq.cli.servers.settings import format_settings  # noqa: PLC0415 - not for mqadmin

    click.echo(format_settings(server_part, path, name_servers), nl=False)
    raise SystemExit(0)


def _run_script(name: str) -> None:
    """Run the command of the script `name` with the arguments of this process.

    Raises SystemExit.
    """
    command = NAMES[name]
    with report_errors(name):
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
"""The directory of the running script; "" if an older `install-names` has written it."""

if __name__ == "__main__":
    script = sys.argv.pop(1)
    if sys.argv[1:] and sys.argv[1].startswith(INSTALLATION_PREFIX):
        _installation = unquote(sys.argv.pop(1).removeprefix(INSTALLATION_PREFIX))
    run(lambda: _run_script(script))
