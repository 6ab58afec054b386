"""What decoding costs: CPU time that grows no faster than the bytes that a peer has sent, and no
more than a few milliseconds for what is decoded on the loop."""

import contextlib
from collections.abc import Callable
from typing import Final

import pytest

from cost import assert_linear, cpu_s, growth
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.net.limits import BODY_BYTES_MAX, check_fastjson_extensions, check_request
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import queue_from
from sluicemq.wire.frames import Command

pytestmark = pytest.mark.slow

Make = Callable[[int], bytes]


def joined(parts: list[bytes], begin: bytes = b"{", end: bytes = b"}") -> bytes:
    return begin + b",".join(parts) + end


NEST: Final = b"[" * 40 + b"]" * 40
NESTED_KEY: Final = b"{" * 30 + b'"a":0' + b"}:0" * 29 + b"}:%d"
PATH_UP: Final = b'{"$ref":"../../../../../../../../"}'
DOCUMENTS: Final[dict[str, Make]] = {
    "numbers": lambda n: b"{1:" + joined([b"1"] * n, b"[", b"]") + b"}",
    "texts": lambda n: b"{1:" + joined([b'""'] * n, b"[", b"]") + b"}",
    "escapes": lambda n: b'{1:"' + b"\\n" * n + b'"}',
    "lists": lambda n: b"{1:" + joined([b"[]"] * n, b"[", b"]") + b"}",
    "nested": lambda n: b"{1:" + joined([NEST] * (n // 40 + 1), b"[", b"]") + b"}",
    "integer keys": lambda n: joined([b"%d:0" % at for at in range(n)]),
    "integer keys with one hash": lambda n: joined(
        [b"%d:0" % (at * (2**61 - 1)) for at in range(n)]
    ),
    "objects as keys": lambda n: joined([b'{"a":%d}:0' % at for at in range(n)]),
    "an object as key with many fields": lambda n: joined(
        [joined([b'"%d":0' % at for at in range(n)]) + b":0"]
    ),
    "nested keys": lambda n: joined([NESTED_KEY % n] * (n // 30 + 1)),
    "references to the root": lambda n: joined([b'"%d":{"$ref":"$.0"}' % at for at in range(1, n)]),
    "references to lists": lambda n: joined(
        [b'"0":[]', *[b'"%d":{"$ref":"$.0[0]"}' % at for at in range(1, n)]]
    ),
    "references as keys": lambda n: joined(
        [*[b'{"$ref":"$.%d"}:1' % at for at in range(n)], *[b"%d:0" % at for at in range(n)]]
    ),
    "references as keys to a map of object keys": lambda n: joined(
        [*[b'{"$ref":"$.a.%d"}:1' % at for at in range(n)],
         b'"a":' + joined([b'{"q":%d}:0' % at for at in range(n)])]
    ),
    "a long path": lambda n: b'{"a":{"$ref":"$' + b".a" * n + b'"}}',
    "many paths up": lambda n: b'{"a":' + joined([PATH_UP] * n, b"[", b"]") + b"}",
}  # fmt: skip
SMALL: Final = 500


def loads(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        fastjson.loads(data)


@pytest.mark.parametrize("make", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_a_document_costs_as_much_as_it_is_long(make: Make) -> None:
    assert_linear(make, loads, SMALL)


def test_quadratic_work_is_told_from_linear_work() -> None:
    """The measure itself: it would be worth nothing if this passed."""

    def search_all(data: bytes) -> None:
        keys = list(data)
        for _ in keys:
            keys.count(-1)

    assert growth(bytes, search_all, 600) > 30


@pytest.mark.parametrize("make", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("begin", [b"", b" "], ids=["", "after a blank"])
def test_no_body_that_a_request_may_have_takes_longer_than_milliseconds(
    make: Make, begin: bytes
) -> None:
    """Of each family, documents of growing size, up to those that are refused. The bound is ten
    times what a quick machine needs."""

    def serve(body: bytes) -> None:
        with contextlib.suppress(ProtocolError, RequestError):
            check_request(Command(RequestCode.LOCK_BATCH_MQ, {}, body), frozenset())
            check_fastjson_extensions(body)
            fastjson.loads(body)

    count = SMALL
    while len(body := begin + make(count)) < BODY_BYTES_MAX:
        assert cpu_s(serve, lambda body=body: body) < 0.1, f"{count}: {len(body)} bytes"  # type: ignore[misc]
        count = count * 3 // 2


def test_a_text_that_holds_a_queue_is_no_way_around_the_limit() -> None:
    odd = "{1:[" + "1," * 400_000 + "1]}"
    with pytest.raises(ProtocolError, match="more than 32 values"):
        queue_from(odd)
    assert queue_from('{"brokerName":"b","queueId":1,"topic":"T"}').queue_id == 1
