"""The key-value configuration of a name server: the one thing it keeps on disk.

    {"configTable": {"namespace": {"key": "value"}}}        kvConfig.json

The namespace ORDER_TOPIC_CONFIG holds, for each strictly ordered topic, which brokers have how many
queues (`broker-a:4;broker-b:2`). A change is answered after the file is written.
"""

from typing import Final

from sluicemq.errors import ProtocolError
from sluicemq.files import Files, load_text, replace_text
from sluicemq.protocol.bodies import decode_kv_config_file, encode_kv_config_file

ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"

Namespaces = dict[str, dict[str, str]]


class KeyValues:
    """Namespaces of keys and values, each change of which goes to the file at once."""

    def __init__(self, files: Files, path: str) -> None:
        """Reads the file, or its `.bak`. Raises StoreDamagedError when neither can be read."""
        self._files = files
        self._path = path
        self._namespaces: Namespaces = load_text(files, path, _parse) or {}

    def get(self, namespace: str, key: str) -> str | None:
        return self._namespaces.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """A copy, or None when it was never written to."""
        table = self._namespaces.get(namespace)
        return None if table is None else dict(table)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Raises OSError when the file cannot be written; then nothing has changed."""
        changed = self._copy()
        changed.setdefault(namespace, {})[key] = value
        self._replace(changed)

    def delete(self, namespace: str, key: str) -> None:
        """A key that is not there is no error."""
        if self.get(namespace, key) is not None:
            changed = self._copy()
            del changed[namespace][key]
            self._replace(changed)

    def _copy(self) -> Namespaces:
        return {name: dict(table) for name, table in self._namespaces.items()}

    def _replace(self, namespaces: Namespaces) -> None:
        replace_text(self._files, self._path, encode_kv_config_file(namespaces))
        self._namespaces = namespaces


def _parse(text: str) -> Namespaces:
    try:
        return decode_kv_config_file(text)
    except ProtocolError as error:
        raise ValueError(str(error)) from error
