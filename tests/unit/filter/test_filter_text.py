from sluicemq.filter.evaluate import JAVA_TRIM_CHARACTERS, has_surrogate, to_utf16_units


def test_a_character_beyond_16_bits_becomes_two_units() -> None:
    assert to_utf16_units("x😀中") == "x\ud83d\ude00中"


def test_single_surrogates_are_detected() -> None:
    assert has_surrogate("x\ud83d")
    assert not has_surrogate("x😀中")


def test_trimmed_characters_are_those_of_java() -> None:
    assert len(JAVA_TRIM_CHARACTERS) == 33
    assert "\u00a0" not in JAVA_TRIM_CHARACTERS
