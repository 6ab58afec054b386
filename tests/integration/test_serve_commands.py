"""Test `sluice nameserver`, `broker`, `proxy` and `up` as processes, as scripts use them."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import SOURCE, TIMEOUT_S, Processes
from interrupting import interrupted
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.wire.frames import Command, decode, encode
from waiting import limit, wait_for


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


def address_in(line: str, what: str) -> tuple[str, int]:
    found = re.search(rf"{what}=([^ :]+):(\d+)", line)
    assert found, line
    return found[1], int(found[2])


def ask(address: tuple[str, int], command: Command) -> bytes:
    with socket.create_connection(address, timeout=limit(TIMEOUT_S)) as connection:
        connection.sendall(encode(command))
        stream = connection.makefile("rb")
        (total,) = struct.unpack(">i", stream.read(4))
        return bytes(decode(stream.read(total)).body)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_name_server_prints_ready_serves_and_exits_0(
    processes: Processes, number: signal.Signals
) -> None:
    process, line = processes.ready("nameserver", "--host", "127.0.0.1", "--port", "0")
    assert line.startswith("ready ")
    address = address_in(line, "nameserver")
    socket.create_connection(address, timeout=limit(TIMEOUT_S)).close()
    probes = "http://{}:{}".format(*address_in(line, "metrics"))
    for path in ("health", "ready"):
        with urllib.request.urlopen(f"{probes}/{path}", timeout=limit(TIMEOUT_S)) as answer:
            assert answer.read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{probes}/metrics", timeout=limit(TIMEOUT_S))
    process.send_signal(number)
    rest, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert (process.returncode, rest) == (0, "")
    assert "Traceback" not in errors


def test_up_serves_both_on_loopback_and_exits_0(processes: Processes, tmp_path: Path) -> None:
    store = tmp_path / "store"
    process, line = processes.ready(
        "up", "--nameserver-port", "0", "--broker-port", "0", "--store", str(store)
    )
    assert line.startswith("ready ")
    for what in ("nameserver", "broker"):
        address = address_in(line, what)
        assert address[0] == "127.0.0.1"
        socket.create_connection(address, timeout=limit(TIMEOUT_S)).close()
    assert (store / "lock").is_file()
    process.terminate()
    rest, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert (process.returncode, rest) == (0, "")
    assert "Traceback" not in errors


def test_changes_at_run_time_survive_a_restart_without_a_file(
    processes: Processes, tmp_path: Path
) -> None:
    options = ("--nameserver-port", "0", "--broker-port", "0", "--store", str(tmp_path / "store"))
    process, line = processes.ready("up", *options)
    ask(address_in(line, "broker"), Command(25, body=b"traceOn=false\nbrokerClusterName=other\n"))
    ask(address_in(line, "nameserver"), Command(318, body=b"scanNotActiveBrokerInterval=777\n"))
    process.kill()
    _, line = processes.ready("up", *options)
    broker = ask(address_in(line, "broker"), Command(26))
    assert b"\ntraceOn=false\n" in broker
    assert b"\nbrokerClusterName=other\n" in broker
    names = ask(address_in(line, "nameserver"), Command(319))
    assert b"\nscanNotActiveBrokerInterval=777\n" in names
    assert b"sluicePending." not in broker + names


def test_a_broker_in_protected_mode_logs_how_to_leave_it(
    processes: Processes, tmp_path: Path
) -> None:
    process, line = processes.ready("broker", "--port", "0", "--store", str(tmp_path / "store"))
    address = address_in(line, "broker")
    assert b"\nbindAddress=\n" in ask(address, Command(26))
    assert b"\nbindAddress=\n" in ask(("127.0.0.1", address[1]), Command(26))
    process.terminate()
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert "protected mode: only clients on this machine are served" in errors
    assert "Set bindAddress (or --host), 0.0.0.0 for all addresses" in errors
    assert "http://127.0.0.1:" in errors
    assert "No name server is configured" in errors
    process, line = processes.ready(
        "broker", "--port", "0", "--host", "0.0.0.0", "--store", str(tmp_path / "store")
    )
    process.terminate()
    assert "protected mode" not in process.communicate(timeout=limit(TIMEOUT_S))[1]


def test_a_broker_registers_with_the_name_servers_of_the_option(
    processes: Processes, tmp_path: Path
) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("brokerName = ours\nbindAddress = 127.0.0.1\nbrokerNam = typo\n")
    _, line = processes.ready("nameserver", "--host", "127.0.0.1", "--port", "0")
    names = address_in(line, "nameserver")
    options = ("-c", str(path), "-n", f"{names[0]}:{names[1]}", "--port", "0")
    process, line = processes.ready("broker", *options, "--store", str(tmp_path / "store"))
    host, port = address_in(line, "broker")
    assert f'{{0:"{host}:{port}"}},"brokerName":"ours"'.encode() in ask(names, Command(106))
    process.terminate()
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert process.returncode == 0
    assert "brokerNam is not a known key and is ignored. Did you mean 'brokerName'?" in errors
    assert f"Advertising {host}:{port} to clients" in errors


def test_a_port_in_use_is_one_sentence_with_its_fix_and_exit_code_1(
    processes: Processes, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = processes.start(
            "up", "--nameserver-port", str(port), "--broker-port", "0", "--store", str(tmp_path)
        )
        output, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert (process.returncode, output) == (1, "")
    assert f"sluice: Port {port} is already in use" in errors
    assert "another port" in errors
    assert "Traceback" not in errors


def test_an_invalid_setting_is_one_sentence_and_exit_code_1(
    processes: Processes, tmp_path: Path
) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("listenPort = many\n")
    process = processes.start("broker", "-c", str(path))
    output, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert (process.returncode, output) == (1, "")
    assert errors == (
        "sluice: listenPort = many is not valid. Write a whole number from 0 to 65535.\n"
        "More: sluice explain error ConfigurationError\n"
    )


def test_ctrl_c_during_imports_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-m", "sluicemq", "up"],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(TIMEOUT_S),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sluice: interrupted.\n")


def test_ctrl_c_during_the_start_closes_servers_in_order(tmp_path: Path) -> None:
    done = interrupted(
        tmp_path, "sluicemq.broker.server", "up", "--nameserver-port", "0", "--broker-port", "0",
        "--store", str(tmp_path / "store"),
    )  # fmt: skip
    assert (done.returncode, done.stdout[:6]) == (0, "ready ")
    assert "closing" in done.stderr
    assert "Traceback" not in done.stderr


REPR = re.compile(r"\b[A-Z]\w+\(\w+=|<\w[\w.]* |[\[{(]'|b'|\{\d+: |\[\d")
"""What looks as Python would write an object, a list, a mapping or bytes."""


def test_the_log_contains_one_readable_line_for_a_new_topic(
    processes: Processes, tmp_path: Path
) -> None:
    process, line = processes.ready(
        "up", "--nameserver-port", "0", "--broker-port", "0", "--store", str(tmp_path / "store")
    )
    name_server = ":".join(map(str, address_in(line, "nameserver")))
    for words in (
        "produce orders x --tag A",
        "consume orders --group billing --max 1",
        "consume orders --group billing --where a>5 --timeout 0.2",
        "topic create other --order --type fifo",
        "topic update other -q 3 --perm 4",
        "group create late --retries 3",
        "group reset billing -t orders --to earliest",
        "group clone billing late",
        "group update late --contract strict",
        "group delete late --offsets --topics --yes",
        "topic delete other --yes",
    ):
        done = run(*words.split(), "-n", name_server)
        assert done.returncode == 0, done.stderr
    process.terminate()
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    lines = errors.splitlines()
    assert not [line for line in lines if REPR.search(line)]
    told = [line.partition(": ")[2] for line in lines]
    made = [text for text in told if text.startswith("topic created: orders")]
    assert made == ["topic created: orders (4 queues, read+write)"]
    resets = [
        text for text in told if " resets group billing of topic orders: queue 0 to 0" in text
    ]
    assert len(resets) == 1
    assert sum("billing" in line and "created" in line for line in lines) == 1


def test_servers_on_one_machine_have_different_metrics_ports(
    processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    ports = []
    for number in (1, 2):
        process, line = processes.ready(
            "up", "--nameserver-port", "0", "--broker-port", "0", "--metrics-port", port,
            "--store", str(tmp_path / f"store-{number}"),
        )  # fmt: skip
        ports.append(str(address_in(line, "metrics")[1]))
        assert process.stderr is not None
    assert ports[0] == port != ports[1]
    said = f"port {port} is in use: serving metrics on the free port {ports[1]}."
    assert any(said in text for text in process.stderr)
    for one in ports:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{one}/ready", timeout=limit(TIMEOUT_S)
        ) as answer:
            assert answer.read() == b"ok\n"


def test_servers_import_no_large_packages() -> None:
    heavy = "{'rich', 'lark', 'pyarrow', 'pyspark', 'structlog', 'pandas', 'difflib'}"
    names = ("cli", "cli.servers.serve", "nameserver.server", "broker.server")
    modules = ", ".join(f"sluicemq.{name}" for name in names)
    code = f"import sys, {modules}; print(sorted({heavy} & sys.modules.keys()))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=limit(TIMEOUT_S),
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert found.stdout == "[]\n"


def test_a_proxy_serves_a_cluster_and_exits_0(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    options = ("--nameserver-port", "0", "--broker-port", "0", "--store", str(tmp_path / "store"))
    _, line = processes.ready("up", *options)
    name_server = ":".join(map(str, address_in(line, "nameserver")))
    settings = tmp_path / "rmq-proxy.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"namesrvAddr": name_server, "grpcServerPort": 1, "metricsPromExporterPort": port}
    settings.write_text(json.dumps(said | {"wrong": 1}))
    process, line = processes.ready(
        "proxy", "--config", str(settings), "--host", "127.0.0.1", "--port", "0"
    )
    assert line.startswith("ready proxy=127.0.0.1:")
    socket.create_connection(address_in(line, "proxy"), timeout=limit(TIMEOUT_S)).close()
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=limit(TIMEOUT_S)
    ) as metrics:
        assert b"rocketmq_proxy_up{" in metrics.read()
    process.terminate()
    rest, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert (process.returncode, rest) == (0, "")
    assert "Traceback" not in errors
    assert "wrong is not a known key" in errors


def test_a_proxy_file_that_is_not_json_is_refused(processes: Processes, tmp_path: Path) -> None:
    settings = tmp_path / "rmq-proxy.json"
    settings.write_text("grpcServerPort=8081\n")
    process = processes.start("proxy", "-c", str(settings))
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert process.returncode == 1
    assert "not valid JSON" in errors
    assert "Traceback" not in errors


# ------------------------------------------------------------------- the proxy beside a broker


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluicemq", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(TIMEOUT_S),
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return str(found.getsockname()[1])


def free_ports_in_a_row(count: int) -> int:
    """Return the first of `count` adjacent ports of 127.0.0.1 that are free."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = int(free_port())
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def test_up_serves_grpc_at_the_given_port(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    process, line = processes.ready(
        "up", "--nameserver-port", "0", "--broker-port", "0", "--proxy-port", "0",
        "--store", str(tmp_path / "store"),
    )  # fmt: skip
    assert re.fullmatch(
        r"ready nameserver=\S+ broker=\S+ store=\S+ proxy=127.0.0.1:\d+ metrics=127.0.0.1:\d+\n",
        line,
    )
    address = ":".join(map(str, address_in(line, "proxy")))
    for options in ((), ("--tls", "--tls-verify", "none")):
        found = run("proxy", "status", address, "--json", *options)
        assert json.loads(found.stdout)["mode"] == "local", found.stderr
    assert "1 connections, 0 clients, 0 waiting polls" in run("proxy", "status", address).stdout
    process.terminate()
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert process.returncode == 0
    assert "Traceback" not in errors
    found = run("proxy", "status", address)
    assert found.returncode == 1
    assert f"Cannot connect to {address}" in found.stderr


def test_no_proxy_and_proxy_port_cannot_be_combined() -> None:
    found = run("up", "--no-proxy", "--proxy-port", "1")
    assert found.returncode == 2
    assert "cannot be combined" in found.stderr


def test_a_broker_serves_grpc_with_enable_proxy(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    path = tmp_path / "broker.conf"
    path.write_text("grpcServerPort = 0\nbindAddress = 127.0.0.1\n")
    options = ("-c", str(path), "--port", "0", "--store", str(tmp_path / "store"))
    process, line = processes.ready("broker", *options)
    assert "proxy=" not in line
    process.terminate()
    process.communicate(timeout=limit(TIMEOUT_S))
    _, line = processes.ready("broker", *options, "--enable-proxy")
    socket.create_connection(address_in(line, "proxy"), timeout=limit(TIMEOUT_S)).close()


def test_only_a_given_proxy_port_must_be_free(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    options = ("up", "--nameserver-port", "0", "--store", str(tmp_path / "store"))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody has it already
            stack.enter_context(socket.create_server(("127.0.0.1", 8081)))
        process = processes.start(*options, "--broker-port", "0", "--proxy-port", "8081")
        _, errors = process.communicate(timeout=limit(TIMEOUT_S))
        assert process.returncode == 1
        assert "sluice: Port 8081 is already in use" in errors
        process, line = processes.ready(*options, "--broker-port", free_port())
        assert "proxy=" not in line
        process.terminate()
        _, errors = process.communicate(timeout=limit(TIMEOUT_S))
        assert process.returncode == 0
        assert "no proxy for gRPC clients: Port 8081 is already in use" in errors


def test_up_logs_how_to_install_the_proxy(tmp_path: Path) -> None:
    package = tmp_path / "google" / "protobuf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError(name='google.protobuf')")
    code = (
        "from sluicemq.cli.servers.serve import LOOPBACK, RunningServers, start_broker\n"
        "from sluicemq.config import load_broker_config\n"
        "import asyncio, logging\n"
        "logging.basicConfig()\n"
        f"keys = {{'storePathRootDir': {str(tmp_path / 'store')!r}, 'listenPort': '0',"
        " 'bindAddress': LOOPBACK, 'metricsExporterType': 'DISABLE'}\n"
        "config, store, _ = load_broker_config('', overrides=keys)\n"
        "async def main(proxy):\n"
        "    async with RunningServers() as stack:\n"
        "        print(await start_broker(config, store, stack, proxy=proxy))\n"
        "asyncio.run(main(None))\n"
        "asyncio.run(main(True))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(TIMEOUT_S),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"},
    )
    assert done.stdout.startswith("broker=127.0.0.1:")
    assert "proxy=" not in done.stdout
    assert "no proxy for gRPC clients: The proxy needs the package protobuf. " in done.stderr
    assert "Install the extra 'grpc'" in done.stderr
    assert done.stderr.count("ConfigurationError: The proxy needs") == 1


def test_sighup_reloads_a_valid_file_only(processes: Processes, tmp_path: Path) -> None:
    conf, log = tmp_path / "broker.conf", tmp_path / "logs" / "broker.log"
    conf.write_text("traceOn=true\nregionId=here\n")
    process, line = processes.ready(
        "broker", "--host", "127.0.0.1", "--port", "0", "--store", str(tmp_path / "store"),
        "-c", str(conf), "--log-file", str(log), "--log-format", "json",
    )  # fmt: skip
    address = address_in(line, "broker")

    def reread(text: str, said: str) -> bytes:
        conf.write_text(text)
        process.send_signal(signal.SIGHUP)
        deadline_s = SYSTEM_CLOCK.monotonic_s() + limit(TIMEOUT_S)
        while said not in log.read_text():
            assert SYSTEM_CLOCK.monotonic_s() < deadline_s
            select.select([], [], [], 0.05)
        return ask(address, Command(26))

    told = reread("traceOn=false\nregionId=there\nbrokerName=other\n", "was reloaded")
    assert b"traceOn=false\n" in told
    assert b"regionId=there\n" in told
    assert b"sluicePending.brokerName=other\n" in told, "it waits for the next start"
    told = reread("traceOn=perhaps\nregionId=nowhere\n", "was not reloaded")
    assert b"regionId=there\n" in told
    messages = [json.loads(one)["message"] for one in log.read_text().splitlines()]
    assert any("traceOn" in one and "perhaps" in one for one in messages)
    assert any("boot success" in one for one in messages)


def test_rocketmqs_scripts_log_to_rocketmqs_files_and_stop(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "HOME": str(tmp_path)}
    environment.pop("ROCKETMQ_HOME", None)

    def sh(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    names = tmp_path / "bin"
    with sh(sys.executable, "-m", "sluicemq", "install-names", str(names)) as installer:
        installer.communicate(timeout=limit(TIMEOUT_S))
    conf = tmp_path / "namesrv.conf"
    conf.write_text("listenPort=0\nbindAddress=127.0.0.1\n")
    server = sh("sh", str(names / "mqnamesrv"), "-c", str(conf))
    assert server.stdout is not None
    assert server.stdout.readline().startswith("ready nameserver=")
    log = (tmp_path / "logs/rocketmqlogs/namesrv.log").read_text()
    assert "The Name Server boot success" in log
    with sh("sh", str(names / "mqshutdown"), "namesrv") as shutdown:
        told = shutdown.communicate(timeout=limit(TIMEOUT_S))[0]
    assert f"Send shutdown request to mqnamesrv({server.pid}) OK" in told
    assert server.wait(limit(TIMEOUT_S)) == 0
    server.stdout.close()


# --------------------------------------------------------------- several brokers, one command

NAMES = ["broker-a", "broker-b", "broker-c"]
FREE = ("--nameserver-port", "0", "--broker-port", "0")


def in_each(admin: Admin, topic: str) -> Counter[str]:
    """Return the number of messages of a topic on each broker."""
    found: Counter[str] = Counter()
    for queue in admin.queues(topic):
        first, end = admin.offsets(queue)
        found[queue.broker] += end - first
    return found


def test_brokers_share_messages_and_a_killed_one_is_restarted(
    processes: Processes, tmp_path: Path
) -> None:
    store, settings, log = tmp_path / "store", tmp_path / "broker.conf", tmp_path / "log" / "up"
    settings.write_text("brokerClusterName = ours\n")
    options = ("-c", str(settings), "--store", str(store), "--log-file", str(log))
    process, line = processes.ready("up", "--brokers", "3", *FREE, *options)
    brokers, metrics = r"( broker=\S+){3}", r"metrics=\S+( broker-metrics=\S+){3}"
    assert re.fullmatch(rf"ready nameserver=\S+{brokers} store={store} {metrics}\n", line), line
    name_server = ":".join(map(str, address_in(line, "nameserver")))
    told = dict(zip(NAMES, re.findall(r"broker=(\S+)", line), strict=True))
    shares = {}
    with Admin(name_server) as admin, Producer(name_server) as producer:
        assert admin.masters() == told
        assert {row["cluster"] for row in admin.replicas()} == {"ours"}
        assert admin.create_topic("Made", queues=2) == NAMES
        for topic in ("Made", "BySend"):
            # A producer leaves out a broker that is slow just now.
            for number in range(2400):
                producer.send(topic, b"%d" % number)
                if number % 24 == 23 and all(in_each(admin, topic)[name] for name in NAMES):
                    break
            share = shares[topic] = in_each(admin, topic)
            assert (share.keys(), share.total()) == (set(NAMES), number + 1)
        settings.write_text("brokerClusterName = ours\ntraceOn = false\n")
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: all(is_reread(tmp_path / "log" / f"up.{name}") for name in NAMES))

        os.kill(admin.replicas()[1]["said"]["pid"], signal.SIGKILL)
        wait_for(lambda: "broker-b is ready again" in log.read_text())
        assert "broker-b ended (SIGKILL). Restarting it in 1 s." in log.read_text()
    with Admin(name_server) as admin:  # without the connection that is gone
        wait_for(lambda: admin.masters() == told)
        assert in_each(admin, "Made") == shares["Made"]
    process.terminate()
    rest, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert (process.returncode, rest) == (0, "")
    for one in (log, *(log.with_name(f"up.{name}") for name in NAMES)):
        assert "Traceback" not in one.read_text()
        assert "closing" in one.read_text()
    assert not errors
    assert not any(is_alive(address) for address in told.values())
    fewer = run("up", "--brokers", "2", *FREE, "--store", str(store))
    assert fewer.returncode == 1
    assert "receive their messages: broker-c. Start with --brokers 3" in fewer.stderr


def test_if_one_broker_does_not_start_all_are_stopped(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "broker-b").write_text("no directory")
    process = processes.start("up", "--brokers", "3", *FREE, "--store", str(tmp_path))
    output, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert (process.returncode, output) == (1, "")
    assert "sluice: broker-b did not start (exit code 2). The reason is in the log above." in errors
    assert "started again" not in errors
    assert "Traceback" not in errors


def is_reread(log: Path) -> bool:
    return "broker.conf was reloaded: traceOn" in log.read_text()


def is_alive(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=limit(TIMEOUT_S)).close()
        return True
    return False


def test_the_proxy_and_the_console_of_several_brokers_see_all(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("google.protobuf")
    grpc = pytest.importorskip("grpc")
    httpx = pytest.importorskip("httpx")
    from sluicemq.proxy import messages as m
    from sluicemq.proxy.service import PATH

    process, line = processes.ready(
        "up", "--brokers", "2", *FREE, "--proxy-port", "0", "--console", "--store",
        str(tmp_path / "store"), "--metrics-port", str(first := free_ports_in_a_row(4)),
    )  # fmt: skip
    said = dict(word.partition("=")[::2] for word in line.split())
    told = [int(port) for port in re.findall(r"metrics=127\.0\.0\.1:(\d+)", line)]
    assert told == [first, first + 1, first + 2, first + 3], line
    for port, path in zip(told, ("ready", "metrics", "metrics", "metrics"), strict=True):
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/{path}", timeout=limit(TIMEOUT_S)
        ) as page:
            text = page.read()
        assert (b"rocketmq_proxy_up{" in text) == (port == address_in(line, "proxy-metrics")[1])
    with Admin(said["nameserver"]) as admin:
        admin.create_topic("ByProxy", queues=1)
        with grpc.insecure_channel(said["proxy"]) as channel:
            query = channel.unary_unary(
                PATH + "QueryRoute",
                request_serializer=m.QueryRouteRequest.SerializeToString,
                response_deserializer=m.QueryRouteResponse.FromString,
            )
            answer = query(
                m.QueryRouteRequest(topic=m.Resource(name="ByProxy")),
                metadata=[("x-mq-client-id", "one")], timeout=limit(TIMEOUT_S),
            )  # fmt: skip
        assert {queue.broker.name for queue in answer.message_queues} == set(NAMES[:2])
    with httpx.Client(timeout=limit(TIMEOUT_S), follow_redirects=True) as browser:
        page = browser.get(line.partition("console=")[2].split()[0]).text
    assert all(name in page for name in NAMES[:2])
    process.terminate()
    _, errors = process.communicate(timeout=limit(TIMEOUT_S))
    assert process.returncode == 0
    assert "Traceback" not in errors
