"""A self-signed certificate, for a server in test mode that has none when a client uses TLS.

    key on the curve P-256 -> X.509 certificate, signed with that key (ECDSA, SHA-256) -> PEM

No client can verify such a certificate. It protects against eavesdropping and nothing more. So
little code is needed that neither a library nor the openssl program has to be installed: two
multiplications on the curve, and a few dozen fields of DER. They run once, for about 10 ms. Their
time depends on the key, which reveals nothing useful. All of TLS itself is OpenSSL's.

The curve is defined in FIPS 186-5 and SEC 2, the certificate in RFC 5280, and its keys and
signatures in RFC 5480, 5758 and 5915.
"""

import secrets
from base64 import encodebytes
from hashlib import sha256
from typing import Final

_PRIME: Final = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER: Final = 0xFFFFFFFF_00000000_FFFFFFFF_FFFFFFFF_BCE6FAAD_A7179E84_F3B9CAC2_FC632551
_BASE_POINT: Final = (
    0x6B17D1F2_E12C4247_F8BCE6E5_63A440F2_77037D81_2DEB33A0_F4A13945_D898C296,
    0x4FE342E2_FE1A7F9B_8EE7EB4A_7C0F9E16_2BCE3357_6B315ECE_CBB64068_37BF51F5,
)
_SCALAR_BYTES: Final = 32
SERIAL_BITS: Final = 120
_NAME: Final = b"SluiceMQ test mode"
_FIRST_DAY, _LAST_DAY = b"200101000000Z", b"491231235959Z"
"""The validity is wide, so that neither the server's clock nor a client's has to be right."""

Point = tuple[int, int] | None
"""The affine coordinates of a point on the curve; None is the point at infinity."""

# DER: tags, then object identifiers with tag and length.
_INTEGER, _BIT_STRING, _OCTET_STRING, _OID, _UTF8_STRING, _UTC_TIME = (
    0x02,
    0x03,
    0x04,
    0x06,
    0x0C,
    0x17,
)
_SEQUENCE, _SET, _BOOLEAN = 0x30, 0x31, 0x01
_CURVE: Final = bytes((_OID, 8)) + bytes.fromhex("2a8648ce3d030107")
_EC_KEY: Final = bytes((_OID, 7)) + bytes.fromhex("2a8648ce3d0201")
_ECDSA_SHA256: Final = bytes((_OID, 8)) + bytes.fromhex("2a8648ce3d040302")
_COMMON_NAME: Final = bytes((_OID, 3)) + bytes.fromhex("550403")
_ALTERNATIVE_NAMES: Final = bytes((_OID, 3)) + bytes.fromhex("551d11")
_BASIC_CONSTRAINTS: Final = bytes((_OID, 3)) + bytes.fromhex("551d13")


def make_self_signed_pem() -> str:
    """Return a new certificate for localhost and 127.0.0.1, and its private key, as PEM."""
    secret = _random_scalar()
    public_point = _multiply(secret, _BASE_POINT)
    public = b"\x04" + b"".join(_scalar_bytes(part) for part in public_point or ())
    algorithm = _der(_SEQUENCE, _ECDSA_SHA256)
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8_STRING, _NAME))))
    names = _der(_SEQUENCE, _der(0x82, b"localhost"), _der(0x87, bytes((127, 0, 0, 1))))
    is_authority = _der(_SEQUENCE, _der(_BOOLEAN, b"\xff"))
    body = _der(
        _SEQUENCE,
        _der(0xA0, _der_integer(2)),  # version 3
        _der_integer(secrets.randbits(SERIAL_BITS)),
        algorithm,
        name,
        _der(_SEQUENCE, _der(_UTC_TIME, _FIRST_DAY), _der(_UTC_TIME, _LAST_DAY)),
        name,
        _der(_SEQUENCE, _der(_SEQUENCE, _EC_KEY, _CURVE), _der_bits(public)),
        _der(
            0xA3,
            _der(
                _SEQUENCE,
                _der(_SEQUENCE, _ALTERNATIVE_NAMES, _der(_OCTET_STRING, names)),
                _der(_SEQUENCE, _BASIC_CONSTRAINTS, _der(_OCTET_STRING, is_authority)),
            ),
        ),
    )
    signature = _der(_SEQUENCE, *map(_der_integer, _sign(body, secret)))
    certificate = _der(_SEQUENCE, body, algorithm, _der_bits(signature))
    key = _der(
        _SEQUENCE,
        _der_integer(1),
        _der(_OCTET_STRING, _scalar_bytes(secret)),
        _der(0xA0, _CURVE),
        _der(0xA1, _der_bits(public)),
    )
    return _pem("CERTIFICATE", certificate) + _pem("EC PRIVATE KEY", key)


# ---------------------------------------------------------------------------------- the curve


def _random_scalar() -> int:
    """Return a random private key or nonce."""
    return 1 + secrets.randbelow(_ORDER - 1)


def _add(one: Point, other: Point) -> Point:
    """Return the sum of two points."""
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


def _multiply(factor: int, point: Point) -> Point:
    """Return the sum of `factor` times the point."""
    total: Point = None
    while factor:
        if factor & 1:
            total = _add(total, point)
        point = _add(point, point)
        factor >>= 1
    return total


def _sign(data: bytes, secret: int) -> tuple[int, int]:
    """Return the ECDSA signature (r, s) of `data` with the private key `secret`."""
    digest = int.from_bytes(sha256(data).digest())
    while True:
        nonce = _random_scalar()
        point = _multiply(nonce, _BASE_POINT)
        r = point[0] % _ORDER if point else 0
        s = pow(nonce, -1, _ORDER) * (digest + r * secret) % _ORDER
        if r and s:
            return r, s


# ------------------------------------------------------------------------------- the encoding


def _der(tag: int, *parts: bytes) -> bytes:
    """Return a DER value with this tag, whose content is the parts joined."""
    data = b"".join(parts)
    size = len(data)
    if size < 0x80:
        return bytes((tag, size)) + data
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + data


def _der_integer(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1))


def _der_bits(data: bytes) -> bytes:
    return _der(_BIT_STRING, b"\0", data)


def _scalar_bytes(value: int) -> bytes:
    return value.to_bytes(_SCALAR_BYTES)


def _pem(label: str, data: bytes) -> str:
    lines = encodebytes(data).decode()
    return f"-----BEGIN {label}-----\n{lines}-----END {label}-----\n"
