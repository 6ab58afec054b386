"""Builds the compiled engine (src/sluicemq/engine/*.pyx) in place: `make native`.

    python tools/native.py            builds what is older than its source; says why it cannot
    python tools/native.py --quietly  the same without a word; for targets that do without
    python tools/native.py --into D   into another folder, for a wheel (tools/wheel.py)

A C compiler and Python's headers are all it needs. Beside each module lies the checksum of its
source (`sluicemq.engine` compares them).
"""

import argparse
import contextlib
import importlib.machinery
import io
import os
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "src" / "sluicemq" / "engine"
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
FLAGS = ("-O3", "-g0", "-fno-strict-aliasing", "-Wno-unused-function", "-Wno-unreachable-code")


def sources() -> list[Path]:
    return sorted(ENGINE.glob("*.pyx"))


def checksum_of(source: Path) -> str:
    """As `sluicemq.engine.checksum_of`, which may not be importable yet."""
    parts = [source, *sorted(source.parent.glob("*.pxd"))]
    return f"{zlib.crc32(b''.join(part.read_bytes() for part in parts)):08x}"


def is_built(source: Path) -> bool:
    note, module = source.with_suffix(".built"), ENGINE / f"{source.stem}{SUFFIX}"
    return module.exists() and note.exists() and note.read_text() == checksum_of(source)


def build(into: Path = ENGINE) -> list[Path]:
    """The modules. Raises ImportError without Cython, and what the compiler raises."""
    from Cython.Build import cythonize
    from setuptools import Extension
    from setuptools.dist import Distribution

    wanted = [one for one in sources() if into != ENGINE or not is_built(one)]
    extensions = [
        Extension(
            f"sluicemq.engine.{source.stem}",
            [str(source.relative_to(ROOT))],
            extra_compile_args=list(FLAGS),
        )
        for source in wanted
    ]
    modules = cythonize(
        extensions, build_dir="build/engine", quiet=True, include_path=["src"], language_level=3
    )
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(ROOT / "build" / "lib"), "build/temp"
    command.parallel = os.cpu_count() or 1  # who installs waits for the compiler most of the time
    command.ensure_finalized()
    command.run()
    made = []
    for source in wanted:
        built = Path(command.get_ext_fullpath(f"sluicemq.engine.{source.stem}"))
        target = into / built.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a process may have the old one mapped
        target.write_bytes(built.read_bytes())
        (into / f"{source.stem}.built").write_text(checksum_of(source))
        made.append(target)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quietly", action="store_true", help="not a word, and no failure")
    parser.add_argument("--into", type=Path, default=ENGINE, help="another folder")
    options = parser.parse_args()
    if options.quietly:  # what a compiler says goes to the descriptors, not to sys.stderr
        command = [sys.executable, __file__, "--into", str(options.into)]
        subprocess.run(command, capture_output=True, check=False)
        return 0
    try:
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()):
            made = build(options.into.absolute())
    except ImportError as missing:
        print(f"the compiled engine is not built: {missing}. Fix: pip install cython setuptools.")
        return 1
    except Exception as error:  # noqa: BLE001 -- of the compiler, of many kinds
        print(
            f"the compiled engine is not built: {error}. It needs a C compiler and Python's headers"
            " (Debian: apt install gcc python3-dev). Without it everything works, slower."
        )
        return 1
    names = ", ".join(one.name for one in made) or "nothing: all is built"
    print(f"built {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
