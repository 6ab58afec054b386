"""A command: the one thing that travels, as a request or as the answer to one.

Frame, all integers big-endian:

    | total 4 | serialisation 1, header length 3 | header | body |

`total` does not count its own four bytes. The header is JSON (0) or ROCKETMQ binary (1); peers
may use either on any frame, a server answers in JSON always (as the real one does by default).

Frames to commands and back, without I/O (layout: `command.py`; facts: spec/remoting.md §1-4).

JSON headers are read with orjson; whatever it refuses but fastjson reads (a lone surrogate, bytes
that are not UTF-8, numbers as text, unquoted keys) goes a second, slow and tolerant way. Field
values are text after decoding, always: Java peers tolerate numbers there.

`encode` writes JSON unless the command says BINARY. Binary cannot carry codes above 32,767 and
drops empty values (spec/remoting.md §3); `encode` refuses the first and follows the second.

A connection without I/O: bytes in any pieces go in, whole commands come out.

`FrameReader` keeps the pieces of an unfinished frame in a list and joins them once, when the last
one is there: a frame of 16 MiB that arrives in pieces of 64 KiB is copied once, not 256 times.
"""

import struct
from collections.abc import Mapping
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


class Command:
    """A request or an answer. Mutable and without invariants on purpose: it lives for one turn.

    `fields` are the header's extFields (text to text) or None when absent; `body` is never None;
    `serialization` is how the header was or will be written; `remark` may be None.
    """

    __slots__ = (
        "body",
        "code",
        "fields",
        "flag",
        "language",
        "opaque",
        "remark",
        "serialization",
        "version",
    )

    def __init__(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes | memoryview = b"",
        opaque: int = 0,
        flag: int = 0,
        remark: str | None = None,
        language: str = "PYTHON",
        version: int = VERSION,
        serialization: int = JSON,
    ) -> None:
        self.code = code
        self.fields = fields
        self.body = body
        self.opaque = opaque
        self.flag = flag
        self.remark = remark
        self.language = language
        self.version = version
        self.serialization = serialization

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)

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
_MARK: Final = struct.Struct(">I")
_BINARY_FIXED: Final = struct.Struct(">hBhiii")
_LENGTH: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_HEADER_MASK: Final = 0xFFFFFF

_loads = orjson.loads


# ------------------------------------------------------------------------------------ decoding


def decode(frame: bytes | memoryview) -> Command:
    """One frame without its leading total -> Command whose body is a slice of `frame`.

    A memoryview stays a memoryview (no copy of the body). Raises ProtocolError.
    """
    if len(frame) < 4:
        raise ProtocolError(f"A frame of {len(frame)} bytes has no room for a header length.")
    mark = _MARK.unpack_from(frame)[0]
    end = 4 + (mark & _HEADER_MASK)
    if end > len(frame):
        raise ProtocolError(
            f"A header of {end - 4} bytes does not fit into a frame of {len(frame)} bytes."
        )
    return decode_header_bytes(mark >> 24, bytes(frame[4:end]), frame[end:])


def decode_header_bytes(serialization: int, header: bytes, body: bytes | memoryview) -> Command:
    """The bytes of a header (0 JSON, 1 binary) and a body -> Command. Raises ProtocolError."""
    if serialization == JSON:
        return decode_json(header, body)
    if serialization == BINARY:
        return _decode_binary(header, body)
    raise ProtocolError(f"{serialization} is not a serialisation: 0 is JSON, 1 is ROCKETMQ.")


def decode_json(header: bytes, body: bytes | memoryview) -> Command:
    """A JSON header -> Command. Raises ProtocolError."""
    try:
        values = _loads(header)
    except ValueError:
        values = None
    return command_of(values, header, body)


