"""Commands, which travel as requests and answers, and their frames; without I/O.

All integers are big-endian (spec/remoting.md §1-4):

    | total 4 | serialisation 1, header length 3 | header | body |

`total` does not count its own four bytes. The header is JSON (0) or ROCKETMQ binary (1); peers
may use either on any frame, a server answers in JSON always (as the real one does by default).

JSON headers are read with orjson; whatever it refuses but fastjson reads (a lone surrogate, bytes
that are not UTF-8, numbers as text, integer keys) goes a second, slow and tolerant way. Field
values are text after decoding, always: Java peers tolerate numbers there.

`encode` writes JSON unless the command says BINARY. Binary cannot carry codes above 32,767 and
drops empty values (spec/remoting.md §3); `encode` refuses the first and follows the second.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from sluicemq.errors import ProtocolError
from sluicemq.wire import fastjson

FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2
JSON: Final = 0
BINARY: Final = 1
VERSION: Final = 479
"""We speak as V5_3_3: ordinal 479 of the real MQVersion table."""
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclass(slots=True, eq=False, repr=False)
class Command:
    """A request or an answer. Mutable and without invariants on purpose: it lives for one turn.

    `fields` are the header's extFields (text to text) or None when absent; `body` is never None;
    `serialization` is how the header was or will be written; `remark` may be None.
    """

    code: int
    fields: dict[str, str] | None = None
    body: bytes | memoryview = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: str = "PYTHON"
    version: int = VERSION
    serialization: int = JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)

    def start(self) -> bytes | None:
        """What `encode_start` makes of it, where a subclass has a quicker way to write that."""
        return None

    def copied(self, added_flag: int = 0) -> "Command":
        """The same once more, to be numbered anew; with more bits of its flag set."""
        return Command(
            self.code, self.fields, self.body, self.opaque, self.flag | added_flag, self.remark,
            self.language, self.version, self.serialization,
        )  # fmt: skip

    def __repr__(self) -> str:
        """Never shows field values: they can hold signatures."""
        kind = "answer" if self.is_response else "request"
        names = sorted(self.fields or ())
        return (
            f"<{kind} code={self.code} opaque={self.opaque} fields={names} body={len(self.body)} B>"
        )


LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP",
    "OMS", "RUST", "NODE_JS",
)  # fmt: skip
"""Language names by their number in binary headers."""
SERVER_LANGUAGE: Final = "JAVA"
"""What our servers call themselves in answers: the one name that every client has been tried
with. Requests of our client say PYTHON, which the broker shows in its connection lists."""

HEADER_VALUES_MAX: Final = 4096
"""Of a header that orjson does not read: its fields and their names."""
_LANGUAGE_NUMBERS: Final = {name: number for number, name in enumerate(LANGUAGES)}
_OTHER: Final = _LANGUAGE_NUMBERS["OTHER"]
_PREFIX: Final = struct.Struct(">II")
_NUMBER: Final = struct.Struct(">I")
_BINARY_FIXED: Final = struct.Struct(">hBhiii")
_LENGTH: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
HEADER_MASK: Final = 0xFFFFFF
"""The length of a header beside its serialisation."""


# ------------------------------------------------------------------------------------ decoding


def decode(data: bytes | memoryview, start: int = 0, end: int | None = None) -> Command:
    """The frame in `data[start:end]`, without its leading total -> Command.

    Its body is a slice: of a memoryview a view, without a copy. Raises ProtocolError.
    """
    end = len(data) if end is None else end
    if end - start < 4:
        raise ProtocolError(f"A frame of {end - start} bytes has no room for a header length.")
    mark = _NUMBER.unpack_from(data, start)[0]
    header_end = start + 4 + (mark & HEADER_MASK)
    if header_end > end:
        raise ProtocolError(
            f"A header of {mark & HEADER_MASK} bytes does not fit into a frame of "
            f"{end - start} bytes."
        )
    header, body = bytes(data[start + 4 : header_end]), data[header_end:end]
    if mark >> 24 == BINARY:
        return _decode_binary(header, body)
    if mark >> 24 != JSON:
        raise ProtocolError(f"{mark >> 24} is not a serialisation: 0 is JSON, 1 is ROCKETMQ.")
    try:
        values = orjson.loads(header)
    except ValueError:
        values = None
    return command_of(values, header, body)


def command_of(values: Any, header: bytes, body: bytes | memoryview) -> Command:
    """The same when `values` is what orjson made of the header, or None when it made nothing. HOT:
    plain headers pass here, anything odd goes the slow way, negative numbers too: one of them would
    hide in the `|` that another one is too large.

    The join and the `|` are type checks made in C: they fail on values that are not text, and on
    numbers that are not integers.
    """
    try:
        fields = values.get("extFields")
        if fields is not None:
            "".join(fields.values())
        code = values["code"]
        opaque = values["opaque"]
        flag = values["flag"]
        version = values["version"]
        language = values["language"]
        remark = values.get("remark")
        if (
            0 <= code | opaque | flag | version <= 0x7FFFFFFF
            and language.__class__ is str
            and (remark is None or remark.__class__ is str)
        ):
            return Command(code, fields, body, opaque, flag, remark, language, version)
    except (TypeError, KeyError, AttributeError):
        pass
    return _decode_odd_json(header, body)


def _decode_odd_json(header: bytes, body: bytes | memoryview) -> Command:
    values = fastjson.loads(header, HEADER_VALUES_MAX)
    if not isinstance(values, dict):
        raise ProtocolError("A JSON header is not an object.")
    fields, remark, language = (values.get(it) for it in ("extFields", "remark", "language"))
    if fields is not None and not isinstance(fields, dict):
        raise ProtocolError("The header's extFields are not an object.")
    if isinstance(language, int) and 0 <= language < len(LANGUAGES):
        language = LANGUAGES[language]
    text = fastjson.text
    return Command(
        _number(values, "code"),
        fields and {text(name): text(it) for name, it in fields.items() if it is not None},
        body,
        _number(values, "opaque"),
        _number(values, "flag"),
        None if remark is None else text(remark),
        language if isinstance(language, str) else "OTHER",
        _number(values, "version"),
    )


def _number(values: Mapping[Any, Any], key: str) -> int:
    """An int32 as fastjson reads one: absent is 0, text is parsed."""
    value = values.get(key)
    try:
        number = int(value) if value is not None else 0
    except (ValueError, TypeError, OverflowError):
        number = 1 << 31
    if not -0x80000000 <= number <= 0x7FFFFFFF:
        raise ProtocolError(f"The header's {key} is not a 32-bit integer.")
    return number


def _decode_binary(header: bytes, body: bytes | memoryview) -> Command:
    """An empty name or value stands for null (spec/remoting.md §3): such a field is absent."""
    fields: dict[str, str] = {}
    try:
        code, language, version, opaque, flag, remark_size = _BINARY_FIXED.unpack_from(header)
        remark, position = _binary_text(header, _BINARY_FIXED.size, remark_size)
        (fields_size,) = _LENGTH.unpack_from(header, position)
        position += 4
        end = position + fields_size
        if fields_size < 0 or end > len(header):
            raise ProtocolError(f"Fields of {fields_size} bytes do not fit into the binary header.")
        while position < end:
            size = _SHORT.unpack_from(header, position)[0]
            name, position = _binary_text(header, position + 2, size)
            size = _LENGTH.unpack_from(header, position)[0]
            value, position = _binary_text(header, position + 4, size)
            if name and value:
                fields[name] = value
    except struct.error as error:
        raise ProtocolError(f"A binary header of {len(header)} bytes is cut short.") from error
    return Command(
        code,
        fields if fields_size else None,
        body,
        opaque,
        flag,
        remark or None,
        LANGUAGES[language] if language < len(LANGUAGES) else "OTHER",
        version,
        BINARY,
    )


def _binary_text(header: bytes, start: int, size: int) -> tuple[str, int]:
    end = start + size
    if size < 0 or end > len(header):
        raise ProtocolError(f"A text of {size} bytes does not fit into the binary header.")
    return header[start:end].decode("utf-8", "replace"), end


# ------------------------------------------------------------------------------------ encoding


def encode(command: Command) -> bytes:
    """Command -> whole frame with its leading total. Raises ProtocolError when it cannot travel."""
    start, body = encode_start(command), command.body
    return b"".join((start, body)) if body else start


def encode_start(command: Command) -> bytes:
    """The frame up to its body, when a large body is sent as it is. Raises ProtocolError.

    JSON: keys in alphabetical order, nulls left out, as the Java peers write them.
    """
    if command.__class__ is not Command and (start := command.start()) is not None:
        return start
    if command.serialization == BINARY:
        header = _encode_binary(command)
    else:
        values: dict[str, Any] = {"code": command.code}
        if command.fields is not None:
            values["extFields"] = command.fields
        values["flag"] = command.flag
        values["language"] = command.language
        values["opaque"] = command.opaque
        if command.remark is not None:
            values["remark"] = command.remark
        values["serializeTypeCurrentRPC"] = "JSON"
        values["version"] = command.version
        try:
            header = orjson.dumps(values)
        except TypeError:  # a lone surrogate
            header = fastjson.dumps_strict(values)
    total = 4 + len(header) + len(command.body)
    if total > FRAME_BYTES_MAX or len(header) > HEADER_MASK:
        raise ProtocolError(
            f"A frame of {total} bytes is above the limit of {FRAME_BYTES_MAX}.",
            fix="Send a smaller body.",
        )
    return _PREFIX.pack(total, command.serialization << 24 | len(header)) + header


def _encode_binary(command: Command) -> bytes:
    remark = _utf8(command.remark or "")
    parts = [b"", remark, b""]
    size = 0
    try:
        for name, value in (command.fields or {}).items():
            if name and value:
                key, data = _utf8(name), _utf8(value)
                parts += (_SHORT.pack(len(key)), key, _LENGTH.pack(len(data)), data)
                size += 6 + len(key) + len(data)
        parts[2] = _LENGTH.pack(size)
        parts[0] = _BINARY_FIXED.pack(
            command.code,
            _LANGUAGE_NUMBERS.get(command.language, _OTHER),
            command.version,
            command.opaque,
            command.flag,
            len(remark),
        )
    except struct.error as error:
        raise ProtocolError(
            f"Request code {command.code} cannot travel in a binary header ({error}).",
            fix="Use the JSON serialisation.",
        ) from error
    return b"".join(parts)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def encode_answer(
    request: Command,
    code: int = 0,
    fields: Mapping[str, str] | None = None,
    body: bytes | memoryview = b"",
    remark: str | None = None,
) -> bytes:
    """The answer to `request` as a frame: JSON always, whatever the request was written in."""
    return encode(
        Command(
            code,
            dict(fields) if fields is not None else None,
            body,
            request.opaque,
            FLAG_RESPONSE,
            remark,
            SERVER_LANGUAGE,
            VERSION,
        )
    )


# --------------------------------------------------------------------------------- connections

LOOSE_MAX: Final = 1024
"""More pieces than 16 MiB have in reads of 64 KiB, so that honest frames are joined only once."""
TLS_HELLO: Final = 0x16
"""First byte of a TLS connection; a frame never begins with it (its total would be 369 MB)."""


def check_total(total: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
    """Refuse a frame by its total. Raises ProtocolError."""
    if total < 4:
        raise ProtocolError(f"A frame says it has {total} bytes: less than its header length.")
    if total > frame_bytes_max:
        raise ProtocolError(
            f"A frame says it has {total} bytes, above the limit of {frame_bytes_max}.",
            fix="Is that port really spoken to in the remoting protocol?",
        )


class Pieces:
    """The unfinished end of a stream, joined once, when a frame can be whole: 16 MiB that arrive
    in pieces of 64 KiB are copied once, not 256 times.

    A peer that sends single bytes must not cost an object a byte: after `LOOSE_MAX` pieces the last
    ones become one.
    """

    __slots__ = ("_frame_bytes_max", "_loose", "_needed", "_parts", "_size")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._parts: list[bytes] = []
        self._loose = 0
        self._size = 0
        self._needed = 0

    def __len__(self) -> int:
        return self._size

    def add(self, data: bytes) -> bytes | None:
        """All that is there, beginning at a frame, when the first frame is whole; else None."""
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                self._loose += 1
                if self._loose == LOOSE_MAX:
                    self._parts[-LOOSE_MAX:] = [b"".join(self._parts[-LOOSE_MAX:])]
                    self._loose = 0
                return None
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = self._loose = 0
        return data

    def keep(self, rest: bytes) -> bytes | None:
        """Keep `rest`, which begins at a frame; returns it instead when that frame is whole.

        Raises ProtocolError for an impossible total.
        """
        self._needed = 4
        if len(rest) >= 4:
            total = _NUMBER.unpack_from(rest)[0]
            check_total(total, self._frame_bytes_max)
            self._needed = 4 + total
            if len(rest) >= self._needed:
                return rest
        self._parts.append(rest)
        self._size = len(rest)
        return None


class FrameReader(Pieces):
    """Bytes to commands. After a ProtocolError the stream is lost: close the connection."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[Command]:
        """The commands that became whole, in order. Raises ProtocolError."""
        whole = self.add(data)
        if not whole:
            return []
        commands: list[Command] = []
        position, size = 0, len(whole)
        while size - position >= 4:
            total = _NUMBER.unpack_from(whole, position)[0]
            check_total(total, self._frame_bytes_max)
            end = position + 4 + total
            if end > size:
                break
            commands.append(decode(whole, position + 4, end))
            position = end
        if position < size:
            self.keep(whole[position:] if position else whole)
        return commands
