"""Where settings of TLS come from besides the server's own file, and what is odd about them.

RocketMQ has them nowhere else: system properties of Java (`-Dtls.server.mode=enforcing` in
JAVA_OPT), and a properties file that wins over those (tls.config.file).
"""

from collections.abc import Mapping
from typing import Final

from sluicemq.config.keys import Part, keys_of
from sluicemq.config.values import BrokerConfig, TlsConfig

DEFAULT_FILE: Final = "/etc/rocketmq/tls.properties"


def java_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The system properties that a start script would hand to Java (`-Dname=value`)."""
    words = f"{environment.get('JAVA_OPT', '')} {environment.get('JAVA_OPT_EXT', '')}".split()
    return dict(word[2:].split("=", 1) for word in words if word[:2] == "-D" and "=" in word)


def tls_entries(entries: Mapping[str, str], part: Part) -> dict[str, str]:
    """Those of the entries that are settings of TLS of this server: a file serves all of them."""
    names = {name for key in keys_of(part) for name in (key.name, *key.aliases)}
    return {
        name: value for name, value in entries.items() if name.startswith("tls.") and name in names
    }


def key_files(config: TlsConfig) -> list[str]:
    """The files that hold private keys."""
    paths = [config.tls_key or config.tls_certificate]
    if isinstance(config, BrokerConfig):
        paths.append(config.tls_client_key or config.tls_client_certificate)
    return [path for path in dict.fromkeys(paths) if path]


def about_tls(config: TlsConfig) -> list[str]:
    """What is less safe than it looks."""
    warnings = []
    if config.tls_auth_client and config.tls_client_auth == "none":
        warnings.append(
            "tls.server.authClient = true has no effect: tls.server.need.client.auth = none asks "
            "no client for a certificate. Set it to require."
        )
    if config.tls_mode == "enforcing" and not config.tls_certificate and config.tls_test_mode:
        warnings.append(
            "tls.server.mode = enforcing without tls.server.certPath: the server makes a "
            "certificate that nobody can verify."
        )
    if isinstance(config, BrokerConfig) and config.tls_client_ca and not config.tls_auth_server:
        warnings.append(
            "tls.client.trustCertPath has no effect without tls.client.authServer = true: "
            "certificates of name servers are not verified."
        )
    return warnings
