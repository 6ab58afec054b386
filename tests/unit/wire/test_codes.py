"""The numbers of the protocol."""

from sluicemq.wire.codes import RequestCode, ResponseCode


def test_numbers_are_those_of_rocketmq() -> None:
    assert RequestCode.SEND_MESSAGE_V2 == 310
    assert RequestCode.PULL_MESSAGE == 11
    assert RequestCode.GET_ROUTEINFO_BY_TOPIC == 105
    assert RequestCode.POP_MESSAGE == 200050
    assert ResponseCode.PULL_OFFSET_MOVED == 21
    assert ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST == 26


def test_no_number_has_two_names() -> None:
    for codes in (RequestCode, ResponseCode):
        assert len(codes.__members__) == len(set(codes))


def test_numbers_that_no_broker_serves_have_no_name() -> None:
    assert not {13, 22, 23, 27, 47, 209, 210, 211, 213, 214, 301, 302} & set(RequestCode)
