"""A certificate that a server makes for itself, when it has none and a client wants TLS.

    key on the curve P-256 -> X.509 certificate, signed with itself (ECDSA, SHA-256) -> PEM

Nobody can verify it; clients that take it ask for secrecy from those who listen, and nothing more.
So little is needed that neither a library nor the program openssl has to be there: two
multiplications on the curve and a few dozen fields of DER. They run once, for some ten
milliseconds, and how long they take tells nobody anything; all TLS itself is OpenSSL's.

The curve: FIPS 186-5 and SEC 2; the certificate: RFC 5280; keys and signatures in it: RFC 5480,
5758, 5915.
"""

import secrets
from base64 import encodebytes
from hashlib import sha256
from typing import Final

_PRIME: Final = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER: Final = 0xFFFFFFFF_00000000_FFFFFFFF_FFFFFFFF_BCE6FAAD_A7179E84_F3B9CAC2_FC632551
_BASE: Final = (
    0x6B17D1F2_E12C4247_F8BCE6E5_63A440F2_77037D81_2DEB33A0_F4A13945_D898C296,
    0x4FE342E2_FE1A7F9B_8EE7EB4A_7C0F9E16_2BCE3357_6B315ECE_CBB64068_37BF51F5,
)
_SIZE: Final = 32
SERIAL_BITS: Final = 120
_NAME: Final = b"SluiceMQ test mode"
_FIRST_DAY, _LAST_DAY = b"200101000000Z", b"491231235959Z"
"""Wide, so that no clock is asked: neither this server's nor a client's need be right."""

Point = tuple[int, int] | None
"""None: the point at infinity."""

_INTEGER, _BITS, _OCTETS, _OID, _TEXT, _TIME = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x17
_SEQUENCE, _SET, _BOOLEAN = 0x30, 0x31, 0x01
_CURVE: Final = bytes((_OID, 8)) + bytes.fromhex("2a8648ce3d030107")
_EC_KEY: Final = bytes((_OID, 7)) + bytes.fromhex("2a8648ce3d0201")
_ECDSA_SHA256: Final = bytes((_OID, 8)) + bytes.fromhex("2a8648ce3d040302")
_COMMON_NAME, _OTHER_NAMES, _CONSTRAINTS = (
    bytes((_OID, 3)) + bytes.fromhex(text) for text in ("550403", "551d11", "551d13")
)


def self_signed() -> str:
    """Certificate and key, as PEM."""
    secret = _random()
    public = b"\x04" + b"".join(_fixed(part) for part in _times(secret, _BASE) or ())
    curve = _der(_SEQUENCE, _ECDSA_SHA256)
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_TEXT, _NAME))))
    names = _der(_SEQUENCE, _der(0x82, b"localhost"), _der(0x87, bytes((127, 0, 0, 1))))
    is_authority = _der(_SEQUENCE, _der(_BOOLEAN, b"\xff"))
    body = _der(
        _SEQUENCE,
        _der(0xA0, _integer(2)),  # version 3
        _integer(secrets.randbits(SERIAL_BITS)),
        curve,
        name,
        _der(_SEQUENCE, _der(_TIME, _FIRST_DAY), _der(_TIME, _LAST_DAY)),
        name,
        _der(_SEQUENCE, _der(_SEQUENCE, _EC_KEY, _CURVE), _bits(public)),
        _der(
            0xA3,
            _der(
                _SEQUENCE,
                _der(_SEQUENCE, _OTHER_NAMES, _der(_OCTETS, names)),
                _der(_SEQUENCE, _CONSTRAINTS, _der(_OCTETS, is_authority)),
            ),
        ),
    )
    signature = _der(_SEQUENCE, *map(_integer, _sign(body, secret)))
    certificate = _der(_SEQUENCE, body, curve, _bits(signature))
    key = _der(
        _SEQUENCE, _integer(1), _der(_OCTETS, _fixed(secret)), _der(0xA0, _CURVE),
        _der(0xA1, _bits(public)),
    )  # fmt: skip
    return _pem("CERTIFICATE", certificate) + _pem("EC PRIVATE KEY", key)


# ---------------------------------------------------------------------------------- the curve


def _random() -> int:
    return 1 + secrets.randbelow(_ORDER - 1)


def _plus(one: Point, other: Point) -> Point:
    if one is None or other is None:
        return one or other
    (x1, y1), (x2, y2) = one, other
    if x1 == x2:
        if (y1 + y2) % _PRIME == 0:
            return None
        slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, _PRIME)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _PRIME)
    x = (slope * slope - x1 - x2) % _PRIME
    return x, (slope * (x1 - x) - y1) % _PRIME


def _times(factor: int, point: Point) -> Point:
    total: Point = None
    while factor:
        if factor & 1:
            total = _plus(total, point)
        point = _plus(point, point)
        factor >>= 1
    return total


def _sign(data: bytes, secret: int) -> tuple[int, int]:
    digest = int.from_bytes(sha256(data).digest())
    while True:
        nonce = _random()
        point = _times(nonce, _BASE)
        r = point[0] % _ORDER if point else 0
        s = pow(nonce, -1, _ORDER) * (digest + r * secret) % _ORDER
        if r and s:
            return r, s


# ------------------------------------------------------------------------------- the encoding


def _der(tag: int, *parts: bytes) -> bytes:
    data = b"".join(parts)
    size = len(data)
    if size < 0x80:
        return bytes((tag, size)) + data
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + data


def _integer(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1))


def _bits(data: bytes) -> bytes:
    return _der(_BITS, b"\0", data)


def _fixed(value: int) -> bytes:
    return value.to_bytes(_SIZE)


def _pem(what: str, data: bytes) -> str:
    lines = encodebytes(data).decode()
    return f"-----BEGIN {what}-----\n{lines}-----END {what}-----\n"
