"""A template and a random number generator make an input.

What a mutation changes is a value, a field, a body, an expression, properties, a serialisation or
the frame itself. `Input.breaks` says that the connection may end with it. With an account most
frames are signed, after what was changed.
"""

import struct
from random import Random
from typing import Any, Final, NamedTuple

import orjson

from framing import frame
from fuzz.corpus import Template
from fuzz.sql import expression
from sluicemq.errors import ProtocolError
from sluicemq.record.codec import encode_batch
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import BINARY, FLAG_ONEWAY, FLAG_RESPONSE, Command, encode
from sluicemq.wire.signature import sign_command

NAMES: Final = (
    "T", "TBW102", "G", "%RETRY%G", "%DLQ%G", "%RETRY%", "%RETRY%..", "%RETRY%../../x", "..", ".",
    "../../../tmp/x", "/", "a/b", "a\\b", "a\0b", "\0", "", " ", "%", "%LMQ%x", "T@G", "T@@", "@",
    "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer", "SELF_TEST_TOPIC",
    "x" * 127, "x" * 128, "%RETRY%" + "x" * 249, "x" * 70_000, "\ud800", "т", "CON", "T\n", "a:b",
    *(f"N{number}" for number in range(64)),
)  # fmt: skip
VALUES: Final = (
    "", "0", "1", "-1", "2", "7", "2147483647", "2147483648", "-2147483648", "4294967296",
    "9223372036854775807", "9223372036854775808", "-9223372036854775808", "1e309", "NaN", "0x1",
    "١", "1_0", " 1", "1 ", "+1", "1.0", "true", "false", "TRUE", "null", "None", "{}", "[]", "[",
    "%s", "{0}", "\x01", "\x02", "\x01\x02\x01", "a\x01b\x02", "9" * 5000, "-", "*", "TagA || *",
    "SQL92", "TAG", "JAVA", "G%T", "\U0001f600", "\ud800", "é" * 300,
)  # fmt: skip
ODD: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1 << 31, 1 << 63, 1.5, -0.0, 1e308, "", "x", [], {}, [[]], [None],
    {"": ""}, {"a": {"b": {}}}, [1, "2", None], "9" * 400, {"$ref": "$"}, {"$ref": "@"},
    {"$ref": ".."}, [{"$ref": "$"}, {"$ref": "$"}], {"$ref": "$.a.b[0]"},
)  # fmt: skip
PROPERTY_NAMES: Final = (
    "UNIQ_KEY", "WAIT", "TAGS", "KEYS", "DELAY", "TIMER_DELAY_MS", "TIMER_DELAY_SEC",
    "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "TRAN_MSG", "PGROUP", "REAL_TOPIC",
    "REAL_QID", "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES",
    "CLUSTER", "MSG_REGION", "TRACE_ON", "POP_CK", "INNER_MULTI_DISPATCH", "__SHARDINGKEY",
    "CHECK_IMMUNITY_TIME_IN_SECONDS", "TRANSACTION_CHECK_TIMES", "CORRELATION_ID", "TTL",
    "REPLY_TO_CLIENT", "INSTANCE_ID", "1ST_POP_TIME", "a", "", "color",
)  # fmt: skip
NAME_FIELDS: Final = frozenset({"topic", "b", "a", "c", "consumerGroup", "group", "producerGroup"})
MAKERS: Final = frozenset({
    RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
})  # fmt: skip
"""An operator may make any number of topics: of these the names come from a list."""
CODES: Final = tuple(int(code) for code in RequestCode if code != RequestCode.UPDATE_BROKER_CONFIG)
_PREFIX: Final = struct.Struct(">II")
Account = tuple[str, str]
"""Access key and secret."""
SIGNED_PART: Final = 0.8


class Input(NamedTuple):
    """Bytes for a socket."""

    kind: str
    data: bytes
    breaks: bool = False


