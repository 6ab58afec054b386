"""Each declared setting is read somewhere. One without effect belongs into `config.inert`."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sluicemq.config.settings import BrokerConfig, NameServerConfig, ProxyConfig, StoreConfig

SOURCE = Path(__file__).parents[2] / "src" / "sluicemq"
TEXT = "\n".join(
    path.read_text() for path in sorted(SOURCE.rglob("*.py*")) if path.suffix != ".pyc"
)


@pytest.mark.parametrize("config", [BrokerConfig, StoreConfig, NameServerConfig, ProxyConfig])
def test_each_setting_is_read(config: type) -> None:
    names = [field.name for field in fields(config)]
    attributes = re.findall(r"\.([a-z0-9_]+)\b(?!\()", TEXT)
    literals = re.findall(r'"([a-z0-9_]+)"', TEXT)
    read_names = {*attributes, *literals}
    assert not [name for name in names if name not in read_names]
