"""Strings as Java sees them: UTF-16 units, and what its trim() takes away."""

# What String.trim() of Java removes: everything up to the space.
BLANKS = "".join(map(chr, range(0x21)))


def has_surrogate(text: str) -> bool:
    """Does it hold half a character (possible in Java strings and in JSON, not in UTF-8)?"""
    return any("\ud800" <= character <= "\udfff" for character in text)


def utf16_units(text: str) -> str:
    """One character a UTF-16 unit: what lies above U+FFFF becomes its two surrogates."""
    data = text.encode("utf-16-be", "surrogatepass")
    return "".join(chr(data[at] << 8 | data[at + 1]) for at in range(0, len(data), 2))
