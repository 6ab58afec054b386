"""What is tracked has to work on any machine: no registry host, no path of the machine it was
written on.

A package index or proxy is the user's choice (environment, pip.conf, settings.xml, GOPROXY), so no
file of the project may name one; a path below somebody's home or workshop would break on the next
machine.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZE_BYTES_MAX = 1 << 20  # a large blob belongs into a download, pinned by its version
BINARY = {".gz", ".png", ".ico", ".parquet", ".bin"}

# Written in two halves so that this file keeps its own rule.
HOSTS = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "repo1.maven" + ".org",
    "repo.maven." + "apache.org",
    "proxy.golang" + ".org",
    "sum.golang" + ".org",
    "registry.npm" + "js.org",
    "crates" + ".io",
    "hub.docker" + ".com",
]
PATHS = [r"/wo" + r"rk/(?:main|shared|interfaces)", r"/ro" + r"ot/", r"/opt/wh" + r"eels"]
FORBIDDEN = re.compile("|".join([re.escape(host) for host in HOSTS] + PATHS))


def tracked() -> list[Path]:
    """Files git tracks or would track; everything outside ignored folders where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        names = listing.splitlines()
    except (OSError, subprocess.CalledProcessError):
        ignored = (".", "build", "dist")
        names = [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if not str(path.relative_to(ROOT)).startswith(ignored) and path.suffix != ".pyc"
        ]
    return sorted(path for name in names if (path := ROOT / name).is_file())


def test_no_tracked_file_names_a_registry_host_or_a_machine_path() -> None:
    breaches = []
    for path in tracked():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if match := FORBIDDEN.search(line):
                breaches.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not breaches, "\n".join(breaches[:50])


def test_no_tracked_file_is_large() -> None:
    large = [
        f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes"
        for path in tracked()
        if path.stat().st_size > SIZE_BYTES_MAX
    ]
    assert not large, "\n".join(large)


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md"]
)
def test_what_a_newcomer_looks_for_is_there(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        broken += [
            f"{document.relative_to(ROOT)} -> {target}"
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
            if "://" not in target and not (document.parent / target).exists()
        ]
    assert not broken, "\n".join(broken)
