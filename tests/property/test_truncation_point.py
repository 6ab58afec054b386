"""Where two logs part, told by their epochs, is where their bytes part."""

from hypothesis import given
from hypothesis import strategies as st

from sluicemq.wire.ha import LogTerm, common_end

Written = list[int]
"""A log: each byte is the epoch that wrote it."""


@st.composite
def logs(draw: st.DrawFn) -> list[Written]:
    """Three replicas after some epochs: each has one master, who appends, and others that have
    followed it, cut at where they part from it, or were away."""
    replicas: list[Written] = [[], [], []]
    for epoch in range(1, draw(st.integers(1, 6)) + 1):
        master = replicas[draw(st.integers(0, 2))]
        master += [epoch] * draw(st.integers(1, 4))
        for replica in replicas:
            if replica is not master and draw(st.booleans()):
                replica[:] = master[: draw(st.integers(common(replica, master), len(master)))]
    return replicas


def common(one: Written, other: Written) -> int:
    """By their bytes: an epoch has one master, so equal epochs at equal places are equal bytes."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def epochs_of(log: Written) -> list[LogTerm]:
    return [LogTerm(e, at) for at, e in enumerate(log) if at == 0 or log[at - 1] != e]


@given(logs())
def test_logs_part_where_their_epochs_say(replicas: list[Written]) -> None:
    for one in replicas:
        for other in replicas:
            found = common_end(epochs_of(one), len(one), epochs_of(other), len(other))
            assert max(found, 0) == common(one, other)
