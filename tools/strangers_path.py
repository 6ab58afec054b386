"""How long a stranger takes from clone to first message: `make first-message`.

    python tools/strangers_path.py             fails when it takes more than 60 seconds
    python tools/strangers_path.py --limit 120

The commands are those of the first block of docs/first-message.md, given one by one to a shell that
starts in an empty folder with nothing of this environment. Two things are not as the page says:
`python3` is the interpreter that runs this, and where a port is taken the cluster gets others. The
total ends with the message; stopping the cluster is left out of it.
"""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "first-message.md"
PORTS = 9876, 10909, 10911  # of the name server, and of the broker


def commands(page: str) -> list[str]:
    """The lines of the page's first block."""
    found = re.search(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].splitlines()


class Shell:
    """A POSIX shell that is given commands one by one. What they print goes to a file, so what
    comes by the shell's own output is what each ended with."""

    def __init__(self, folder: Path, environment: dict[str, str], output: Path) -> None:
        self._output = output
        output.touch()
        self._shell = subprocess.Popen(
            ["sh"], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, command: str) -> int:
        """What it ends with; 0 for one in the background."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        output = shlex.quote(str(self._output))
        self._shell.stdin.write(f"{{ {command}\n}} </dev/null >>{output} 2>&1\necho $?\n")
        self._shell.stdin.flush()
        return int(self._shell.stdout.readline() or 1)

    @property
    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def close(self) -> None:
        self._shell.communicate(timeout=60)


def strangers_environment(folder: Path, repository: str) -> dict[str, str]:
    """Nothing of an environment that is active here, and `python3` as this one is."""
    ours = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "NAMESRV_ADDR"}
    bin_ = folder / "bin"
    bin_.mkdir()
    python = bin_ / "python3"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(os.path.realpath(sys.executable))} "$@"\n')
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PATH": f"{bin_}:{os.environ['PATH']}", "REPOSITORY": repository}


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def walk(repository: str) -> tuple[float, bool]:
    """Seconds to the first message, and whether it came. Prints as it goes."""
    with tempfile.TemporaryDirectory(prefix="sluicemq-stranger-") as name:
        empty = Path(name) / "empty"
        empty.mkdir()
        environment = strangers_environment(Path(name), repository)
        ports = ""
        if taken := [port for port in PORTS if not is_free(port)]:
            port = free_port()
            environment["NAMESRV_ADDR"] = f"127.0.0.1:{port}"
            ports = f" --nameserver-port {port} --broker-port 0"
            print(f"port {taken[0]} is taken here: the cluster gets others")
        shell = Shell(empty, environment, Path(name) / "output")
        *path, stop = commands(PAGE.read_text())
        total = 0.0
        try:
            for command in path:
                began = time.monotonic()
                status = shell.run(command.replace("sluice up", f"sluice up{ports}"))
                seconds = time.monotonic() - began
                total += seconds
                print(f"{seconds:7.1f} s  {command}", flush=True)
                if status:
                    print(f"that ended with {status}:\n{shell.printed}")
                    return total, False
            body = shlex.split(next(one for one in path if " produce " in one))[3]
            came = body in shell.printed
            if not came:
                print(f"{body!r} is not in what was printed:\n{shell.printed}")
            return total, came
        finally:
            shell.run(stop)
            shell.run("wait")
            shell.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds (60)")
    parser.add_argument("--repository", default=str(ROOT), help="what is cloned; this checkout")
    options = parser.parse_args()
    total, came = walk(options.repository)
    used = os.times()
    computed = used.children_user + used.children_system
    print(
        f"{total:7.1f} s  in all, with {computed:.1f} s of computing on {os.cpu_count()} cores;"
        f" the limit is {options.limit:g}"
    )
    return 0 if came and total <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
