"""Files of a pipeline where Spark has its own: on a disk, HDFS, an object store.

Everything goes through Hadoop's file systems, as Spark's writers do, so one path serves both. What
decides something is written in two steps: a whole file under another name, then a rename that does
not replace (`publish`), or does (`replace`). A reader sees the old text or the new one.
"""

import json
import uuid
from typing import Any

from sluicemq.errors import ConfigurationError

JsonObject = dict[str, Any]


class Folder:
    """A directory, with everything below it. Paths are relative to it. Driver only."""

    def __init__(self, spark: Any, path: str) -> None:
        if not path:
            raise ConfigurationError("the path is empty.", cure="Name a directory.")
        hadoop = spark._jvm.org.apache.hadoop.fs
        configuration = spark._jsc.hadoopConfiguration()
        self._path = hadoop.Path
        root = hadoop.Path(path)
        self._files = root.getFileSystem(configuration)
        self._root = self._files.makeQualified(root)
        self._context = hadoop.FileContext.getFileContext(self._root.toUri(), configuration)
        rename = hadoop.Options.Rename
        self._no_replace = spark.sparkContext._gateway.new_array(rename, 1)
        self._no_replace[0] = rename.NONE
        self._with_replace = spark.sparkContext._gateway.new_array(rename, 1)
        self._with_replace[0] = rename.OVERWRITE
        self._to_text = spark._jvm.org.apache.commons.io.IOUtils.toString

    @property
    def path(self) -> str:
        """The whole path, as Spark takes it."""
        return str(self._root.toString())

    def at(self, name: str) -> str:
        """The whole path of something below."""
        return str(self._full(name).toString())

    def _full(self, name: str) -> Any:
        return self._path(self._root, name) if name else self._root

    def exists(self, name: str = "") -> bool:
        return bool(self._files.exists(self._full(name)))

    def names(self, name: str = "") -> list[str]:
        """What lies directly in it, sorted; nothing when it is not there."""
        if not self.exists(name):
            return []
        return sorted(str(one.getPath().getName()) for one in self._files.listStatus(
            self._full(name)))  # fmt: skip

    def files(self, name: str, suffix: str) -> list[str]:
        """Files at any depth of a directory below, relative to that one."""
        found = []
        start = self._full(name)
        if not self.exists(name):
            return []
        length = len(str(start.toString())) + 1
        listed = self._files.listFiles(start, True)
        while listed.hasNext():
            path = str(listed.next().getPath().toString())
            if path.endswith(suffix):
                found.append(path[length:])
        return sorted(found)

    def load(self, name: str) -> JsonObject | None:
        """A JSON object; None when there is no such file. Raises ConfigurationError."""
        if not self.exists(name):
            return None
        stream = self._files.open(self._full(name))
        try:
            text = str(self._to_text(stream, "UTF-8"))
        finally:
            stream.close()
        try:
            found = json.loads(text)
        except ValueError as error:
            raise _not_ours(self.at(name), str(error)) from None
        if not isinstance(found, dict):
            raise _not_ours(self.at(name), "no JSON object")
        return found

    def publish(self, name: str, value: JsonObject) -> bool:
        """Writes a file that is not there yet; False when another process was first."""
        draft = self._draft(name, value)
        try:
            if not self.exists(name):
                self._context.rename(self._full(draft), self._full(name), self._no_replace)
                return True
        except Exception as error:
            if "FileAlreadyExists" not in str(error):
                raise
        self.remove(draft)
        return False

    def replace(self, name: str, value: JsonObject) -> None:
        """Writes a file, in the place of an older one."""
        draft = self._draft(name, value)
        self._context.rename(self._full(draft), self._full(name), self._with_replace)

    def _draft(self, name: str, value: JsonObject) -> str:
        folder, _, last = name.rpartition("/")
        draft = f"{folder}/.{last}.{uuid.uuid4().hex}".lstrip("/")
        stream = self._files.create(self._full(draft), True)
        try:
            stream.write(bytearray(json.dumps(value, indent=1).encode()))
            stream.hsync()
        finally:
            stream.close()
        return draft

    def move(self, old: str, new: str) -> None:
        """Moves a file, unless that is done already."""
        if not self.exists(old) and self.exists(new):
            return
        target = self._full(new)
        self._files.mkdirs(target.getParent())
        try:
            self._context.rename(self._full(old), target, self._with_replace)
        except Exception:
            if self.exists(old) or not self.exists(new):  # else another process was faster
                raise

    def remove(self, name: str) -> None:
        """A file, or a directory with what is in it; nothing when it is not there."""
        self._files.delete(self._full(name), True)


def _not_ours(path: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is not what it should be: {why}.", cure="Restore the file, or use another path."
    )
