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
_FIRST_DAY = b"200101000000Z"
_LAST_DAY = b"491231235959Z"
"""The validity is wide, so that neither the server's clock nor a client's has to be right."""

Point = tuple[int, int] | None
"""The affine coordinates of a point on the curve; None is the point at infinity."""

# The encoding (DER) is a sequence of values, each with a tag (its type), a length and a content.
# These are the tags of the types that the certificate uses.
_INTEGER = 0x02
_BIT_STRING = 0x03
_OCTET_STRING = 0x04
_OID = 0x06
_UTF8_STRING = 0x0C
_UTC_TIME = 0x17
_SEQUENCE = 0x30
_SET = 0x31
_BOOLEAN = 0x01
# Context tags: a field's number in its structure takes the place of its type (RFC 5280, RFC 5915).
# The digit after 0xA or 0x8 is the number of the field.
_VERSION_FIELD = 0xA0
_EXTENSIONS_FIELD = 0xA3
_DNS_NAME_FIELD = 0x82
_IP_ADDRESS_FIELD = 0x87
_KEY_CURVE_FIELD = 0xA0
_KEY_PUBLIC_FIELD = 0xA1
_X509_VERSION_3: Final = 2
_EC_KEY_VERSION_1: Final = 1
_TRUE: Final = b"\xff"

# Object identifiers, each with its tag and length.
_CURVE: Final = bytes((_OID, 8)) + bytes.fromhex("2a8648ce3d030107")
_EC_KEY: Final = bytes((_OID, 7)) + bytes.fromhex("2a8648ce3d0201")
_ECDSA_SHA256: Final = bytes((_OID, 8)) + bytes.fromhex("2a8648ce3d040302")
_COMMON_NAME: Final = bytes((_OID, 3)) + bytes.fromhex("550403")
_ALTERNATIVE_NAMES: Final = bytes((_OID, 3)) + bytes.fromhex("551d11")
_BASIC_CONSTRAINTS: Final = bytes((_OID, 3)) + bytes.fromhex("551d13")


def make_self_signed_pem() -> str:
    """Make a private key and a certificate for localhost and 127.0.0.1. Return both as PEM."""
    private_key = _choose_random_scalar()
    public_point = _multiply_point(private_key, _BASE_POINT)
    assert public_point is not None, "a multiple below the order is not the point at infinity"
    x, y = public_point
    public_key = b"\x04" + _encode_scalar(x) + _encode_scalar(y)  # 4: both coordinates follow

    certificate = _make_certificate(private_key, public_key)
    key = _encode_der(
        _SEQUENCE,
        _encode_der_integer(_EC_KEY_VERSION_1),
        _encode_der(_OCTET_STRING, _encode_scalar(private_key)),
        _encode_der(_KEY_CURVE_FIELD, _CURVE),
        _encode_der(_KEY_PUBLIC_FIELD, _encode_der_bits(public_key)),
    )
    return _encode_pem("CERTIFICATE", certificate) + _encode_pem("EC PRIVATE KEY", key)


def _make_certificate(private_key: int, public_key: bytes) -> bytes:
    """Make the certificate of `public_key` in DER, signed with `private_key`.

    The fields are in the order of RFC 5280, section 4.1. Issuer and subject are the same name,
    because the certificate is self-signed.
    """
    common_name = _encode_der(_SEQUENCE, _COMMON_NAME, _encode_der(_UTF8_STRING, _NAME))
    distinguished_name = _encode_der(_SEQUENCE, _encode_der(_SET, common_name))
    validity = _encode_der(
        _SEQUENCE, _encode_der(_UTC_TIME, _FIRST_DAY), _encode_der(_UTC_TIME, _LAST_DAY)
    )
    key_algorithm = _encode_der(_SEQUENCE, _EC_KEY, _CURVE)
    signature_algorithm = _encode_der(_SEQUENCE, _ECDSA_SHA256)

    signed_part = _encode_der(
        _SEQUENCE,
        _encode_der(_VERSION_FIELD, _encode_der_integer(_X509_VERSION_3)),
        _encode_der_integer(secrets.randbits(SERIAL_BITS)),
        signature_algorithm,
        distinguished_name,  # the issuer
        validity,
        distinguished_name,  # the subject
        _encode_der(_SEQUENCE, key_algorithm, _encode_der_bits(public_key)),
        _encode_der(_EXTENSIONS_FIELD, _encode_extensions()),
    )
    r, s = _sign(signed_part, private_key)
    signature = _encode_der(_SEQUENCE, _encode_der_integer(r), _encode_der_integer(s))
    return _encode_der(_SEQUENCE, signed_part, signature_algorithm, _encode_der_bits(signature))


