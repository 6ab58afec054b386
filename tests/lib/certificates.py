"""Certificates for tests of TLS: an authority of one's own, made by the program openssl.

authority = Authority(tmp_path / "ca")
server = authority.issue("broker", ["127.0.0.1", "localhost"])
Tls(ca=authority.path, certificate=server.path, key=server.key_path)
"""

import ipaddress
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from waiting import limit

OPENSSL_TIMEOUT_S: Final = 30.0
_KEY: Final = {
    "ec": ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"],
    "rsa": ["-newkey", "rsa:2048"],
}


class Certificate(NamedTuple):
    """Two PEM files: the certificate, and its key (PKCS#8, as Java wants it)."""

    path: str
    key_path: str


class Authority:
    """Signs certificates. Its own is `path`."""

    def __init__(self, directory: Path, name: str = "Test authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.path = str(directory / "ca.pem")
        self._key_path = str(directory / "ca.key")
        self._count = 0
        _openssl(
            "req", "-x509", *_KEY["ec"], "-nodes", "-days", "30", "-subj", f"/CN={name}",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
            "-keyout", self._key_path, "-out", self.path,
        )  # fmt: skip

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = (),
        *,
        days: int = 30,
        password: str = "",
        kind: str = "ec",
    ) -> Certificate:
        """A certificate for some host names and addresses; `days=-1`: expired yesterday."""
        self._count += 1
        stem = str(self._directory / f"{name}-{self._count}")
        request, extension = f"{stem}.csr", Path(f"{stem}.ext")
        lock = ["-passout", f"pass:{password}"] if password else ["-nodes"]
        _openssl(
            "req", "-new", *_KEY[kind], *lock, "-subj", f"/CN={name}",
            "-keyout", f"{stem}.key", "-out", request,
        )  # fmt: skip
        extension.write_text(f"subjectAltName={_names(hosts)}\n" if hosts else "\n")
        made = [
            "x509", "-req", "-in", request, "-CA", self.path, "-CAkey", self._key_path,
            "-set_serial", str(self._count), "-days", str(days), "-extfile", str(extension),
            "-out", f"{stem}.pem",
        ]  # fmt: skip
        _openssl(*made)
        return Certificate(f"{stem}.pem", f"{stem}.key")


def _names(hosts: Sequence[str]) -> str:
    return ",".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in hosts)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _openssl(*arguments: str) -> None:
    subprocess.run(
        ["openssl", *arguments], check=True, capture_output=True, timeout=limit(OPENSSL_TIMEOUT_S)
    )
