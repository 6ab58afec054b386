from sluicemq.filter.evaluate import BLANKS, has_surrogate, utf16_units


def test_a_character_beyond_16_bits_becomes_two_units() -> None:
    assert utf16_units("x😀中") == "x\ud83d\ude00中"


def test_half_characters_are_seen() -> None:
    assert has_surrogate("x\ud83d")
    assert not has_surrogate("x😀中")


def test_blanks_are_what_java_trims() -> None:
    assert len(BLANKS) == 33
    assert "\u00a0" not in BLANKS
