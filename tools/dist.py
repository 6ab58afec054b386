"""The source distribution and the wheels, and a test of each: `make dist`.

    python tools/dist.py                  all of it, into dist/
    python tools/dist.py --into FOLDER

The wheels, pure and (where a C compiler is there) for this platform, are made of the source
distribution as pip makes them when it installs one, so nothing of the checkout can be missing in
it. Each is looked into (`faults_of`), installed with `[server]` into a new environment, and used in
an empty folder: its version, `sluice up`, a message, and a project of `sluice quickstart`.
"""

import argparse
import contextlib
import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
HEADERS = (
    "Name", "Version", "Summary", "License-Expression", "Requires-Python", "Keywords", "Classifier",
    "Description-Content-Type", "Requires-Dist", "Provides-Extra",
)  # fmt: skip
NOT_SHIPPED = {".pyx", ".pxd", ".c", ".so", ".pyd", ".built", ".pyc"}


def faults_of(wheel: Path) -> list[str]:
    """What is missing in a wheel or should not be there."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(archive.read(metadata))
    info = metadata.partition("/")[0]
    code = {name for name in names if not name.startswith(f"{info}/")}
    wanted = {
        str(path.relative_to(SOURCE).as_posix())
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }
    compiled = {
        name for name in code if re.fullmatch(r"sluicemq/engine/\w+\.[\w-]+\.(so|pyd)", name)
    }
    engine = set() if "-none-any" in wheel.name else {path.stem for path in SOURCE.rglob("*.pyx")}
    rest = {f"{info}/{name}" for name in ("entry_points.txt", "licenses/LICENSE", "RECORD")}
    faults = [f"{name} is missing" for name in sorted((wanted | rest) - names)]
    faults += [f"{name} is not of the source" for name in sorted(code - wanted - compiled)]
    if {name.split("/")[-1].split(".")[0] for name in compiled} != engine:
        faults.append(f"the compiled engine is {sorted(compiled)}, not {sorted(engine)}")
    faults += [f"METADATA has no {name}" for name in HEADERS if not told[name]]
    if not isinstance(body := told.get_payload(), str) or "# SluiceMQ" not in body:
        faults.append("METADATA has no description")
    return faults


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """What it prints. Raises SystemExit with all of it when it fails."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept | variables, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if found.returncode:
        raise SystemExit(
            f"{' '.join(map(str, words))} ended with {found.returncode}:\n{found.stdout}"
        )
    return found.stdout


def environment(folder: Path) -> Path:
    """The programs of a new virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def build(folder: Path, into: Path) -> tuple[Path, list[Path]]:
    """The source distribution, and the wheels made of it."""
    python = environment(folder / "build") / "python"
    run(python, "-m", "pip", "install", "-q", "hatchling", cwd=folder)
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", into, cwd=ROOT)
    (source,) = into.glob("sluicemq-*.tar.gz")
    for pure in ("1", "0"):
        words = ("-m", "pip", "wheel", "-q", "--no-deps", "-w", into, source)
        run(python, *words, cwd=folder, SLUICE_PURE=pure)
    return source, sorted(into.glob("sluicemq-*.whl"))


@contextlib.contextmanager
def cluster(sluice: Path, folder: Path) -> Iterator[str]:
    """The address of the name server of a `sluice up` on free ports."""
    words = [
        sluice,
        "up",
        "--nameserver-port",
        "0",
        "--broker-port",
        "0",
        "--store",
        folder / "store",
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    try:
        found = re.match(r"ready nameserver=(\S+)", server.stdout.readline())
        if not found:
            raise SystemExit(f"sluice up does not start:\n{(folder / 'log').read_text()}")
        yield found[1]
    finally:
        server.terminate()
        server.stdout.close()
        code = server.wait(60)
    if code:
        raise SystemExit(f"sluice up ended with {code}:\n{(folder / 'log').read_text()}")


def use(wheel: Path, folder: Path) -> str:
    """Installs a wheel and does with it what a user does; its version and engine."""
    folder.mkdir()
    programs = environment(folder / "environment")
    sluice, python = programs / "sluice", programs / "python"
    run(python, "-m", "pip", "install", "-q", f"{wheel}[server]", cwd=folder)
    told = run(sluice, "--version", cwd=folder).strip()
    expected = "reference" if "-none-any" in wheel.name else "compiled"
    if expected not in told:
        raise SystemExit(f"{wheel.name} runs as {told!r}, not on the {expected} engine")
    with cluster(sluice, folder) as address:
        asked = {"NAMESRV_ADDR": address}
        run(sluice, "produce", "orders", "17 apples", cwd=folder, **asked)
        words = ("consume", "orders", "--from", "first", "--max", "1", "--timeout", "30")
        if "17 apples" not in run(sluice, *words, cwd=folder, **asked):
            raise SystemExit(f"{wheel.name}: a message that was sent did not come")
        run(sluice, "quickstart", "messages", "shop", cwd=folder)
        if "order 10" not in run(python, "produce.py", cwd=folder / "shop", **asked):
            raise SystemExit(f"{wheel.name}: the project of quickstart does not run")
    required = (folder / "shop" / "requirements.txt").read_text()
    if wheel.name not in required:
        raise SystemExit(f"{wheel.name}: the project requires {required!r}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="a folder (dist)")
    into = parser.parse_args().into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("sluicemq-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="sluicemq-dist-") as name:
        folder = Path(name)
        source, wheels = build(folder, into)
        print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB", flush=True)
        if shutil.which("cc") and len(wheels) < 2:
            raise SystemExit("there is a C compiler, and yet no wheel with the compiled engine")
        for number, wheel in enumerate(wheels):
            if faults := faults_of(wheel):
                raise SystemExit(f"{wheel.name}:\n" + "\n".join(faults))
            told = use(wheel, folder / str(number))
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {told}", flush=True)
    used = os.times()
    print(f"{used.children_user + used.children_system:.0f} s of computing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
