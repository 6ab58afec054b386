"""The broker: stores messages, delivers them, and knows which client consumes what.

    server          sockets, name servers, background jobs: the only module that waits, besides
                    registration
    registration    registration with name servers
    table           the dispatch table: which handler answers which request code
    state           the components of a broker, and how they are connected
    group_commit    commits messages in groups, and sends their answers afterwards
    background      time slices of work that no request waits for
    topics          topics and consumer groups
    offsets         committed offsets and their resets
    documents       the JSON files of a broker
    consume/        what consumers request: membership, pulls, offsets
    pop/            consuming by pop: checkpoints, acknowledgements
    lanes/          members of one group with different subscriptions
    produce/        sends, and messages that consumers send back
    transactions/ waiting/ epochs/    messages that are stored but not visible yet
    replication/ failover/            replicas and the election of a master
    admin/          what tools request and change

A handler is a function of (command, peer), or of (header, command, peer); see `table.py`. It
returns its answer as bytes or a Command, or one of the values in `group_commit.py`: `Durable` (the
answer is sent when the log is durable), `Parked` (when messages arrive), `Announced` (when a change
is saved and registered), `Postponed` (when steps of work have ended).
"""
