"""Messages of apache.rocketmq.v2: numbers of the wire, and who may live beside them."""

import pytest

pytest.importorskip("google.protobuf")

from google.protobuf import descriptor_pool

from sluicemq.proxy import messages as m


def test_a_message_has_the_numbers_of_the_wire() -> None:
    """By hand: field 1 of the request is a message, whose topic is 1, properties 2, body 4."""
    request = m.SendMessageRequest()
    message = request.messages.add(body=b"b")
    message.topic.name = "T"
    message.user_properties["k"] = "v"
    message.system_properties.tag = "A"
    written = request.SerializeToString()
    assert written == bytes.fromhex("0a150a0312015412060a016b1201761a030a0141220162")
    assert m.SendMessageRequest.FromString(written) == request
    assert (m.Code.OK, m.Code.TOPIC_NOT_FOUND, m.ClientType.SIMPLE_CONSUMER) == (20000, 40402, 3)


def test_an_unknown_field_is_given_back_as_it_came() -> None:
    """What a newer client says in its settings is echoed."""
    settings = m.Settings.FromString(b"\x08\x01" + b"\x4a\x06\x0a\x01a\x12\x01b")
    assert settings.client_type == m.ClientType.PRODUCER
    assert settings.SerializeToString().endswith(b"\x4a\x06\x0a\x01a\x12\x01b")


def test_the_pool_of_the_process_is_left_to_others() -> None:
    """The official Python client puts other messages of these names there."""
    assert m.Resource.DESCRIPTOR.file.pool is not descriptor_pool.Default()  # type: ignore[attr-defined]