class Mutator:
    """Makes inputs of templates, all from one generator."""

    def __init__(
        self, templates: tuple[Template, ...], rng: Random, account: Account | None = None
    ) -> None:
        self._templates = templates
        self._rng = rng
        self._account = account
        self._kinds = (
            (self._field, 30), (self._fields, 8), (self._body, 22), (self._filter, 12),
            (self._properties, 14), (self._batch, 4), (self._binary, 6), (self._code, 4),
        )  # fmt: skip
        self._makes = [make for make, weight in self._kinds for _ in range(weight)]
        self._opaque = 0

    def plain(self) -> Input:
        """A frame that a broker can read."""
        return self._rng.choice(self._makes)()

    # --- frames that can be read

    def _frame(self, kind: str, code: int, fields: dict[str, str], body: bytes) -> Input:
        self._opaque += 1
        oneway = self._rng.random() < 0.05
        values = {
            "code": code, "extFields": self._signed(code, fields, body),
            "flag": FLAG_ONEWAY if oneway else 0,
            "language": "JAVA", "opaque": self._opaque, "version": 479,
        }  # fmt: skip
        return Input(kind, frame(_header(values), body))

    def _signed(self, code: int, fields: dict[str, str], body: bytes) -> dict[str, str]:
        if self._account is None or self._rng.random() > SIGNED_PART:
            return fields
        command = Command(code, fields, body)
        try:
            sign_command(command, *self._account)
        except UnicodeEncodeError:  # a lone surrogate, which nobody can sign
            return fields
        return command.fields or {}

    def _pick(self) -> tuple[int, dict[str, str], bytes]:
        template = self._rng.choice(self._templates)
        return template.code, dict(template.fields), template.body

    def _value(self, name: str, code: int, value: str) -> str:
        rng = self._rng
        if name in NAME_FIELDS or code in MAKERS:
            return rng.choice(NAMES)
        kind = rng.random()
        if kind < 0.7 or not value:
            return rng.choice(VALUES)
        at = int(rng.random() * len(value))
        return value[:at] + chr(int(rng.random() * 300)) + value[at + 1 :]

    def _field(self) -> Input:
        code, fields, body = self._pick()
        for name in self._some(list(fields)):
            fields[name] = self._value(name, code, fields[name])
        return self._frame("field", code, fields, body)

    def _some(self, names: list[str]) -> list[str]:
        return self._rng.choices(names, k=1 + int(self._rng.random() * 3)) if names else []

    def _fields(self) -> Input:
        """Fields too few, too many, too long."""
        rng = self._rng
        code, fields, body = self._pick()
        kind = rng.random()
        if kind < 0.6 and fields:
            for name in self._some(list(fields)):
                fields.pop(name, None)
        elif kind < 0.9:
            fields |= {rng.choice(VALUES)[:99]: rng.choice(VALUES) for _ in range(4)}
        elif kind < 0.97:
            fields |= {f"f{number}": "" for number in range(rng.choice((200, 300, 3000)))}
        else:
            fields["x" * rng.choice((300, 70_000))] = "y" * rng.choice((1, 70_000))
        return self._frame("fields", code, fields, body)

    def _body(self) -> Input:
        rng = self._rng
        code, fields, body = self._pick()
        if body[:1] in (b"{", b"[") and rng.random() < 0.7:
            body = self._json(body)
        elif code not in MAKERS:
            body = self._bytes(body)
        return self._frame("body", code, fields, body)

    def _json(self, body: bytes) -> bytes:
        """JSON with a value of another kind somewhere."""
        rng = self._rng
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            return self._bytes(body)
        here, steps = value, 0
        while steps < 8 and isinstance(here, dict | list) and here:
            key: Any = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
            inner = here[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
                here[key] = self._odd(key)
                break
            here, steps = inner, steps + 1
        if rng.random() < 0.02:
            return b'{"a":' * rng.choice((60, 300, 2000)) + body
        return orjson.dumps(value)

    def _odd(self, key: object) -> Any:
        if isinstance(key, str) and ("opic" in key or "roup" in key):
            return self._rng.choice(NAMES).encode("utf-8", "replace").decode()
        odd = self._rng.choice(ODD)
        return odd if not isinstance(odd, int) or abs(odd) <= 1 << 63 else 0

    def _bytes(self, body: bytes) -> bytes:
        rng = self._rng
        kind = rng.random()
        if kind < 0.4 and body:
            data = bytearray(body)
            for _ in range(1 + int(rng.random() * 4)):
                data[int(rng.random() * len(data))] = int(rng.random() * 256)
            return bytes(data)
        if kind < 0.6:
            return body[: int(rng.random() * (len(body) + 1))]
        if kind < 0.75:
            return body * int(rng.random() * 5)
        if kind < 0.999:
            return rng.randbytes(int(rng.random() * 200))
        return rng.choice((b"\0", b"{", b"[1,", b'{"":')) * rng.choice((20_000, 600_000))

    def _filter(self) -> Input:
        """An expression in a pull, a heartbeat, or the question whether it works."""
        rng = self._rng
        text = expression(rng).encode("utf-8", "replace").decode()
        kind = rng.random()
        if kind < 0.4:
            fields = {
                "consumerGroup": "G", "topic": "T", "queueId": "0", "queueOffset": "0",
                "maxMsgNums": "8", "sysFlag": "4", "commitOffset": "0", "subVersion": "0",
                "suspendTimeoutMillis": "0", "subscription": text, "expressionType": "SQL92",
            }  # fmt: skip
            return self._frame("filter", RequestCode.PULL_MESSAGE, fields, b"")
        data: dict[str, Any] = {
            "topic": rng.choice(("T", "N1")), "subString": text, "subVersion": 1,
            "expressionType": rng.choice(("SQL92", "SQL92", "TAG", "", None)),
            "tagsSet": [], "codeSet": [],
        }  # fmt: skip
        if kind < 0.8:
            asked = {"clientId": "c", "group": "G", "subscriptionData": data}
            return self._frame("filter", RequestCode.CHECK_CLIENT_CONFIG, {}, orjson.dumps(asked))
        consumer = {"groupName": f"N{rng.randint(0, 9)}", "subscriptionDataSet": [data]}
        said = {"clientID": f"c{rng.randint(0, 9)}", "consumerDataSet": [consumer]}
        return self._frame("filter", RequestCode.HEART_BEAT, {}, orjson.dumps(said))

    def _property_text(self) -> str:
        rng = self._rng
        parts = [
            f"{rng.choice(PROPERTY_NAMES)}{rng.choice(_ENDS)}"
            f"{rng.choice(rng.choice((VALUES, NAMES)))}{rng.choice(_BREAKS)}"
            for _ in range(int(rng.random() * 6))
        ]
        return "".join(parts)

    def _properties(self) -> Input:
        """A send whose properties are anything."""
        rng = self._rng
        fields = {
            "a": "P", "b": rng.choice(("T", "T", "T", rng.choice(NAMES))), "c": "TBW102",
            "d": "4", "e": "0", "f": rng.choice(("0", "0", "4", "8", "12", "1", "16")),
            "g": "1700000000000", "h": "0", "i": self._property_text(), "j": "0", "k": "false",
            "m": "false",
        }  # fmt: skip
        body = rng.randbytes(int(rng.random() * 60))
        return self._frame("properties", RequestCode.SEND_MESSAGE_V2, fields, body)

    def _batch(self) -> Input:
        rng = self._rng
        messages = [
            (0, b"body", self._property_text().encode("utf-8", "replace")[:30_000])
            for _ in range(rng.choice((0, 1, 3, 40)))
        ]
        body = encode_batch(messages)
        if rng.random() < 0.7:
            body = self._bytes(body)
        fields = {
            "a": "P", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1",
            "h": "0", "i": "", "j": "0", "k": "false", "m": "true",
        }  # fmt: skip
        return self._frame("batch", RequestCode.SEND_BATCH_MESSAGE, fields, body)

    def _binary(self) -> Input:
        """The other serialisation, with its values changed."""
        code, fields, body = self._pick()
        for name in self._some(list(fields)):
            fields[name] = self._value(name, code, fields[name])
        self._opaque += 1
        command = Command(code & 0x7FFF, fields, body, self._opaque, 0, None, "JAVA", 479, BINARY)
        try:
            return Input("binary", encode(command))
        except ProtocolError:
            return self._field()

    def _code(self) -> Input:
        """Another code, or an answer that nobody waits for."""
        rng = self._rng
        _, fields, body = self._pick()
        code = rng.choice(CODES) if rng.random() < 0.8 else rng.randint(-(1 << 31), 1 << 20)
        if code in MAKERS or code == RequestCode.UPDATE_BROKER_CONFIG:
            code = 0
        self._opaque += 1
        flag = rng.choice((0, 0, 0, FLAG_RESPONSE, FLAG_ONEWAY, -1, 1 << 20))
        values = {
            "code": code, "extFields": fields, "flag": flag, "language": "GO",
            "opaque": self._opaque, "version": rng.choice((0, -1, 479, 1 << 30)),
        }  # fmt: skip
        return Input("code", frame(_header(values), body))

    # --- what may break a connection

    def breaking(self) -> Input:
        """Bytes after which the connection may be closed."""
        rng = self._rng
        make = rng.choice((self._lengths, self._header_bytes, self._header_json, self._noise))
        return Input(make.__name__[1:], make(), breaks=True)

    def _lengths(self) -> bytes:
        rng = self._rng
        whole = bytearray(self._field().data)
        total = rng.choice((0, 3, 4, 5, len(whole), len(whole) - 5, 1 << 24, 1 << 31, 0xFFFFFFFF))
        mark = rng.choice((0, 1, 1 << 24, 2 << 24, 0xFFFFFF, 0x1FFFFFF, len(whole), 1 << 20))
        if rng.random() < 0.5:
            total = struct.unpack_from(">I", whole)[0]
        _PREFIX.pack_into(whole, 0, total, mark)
        return bytes(whole)

    def _header_bytes(self) -> bytes:
        code, fields, body = self._pick()
        header = _header({"code": code, "extFields": fields, "opaque": 1, "flag": 0, "version": 1})
        return frame(self._bytes(header)[:200_000], body, self._rng.choice((0, 0, 1)))

    def _header_json(self) -> bytes:
        """A header of JSON that is none that a peer writes."""
        rng = self._rng
        code, fields, body = self._pick()
        values: dict[str, Any] = {
            "code": code if code not in MAKERS else 0, "extFields": fields, "flag": 0,
            "language": "JAVA", "opaque": 1, "version": 479,
        }  # fmt: skip
        values[rng.choice(list(values))] = self._odd("")
        if fields and rng.random() < 0.5:
            values["extFields"] = {**fields, rng.choice(list(fields)): self._odd("")}
        header = orjson.dumps(values)
        bomb = rng.random()
        if bomb < 0.1:
            header = _references(rng.randint(2, 40))
        elif bomb < 0.15:
            header = b'{"code":' + b"[" * rng.choice((63, 65, 1025, 9000))
        elif bomb < 0.25:
            header = header.replace(b'"', b"", rng.randint(1, 4))
        elif bomb < 0.26:
            header = b"{" + b",".join(b"%d:0" % n for n in range(9000)) + b"}"
        return frame(header, body)

    def _noise(self) -> bytes:
        rng = self._rng
        data = rng.randbytes(rng.randint(1, 300))
        start = rng.choice((b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0", b"PRI * "))
        return start + data


_ENDS: Final = ("\x01", "\x01", "\x01", "\x01", "", "\x02")
_BREAKS: Final = ("\x02", "\x02", "\x02", "\x02", "", "\x01")


def _header(values: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(values)
    except TypeError:  # a lone surrogate
        fields = {
            name.encode("utf-8", "replace").decode(): value.encode("utf-8", "replace").decode()
            for name, value in values["extFields"].items()
        }
        return orjson.dumps(values | {"extFields": fields})


def _references(levels: int) -> bytes:
    """A header whose references double a list with each level."""
    doubled = (
        f'"x{level}":[{{"$ref":"$.extFields.x{level - 1}"}},{{"$ref":"$.extFields.x{level - 1}"}}]'
        for level in range(1, levels)
    )
    return f'{{"code":10,"extFields":{{"x0":[1],{",".join(doubled)}}}}}'.encode()