def _encode_extensions() -> bytes:
    """Encode the extensions of the certificate in DER: its host names, and that it may sign.

    It signs itself, so it must be marked as the certificate of an authority.
    """
    host_names = _encode_der(
        _SEQUENCE,
        _encode_der(_DNS_NAME_FIELD, b"localhost"),
        _encode_der(_IP_ADDRESS_FIELD, bytes((127, 0, 0, 1))),
    )
    is_authority = _encode_der(_SEQUENCE, _encode_der(_BOOLEAN, _TRUE))
    return _encode_der(
        _SEQUENCE,
        _encode_der(_SEQUENCE, _ALTERNATIVE_NAMES, _encode_der(_OCTET_STRING, host_names)),
        _encode_der(_SEQUENCE, _BASIC_CONSTRAINTS, _encode_der(_OCTET_STRING, is_authority)),
    )


# ---------------------------------------------------------------------------------- the curve


def _choose_random_scalar() -> int:
    """Return a random private key or nonce."""
    return 1 + secrets.randbelow(_ORDER - 1)


def _add_points(first_point: Point, second_point: Point) -> Point:
    """Return the sum of two points of the elliptic curve. None is the point at infinity."""
    if first_point is None:
        return second_point
    if second_point is None:
        return first_point

    x1, y1 = first_point
    x2, y2 = second_point
    if x1 == x2:
        if (y1 + y2) % _PRIME == 0:
            return None
        # The points are the same: take the slope of the tangent, (3x² + a) / 2y with a = -3.
        slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, _PRIME)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _PRIME)
    x = (slope * slope - x1 - x2) % _PRIME
    return x, (slope * (x1 - x) - y1) % _PRIME


def _multiply_point(factor: int, point: Point) -> Point:
    """Return the point of the elliptic curve that is `factor` times `point`.

    The point is doubled for each bit of `factor`. None is the point at infinity.
    """
    product: Point = None
    while factor:
        if factor & 1:
            product = _add_points(product, point)
        point = _add_points(point, point)
        factor >>= 1
    return product


def _sign(signed_part: bytes, private_key: int) -> tuple[int, int]:
    """Sign `signed_part` with ECDSA. Return the signature (r, s).

    Another nonce is chosen if r or s becomes 0, as the standard demands.
    """
    digest = int.from_bytes(sha256(signed_part).digest())
    while True:
        nonce = _choose_random_scalar()
        point = _multiply_point(nonce, _BASE_POINT)
        r = point[0] % _ORDER if point else 0
        s = pow(nonce, -1, _ORDER) * (digest + r * private_key) % _ORDER
        if r and s:
            return r, s


# ------------------------------------------------------------------------------- the encoding


def _encode_der(tag: int, *parts: bytes) -> bytes:
    """Encode a DER value: this tag, and the joined parts as content."""
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    # A longer content is preceded by the number of bytes of its size, and the size.
    size_bytes = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(size_bytes))) + size_bytes + content


def _encode_der_integer(number: int) -> bytes:
    """Return a DER integer. It has room for a sign bit, so `number` must not be negative."""
    return _encode_der(_INTEGER, number.to_bytes(number.bit_length() // 8 + 1))


def _encode_der_bits(whole_bytes: bytes) -> bytes:
    """Return a DER bit string of whole bytes, so that 0 bits of its last byte are unused."""
    return _encode_der(_BIT_STRING, b"\0", whole_bytes)


def _encode_scalar(scalar: int) -> bytes:
    """Return a coordinate or a private key as 32 bytes, the first byte being the highest."""
    return scalar.to_bytes(_SCALAR_BYTES)


def _encode_pem(label: str, content: bytes) -> str:
    """Return `content` in base64 between the lines that PEM puts around a `label`."""
    lines = encodebytes(content).decode()
    return f"-----BEGIN {label}-----\n{lines}-----END {label}-----\n"