def command_of(values: Any, header: bytes, body: bytes | memoryview) -> Command:
    """The same when `values` is what orjson made of the header, or None when it made nothing. HOT:
    plain headers pass here, anything odd goes the slow way.

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
            -0x80000000 <= code | opaque | flag | version <= 0x7FFFFFFF
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
    remark = values.get("remark")
    return Command(
        _number(values, "code"),
        _texts(values.get("extFields")),
        body,
        _number(values, "opaque"),
        _number(values, "flag"),
        remark if remark is None or isinstance(remark, str) else fastjson.text(remark),
        _language(values.get("language")),
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


def _texts(fields: Any) -> dict[str, str] | None:
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise ProtocolError("The header's extFields are not an object.")
    return {
        fastjson.text(name): fastjson.text(value)
        for name, value in fields.items()
        if value is not None
    }


def _language(value: Any) -> str:
    if isinstance(value, int) and 0 <= value < len(LANGUAGES):
        return LANGUAGES[value]
    return value if isinstance(value, str) else "OTHER"


def _decode_binary(header: bytes, body: bytes | memoryview) -> Command:
    try:
        code, language, version, opaque, flag, remark_size = _BINARY_FIXED.unpack_from(header)
        remark, position = _binary_text(header, _BINARY_FIXED.size, remark_size)
        (fields_size,) = _LENGTH.unpack_from(header, position)
        fields = _binary_fields(header, position + 4, fields_size)
    except struct.error as error:
        raise ProtocolError(f"A binary header of {len(header)} bytes is cut short.") from error
    name = LANGUAGES[language] if language < len(LANGUAGES) else "OTHER"
    return Command(code, fields, body, opaque, flag, remark or None, name, version, BINARY)


def _binary_text(header: bytes, start: int, size: int) -> tuple[str, int]:
    end = start + size
    if size < 0 or end > len(header):
        raise ProtocolError(f"A text of {size} bytes does not fit into the binary header.")
    return header[start:end].decode("utf-8", "replace"), end


def _binary_fields(header: bytes, start: int, size: int) -> dict[str, str] | None:
    """An empty name or value stands for null (spec/remoting.md §3): such a field is absent."""
    end = start + size
    if size < 0 or end > len(header):
        raise ProtocolError(f"Fields of {size} bytes do not fit into the binary header.")
    fields: dict[str, str] = {}
    position = start
    while position < end:
        name, position = _binary_text(header, position + 2, _SHORT.unpack_from(header, position)[0])
        value, position = _binary_text(
            header, position + 4, _LENGTH.unpack_from(header, position)[0]
        )
        if name and value:
            fields[name] = value
    return fields if size else None


# ------------------------------------------------------------------------------------ encoding


def encode(command: Command) -> bytes:
    """Command -> whole frame with its leading total. Raises ProtocolError when it cannot travel."""
    return frame(_encode_header(command), command.body, command.serialization)


def encode_start(command: Command) -> bytes:
    """The frame up to its body, for who sends a large body as it is. Raises ProtocolError."""
    header = _encode_header(command)
    return _frame_start(len(header), len(command.body), command.serialization) + header


def _encode_header(command: Command) -> bytes:
    return _encode_binary(command) if command.serialization == BINARY else _encode_json(command)


def frame(header: bytes, body: bytes | memoryview = b"", serialization: int = JSON) -> bytes:
    """Header bytes and body -> whole frame. Raises ProtocolError above the limits."""
    prefix = _frame_start(len(header), len(body), serialization)
    return b"".join((prefix, header, body)) if body else prefix + header


def _frame_start(header_bytes: int, body_bytes: int, serialization: int) -> bytes:
    total = 4 + header_bytes + body_bytes
    if total > FRAME_BYTES_MAX or header_bytes > _HEADER_MASK:
        raise ProtocolError(
            f"A frame of {total} bytes is above the limit of {FRAME_BYTES_MAX}.",
            cure="Send a smaller body.",
        )
    return _PREFIX.pack(total, serialization << 24 | header_bytes)


def _encode_json(command: Command) -> bytes:
    """Keys in alphabetical order, nulls left out, as the Java peers write them."""
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
    return fastjson.dumps_strict(values)


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
            cure="Use the JSON serialisation.",
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


LOOSE_MAX: Final = 1024
"""More pieces than 16 MiB have in reads of 64 KiB, so that honest frames are joined only once."""
_TOTAL: Final = struct.Struct(">I")
TLS_HELLO: Final = 0x16
"""First byte of a TLS connection; a frame never begins with it (its total would be 369 MB)."""


def check_total(total: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
    """Refuse a frame by its total. Raises ProtocolError."""
    if total < 4:
        raise ProtocolError(f"A frame says it has {total} bytes: less than its header length.")
    if total > frame_bytes_max:
        raise ProtocolError(
            f"A frame says it has {total} bytes, above the limit of {frame_bytes_max}.",
            cure="Is that port really spoken to in the remoting protocol?",
        )


def read_frame(data: bytes, start: int, end: int) -> Command:
    """The frame that lies in `data[start:end]`, `start` at its total. Raises ProtocolError."""
    mark = _PREFIX.unpack_from(data, start)[1]
    header_end = start + 8 + (mark & 0xFFFFFF)
    if header_end > end:
        raise ProtocolError(
            f"A header of {mark & 0xFFFFFF} bytes does not fit into a frame of "
            f"{end - start - 4} bytes."
        )
    return decode_header_bytes(mark >> 24, data[start + 8 : header_end], data[header_end:end])


class Pieces:
    """The unfinished end of a stream: joins when a frame can be whole.

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
                self._tidy()
                return None
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = self._loose = 0
        return data

    def _tidy(self) -> None:
        self._loose += 1
        if self._loose == LOOSE_MAX:
            self._parts[-LOOSE_MAX:] = [b"".join(self._parts[-LOOSE_MAX:])]
            self._loose = 0

    def keep(self, rest: bytes) -> bytes | None:
        """Keep `rest`, which begins at a frame; returns it instead when that frame is whole.

        Raises ProtocolError for an impossible total.
        """
        self._needed = 4
        if len(rest) >= 4:
            total = _TOTAL.unpack_from(rest)[0]
            check_total(total, self._frame_bytes_max)
            self._needed = 4 + total
            if len(rest) >= self._needed:
                return rest
        self._parts.append(rest)
        self._size = len(rest)
        return None


class FrameReader:
    """Bytes to commands. After a ProtocolError the stream is lost: close the connection."""

    __slots__ = ("_frame_bytes_max", "_pieces")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._pieces = Pieces(frame_bytes_max)

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._pieces)

    def feed(self, data: bytes) -> list[Command]:
        """The commands that became whole, in order. Raises ProtocolError."""
        whole = self._pieces.add(data)
        if not whole:
            return []
        commands: list[Command] = []
        position, size = 0, len(whole)
        while size - position >= 4:
            total = _TOTAL.unpack_from(whole, position)[0]
            check_total(total, self._frame_bytes_max)
            end = position + 4 + total
            if end > size:
                break
            commands.append(read_frame(whole, position, end))
            position = end
        if position < size:
            self._pieces.keep(whole[position:] if position else whole)
        return commands
