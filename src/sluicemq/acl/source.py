"""The files of the rules: `plain_acl.yml` and all .yml and .yaml files below `acl` beside it.

RocketMQ's order: the files of the directory first, in the order of their names, then the main file;
of an account that is in several the first counts. All of them are read or none: when one is wrong
the rules that were in force stay.
"""

from typing import Final, NamedTuple

from sluicemq.acl.loading import load_rules
from sluicemq.acl.rules import Rules
from sluicemq.config.values import ServerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.files import Files, exposure

DIRECTORY_FILES_MAX: Final = 1000
DEPTH_MAX: Final = 8
_ENDINGS: Final = (".yml", ".yaml")


class Texts(NamedTuple):
    """What the files say: (path, content) in the order in which they count."""

    items: tuple[tuple[str, bytes], ...]

    def __repr__(self) -> str:
        """Without what they say: secrets."""
        return f"<{len(self.items)} files>"


class Read(NamedTuple):
    """Rules of all files, and warnings."""

    rules: Rules
    warnings: tuple[str, ...]


class Source:
    """Where the rules come from. Blocking; for another thread than the loop's."""

    def __init__(self, files: Files, path: str, *, is_compatible: bool = False) -> None:
        """`path` is the main file's; `is_compatible` reads as RocketMQ does."""
        self._files = files
        self._is_compatible = is_compatible
        self.path = path
        self.directory = f"{path.rpartition('/')[0] or '.'}/acl"

    @classmethod
    def of(cls, files: Files, config: ServerConfig) -> "Source":
        """That of a server with these settings. Raises ConfigurationError without a file."""
        path = find_file(files, config.acl_files)
        return cls(files, path, is_compatible=config.acl_compatible)

    def texts(self) -> Texts:
        """The present content. Raises ConfigurationError when the main file is missing or the
        directory holds too much, OSError when a file cannot be read."""
        if not self._files.exists(self.path):
            raise ConfigurationError(
                f"{self.path} does not exist, and aclEnable=true refuses who is not in it.",
                cure="Write it (docs/security.md begins with an example), name another by"
                " plainAclFile, or set aclEnable=false.",
            )
        paths = [*self._below(self.directory, 0), self.path]
        if len(paths) > DIRECTORY_FILES_MAX:
            raise ConfigurationError(
                f"{self.directory} holds {len(paths)} files, the limit is {DIRECTORY_FILES_MAX}.",
                cure="Merge some of them.",
            )
        return Texts(tuple((path, self._content(path)) for path in paths))

    def read(self, texts: Texts) -> Read:
        """As `read_rules`, and warns of files that others can read."""
        read = read_rules(texts, is_compatible=self._is_compatible)
        exposed = [exposure(self._files, path) for path, _ in texts.items]
        return read._replace(warnings=(*read.warnings, *filter(None, exposed)))

    def _below(self, directory: str, depth: int) -> list[str]:
        if depth > DEPTH_MAX or not self._files.exists(directory):
            return []
        found = []
        for name in sorted(self._files.names(directory)):
            path = f"{directory}/{name}"
            if name.endswith(_ENDINGS):
                found.append(path)
            elif "." not in name:
                found += self._below(path, depth + 1)
        return found

    def _content(self, path: str) -> bytes:
        file = self._files.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()


def find_file(files: Files, places: tuple[str, ...]) -> str:
    """The main file: the first of the places where it is. Raises ConfigurationError."""
    for path in places:
        if files.exists(path):
            return path
    raise ConfigurationError(
        f"aclEnable=true, and there is no file of accounts ({', '.join(places) or 'none named'}).",
        cure="Write plain_acl.yml there (docs/security.md begins with an example), name another"
        " file by plainAclFile, or set aclEnable=false.",
    )


def read_rules(texts: Texts, *, is_compatible: bool = False) -> Read:
    """Raises ConfigurationError naming file, line and cure."""
    loaded = [
        load_rules(decoded(path, data), path, is_compatible=is_compatible)
        for path, data in texts.items
    ]
    return Read(
        Rules.merged(one.rules for one in loaded),
        tuple(warning for one in loaded for warning in one.warnings),
    )


def decoded(path: str, data: bytes) -> str:
    """Raises ConfigurationError when it is no UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}:{line} is no UTF-8 text.", cure="Save the file as UTF-8."
        ) from None
