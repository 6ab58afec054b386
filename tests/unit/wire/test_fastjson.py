"""fastjson's JSON, both ways (spec/remoting.md §5)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.errors import ProtocolError
from sluicemq.wire import fastjson

MQ = (("brokerName", "b"), ("queueId", 0), ("topic", "T"))
MQ_TEXT = '{"brokerName":"b","queueId":0,"topic":"T"}'


def test_integer_keys_are_integers_only_without_quotes() -> None:
    assert fastjson.loads('{0:"a",-1:"b"}') == {0: "a", -1: "b"}
    assert fastjson.loads('{"0":"a"}') == {"0": "a"}


def test_objects_as_keys_become_sorted_pairs() -> None:
    text = '{"offsetTable":{{"topic":"T","queueId":0,"brokerName":"b"}:5}}'
    assert fastjson.loads(text) == {"offsetTable": {MQ: 5}}
    assert fastjson.make_object_key({"topic": "T", "queueId": 0, "brokerName": "b"}) == MQ


def test_the_fastjson_form_is_written_as_java_writes_it() -> None:
    assert fastjson.dumps({"offsetTable": {MQ: {"b": 1, "a": 2}}}) == (
        b'{"offsetTable":{' + MQ_TEXT.encode() + b':{"a":2,"b":1}}}'
    )
    assert fastjson.dumps({"z": {10: "x", 2: "y"}, "a": [1, "t", True, 0.5]}) == (
        b'{"a":[1,"t",true,0.5],"z":{2:"y",10:"x"}}'
    )


def test_null_is_left_out_of_objects_but_not_out_of_lists() -> None:
    assert fastjson.dumps({"a": None, "b": [None], "c": {"d": None}}) == b'{"b":[null],"c":{}}'
    assert fastjson.dumps({"a": "null", "b": 1}) == b'{"a":"null","b":1}'
    assert fastjson.dumps(None) == b"null"


def test_references_are_followed() -> None:
    assert fastjson.loads('{"a":{{"x":1}:7,"s":[1,2]},"b":{"$ref":"$.a.s"}}')["b"] == [1, 2]
    assert fastjson.loads('{1:2,"a":[{"q":1},{"$ref":"$.a[0]"}]}')["a"][1] == {"q": 1}
    assert fastjson.loads('{1:2,"a":{"$ref":"$.nowhere"}}')["a"] is None


@pytest.mark.parametrize(
    "text",
    ['{1:2,"a":{"$ref":"$"}}', '{"a":{"b":{"$ref":"@"}}}', '{1:{"a":{"b":5,"c":{"$ref":".."}}}}'],
)
def test_a_value_that_holds_itself_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="too many values"):
        fastjson.loads(text)


def test_references_that_double_with_each_level_are_refused_at_once() -> None:
    doubled = ",".join(
        f'"x{n}":[{{"$ref":"$.x{n - 1}"}},{{"$ref":"$.x{n - 1}"}}]' for n in range(1, 40)
    )
    with pytest.raises(ProtocolError, match="too many values"):
        fastjson.loads(f'{{"x0":[1,1],{doubled}}}')


def test_text_that_only_the_small_parser_reads_may_have_so_many_values() -> None:
    assert len(fastjson.loads("{0:1,2:3}", 5)) == 2
    with pytest.raises(ProtocolError, match="too many values to be parsed tolerantly"):
        fastjson.loads("{0:1,2:3}", 4)


def test_references_in_plain_json_are_followed_too() -> None:
    text = '{"consumerTable":{"c":{"q":5}},"messageQueueTable":{"$ref":"$.consumerTable.c"}}'
    assert fastjson.loads(text)["messageQueueTable"] == {"q": 5}


def test_a_reference_as_key_means_the_only_key_of_that_map() -> None:
    text = (
        '{"mqPopTable":{' + MQ_TEXT + ':{"p":1}},"mqTable":{{"$ref":"$.mqPopTable.null"}:{"q":2}}}'
    )
    assert fastjson.loads(text)["mqTable"] == {MQ: {"q": 2}}


def test_numbers_may_carry_their_java_type() -> None:
    assert fastjson.loads("{0:[1L,2.5D,-3,1e3,7F,1.0]}") == {0: [1, 2.5, -3, 1000.0, 7, 1.0]}


def test_texts_keep_escapes_quotes_and_line_ends() -> None:
    assert fastjson.loads('{0:"a\\"b\\u00e9\\n\tc"}') == {0: 'a"bé\n\tc'}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{0", "{0:", "{0:1", "{0:1,", "[1", '{0:"a', "{0:1}x", "{0:tru}", "{[1]:2}",
        "{{[1]:2}:3}", "{0:'a'}", '{0:"\\x"}', "{0:-}", "[" * 1000, "{0:" * 1000,
        "{0:" + "9" * 5000 + "}", "undefined", "{{\"a\":[1]}:2}",
    ],
)  # fmt: skip
def test_bad_text_is_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError):
        fastjson.loads(text)


def test_a_file_is_plain_json_with_quoted_integer_keys() -> None:
    text = fastjson.dumps_file({"offsetTable": {"T@G": {1: 5, 0: 7}}, "a": 1})
    assert json.loads(text) == {"a": 1, "offsetTable": {"T@G": {"0": 7, "1": 5}}}
    assert text.index('"a"') < text.index('"offsetTable"')


def test_a_pretty_file_is_laid_out_as_fastjson_does() -> None:
    value = {
        "a": {}, "b": {0: 1, 1: 2}, "c": [5, [], {"x": True}], "d": (1, 2), "e": None,
        "f": {0: {"n": "\u00e9\n"}, 1: [1]},
    }  # fmt: skip
    assert fastjson.dumps_pretty(value) == (
        '{\n\t"a":{},\n\t"b":{0:1,1:2\n\t},\n\t"c":[\n\t\t5,\n\t\t[],\n\t\t{\n\t\t\t"x":true\n\t\t}'
        '\n\t],\n\t"d":[1,2],\n\t"f":{0:{\n\t\t\t"n":"é\\n"\n\t\t},1:[\n\t\t\t1\n\t\t]\n\t}\n}'
    )


def test_objects_as_keys_stay_so_in_a_pretty_file() -> None:
    text = fastjson.dumps_pretty({"a": {MQ: 5}})
    assert text == f'{{\n\t"a":{{\n\t\t{MQ_TEXT}:5\n\t}}\n}}'
    assert fastjson.loads(text) == {"a": {MQ: 5}}


_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()
_TREES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers(0, 99), inner)
    ),
    max_leaves=20,
)


@given(_TREES)
def test_a_pretty_file_reads_back_without_its_nulls(value: object) -> None:
    def without_nulls(tree: object) -> object:
        if isinstance(tree, dict):
            kept = {key: item for key, item in tree.items() if item is not None}
            return {key: without_nulls(item) for key, item in kept.items()}
        return [without_nulls(item) for item in tree] if isinstance(tree, list) else tree

    text = fastjson.dumps_pretty({"tree": value} if value is not None else {})
    assert fastjson.loads(text).get("tree") == without_nulls(value)


def test_values_become_the_text_that_java_would_see() -> None:
    assert fastjson.to_text("x") == "x"
    assert fastjson.to_text(5) == "5"
    assert fastjson.to_text(True) == "true"
    assert fastjson.to_text([1, "a"]) == '[1,"a"]'


def test_bytes_and_memoryviews_are_read() -> None:
    assert fastjson.loads(b'{0:"\xc3\xa9"}') == {0: "é"}
    assert fastjson.loads(memoryview(b'{"a":1}')) == {"a": 1}
    assert fastjson.loads(memoryview(b"{0:1}")) == {0: 1}
