"""Every exception that SluiceMQ raises, as a tree of subclasses.

    SluiceError
    ├── ConfigurationError        a key, value or option of the user is wrong
    ├── ProtocolError             the bytes received do not follow the protocol
    ├── FilterError               a filter expression is wrong
    │   ├── FilterSyntaxError         it does not compile
    │   └── FilterEvaluationError     it cannot be evaluated on this message: no match
    ├── StoreError                the store on disk cannot do what was asked
    │   ├── StoreLockedError          another living process uses it
    │   ├── StoreDamagedError         durable bytes have changed, or a file has another size
    │   ├── StoreFullError            no space is left: writes are refused
    │   ├── StoreTransientError       a resource of the system is exhausted: retrying works later
    │   ├── StoreUncertainError       what was written may reappear after a restart
    │   └── MessageIllegalError       the message exceeds a limit of the store
    ├── ConsensusError            the consensus service did not respond
    ├── RequestError              a server responded with an error code
    │   ├── TopicNotFoundError
    │   ├── GroupNotFoundError
    │   └── PermissionDeniedError
    └── ClientError               the client could not do what was asked
        ├── NameServerUnreachableError
        ├── RouteNotFoundError
        ├── ConnectionLostError
        ├── RequestTimeoutError
        ├── SendError                 the message was not stored
        │   └── SendUnknownError          it may be stored: do not resend it blindly
        ├── SubscriptionConflictError
        ├── OffsetOutOfRangeError
        ├── MessageNotFoundError
        ├── UndecodableBodyError      the body of a message cannot be decompressed
        ├── MessageKeyMissingError    an idempotent handler cannot identify the message
        ├── ClosedError
        └── RetryLaterError           raised by a handler to have the message redelivered

Errors of single components, which applications do not catch by name:

    SluiceError
    ├── BrokerClosedError         a broker could not change its role and is closed
    ├── ReplicaBlockedError       a replica needs a decision of an operator
    ├── CallError                 a proxy refused a gRPC call of a command
    ├── StatusError               the status with which a proxy refuses a call
    ├── ConfigurationError
    │   ├── OptionError               the value of an option of a command is invalid
    │   └── RowError                  Spark cannot send a row
    ├── ProtocolError
    │   ├── HeaderError               the header of a request is invalid
    │   └── Http2Error                the bytes at a proxy's port are not HTTP/2
    └── RequestError
        ├── NotMasterError            the replica is not the master
        └── PullRefusedError          a broker refuses a pull

The text of every error names the value, the limit and the fix. `error.fix` is the fix alone. Errors
never contain secrets. `sluice explain error NAME` explains one of them.
"""

# The docstring of a class is its page of the documentation: a summary, then the sections When, Then
# and Fix, then an example. `sluice explain error NAME` prints it, and docs/errors.md is made of all
# of them. Below its text, an error shows the command that prints its page (design/0028).

import functools
from typing import Final


def install_extra(name: str) -> str:
    """Return a text that tells the user how to install the extra `name`.

    SluiceMQ is not in a package index yet, so the text names a checkout or a wheel.
    """
    return (
        f"Install the extra {name!r}: pip install '.[{name}]' in the checkout,"
        f" or the path of the wheel followed by [{name}]."
    )


PUBLISHED_PAGES: Final = {
    "broker.consume.pull_checks.PullRefusedError": "broker.consume.pull.PullRefusedError",
    "broker.failover.forward.NotMasterError": "replication.forward.NotMasterError",
    "broker.failover.replica.BrokerClosedError": "replication.replica.BrokerClosedError",
    "broker.failover.replica.ReplicaBlockedError": "replication.replica.ReplicaBlockedError",
}
"""Former page names of error classes that have moved, by the class's module and name today.

Errors of components were once shown with their module. `sluice explain error` still accepts these
names, because they are in logs and tracebacks.
"""


COMPONENT_ERRORS: Final = (
    "broker.consume.pull_checks.PullRefusedError",
    "broker.failover.forward.NotMasterError",
    "broker.failover.replica.BrokerClosedError",
    "broker.failover.replica.ReplicaBlockedError",
    "cli.ending.OptionError",
    "net.grpc.CallError",
    "proxy.limits.StatusError",
    "spark.rows.RowError",
    "wire.declare.HeaderError",
    "wire.http2.Http2Error",
)
"""The public error classes of other modules, by the class's module and name today."""


class SluiceError(Exception):
    """The base class of all errors of SluiceMQ. `fix` says what the user can do about the error.

    When: it is never raised itself. Catch it to catch every error of SluiceMQ.
    Then: what was done depends on the subclass.
    Fix: follow the last sentence of the text, which is also the attribute `fix`.
    """

    def __init__(self, text: str, *, fix: str = "") -> None:
        super().__init__(f"{text} {fix}".rstrip())
        self.fix = fix

    @functools.cached_property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """The lines that tracebacks print below the text: the command that shows the page.

        The list is made on first use, and `add_note` appends to it.
        """
        return [f"More: sluice explain error {self.page()}"]

    @classmethod
    def page(cls) -> str:
        """Return the name of the page about this class, as `sluice explain error` accepts it.

        It is the name of the class. A class that is neither in this module nor in
        `COMPONENT_ERRORS` has its module in front.
        """
        path = f"{cls.__module__}.{cls.__qualname__}".removeprefix("sluicemq.")
        return cls.__qualname__ if path in COMPONENT_ERRORS else path.removeprefix("errors.")

    @property
    def fact(self) -> str:
        """The text without the fix and the final period, for an error that quotes this one."""
        return str(self).removesuffix(self.fix).rstrip().removesuffix(".")


class ConfigurationError(SluiceError):
    """A key, value or option is wrong. The text names it and the range of allowed values.

    When: a client, server, pipeline or command is given something that it cannot work with: an
    unknown name, a value out of range, a port in use, a package that is not installed.
    Then: nothing was sent, stored or started.
    Fix: correct what the text names. Repeating the same call fails again.

        Port 9876 is already in use (127.0.0.1:9876). Stop the other process, or configure another
        port.
    """


class ProtocolError(SluiceError):
    """The bytes received do not follow the protocol. The connection must be closed.

    When: the server at that port does not speak RocketMQ's protocol, a response is cut short or
    contradicts itself, or a text is not the address or message id that it should be.
    Then: the connection is closed, and all requests that wait for a response on it fail. The
    request whose response is unreadable may have been carried out or not.
    Fix: check the port. The default is 9876 for a name server, 10911 for a broker and 8081 for a
    proxy.

        'broker-a' is not an address. Write host:port, for example 127.0.0.1:10911.
    """


class FilterError(SluiceError):
    """A filter expression is wrong.

    When: it is never raised itself. Catch it to catch both kinds of wrong expressions.
    Then: no message is lost. An expression that does not compile subscribes to nothing.
    Fix: run `sluice filter check 'EXPRESSION'`, which shows what the expression means and what is
    wrong in it.
    """


class FilterSyntaxError(FilterError):
    """The filter expression does not compile. `position` is the index of the wrong character.

    When: `subscribe` is called with such an expression, before any request is sent, or a broker
    refuses the expression.
    Then: nothing is subscribed, and no message is read.
    Fix: correct the expression where the text points. `sluice filter check` shows the position and
    what may follow there.

        The tag expression '||' has separators but no tag. Write TagA || TagB, or * for all
        messages.
    """

    def __init__(self, text: str, *, position: int = 0, fix: str = "") -> None:
        super().__init__(text, fix=fix)
        self.position = position


class FilterEvaluationError(FilterError):
    """The filter expression cannot be evaluated on a message, so the message does not match.

    When: an SQL92 filter uses a property as a number, and the property of the message is not a
    number. The error is counted and shown (`sluice filter test`, `sluice explain message`). It is
    not raised to consumers.
    Then: that message does not match, as in RocketMQ. Other messages are not affected.
    Fix: send the property in the form that the expression uses, or write the literal so that it
    accepts more values (30.0 instead of 30). `reason` is the text without the value of this
    message, so that errors can be counted by it.

        a condition on the left cannot be compared with the string 'x'. Put the property on the
        left: a = TRUE.
    """

    def __init__(self, text: str, *, fix: str = "", reason: str = "") -> None:
        super().__init__(text, fix=fix)
        self.reason = reason or self.fact


class StoreError(SluiceError):
    """The store cannot do what was asked.

    When: reading or writing the disk fails, the log of a replica does not match its master's, or a
    `sluice store` command is given a directory that it must not change.
    Then: the request was not carried out. If a write failed half-way, the text says what may be
    left of it.
    Fix: follow the text, and check the disk and the log of the broker. Producers get a
    `RequestError`.

        /data/copy is not a backup. Specify a directory that `sluice store backup` has written.
    """


class StoreLockedError(StoreError):
    """Another living process uses the store directory.

    When: a broker starts on, or `sluice store` writes to, the directory of a running broker.
    Then: nothing was changed. The lock of a process that has died is ignored.
    Fix: stop the process that the text names, or give this broker another directory.

        /data/store/lock is locked by process 1, which is running. Stop it, or give this broker a
        storePathRootDir of its own.
    """


class StoreDamagedError(StoreError):
    """Files of the store are damaged, or have another size than the settings say.

    When: a broker starts, or a bulk read or the check of an archive runs, and finds durable bytes
    that differ from what was written, or files of a size that does not match the settings.
    Then: nothing was changed or deleted. A broker does not start on a damaged store.
    Fix: restore the file from a backup or a replica. `sluice store verify` lists the damage, and
    `sluice store repair` shows what would be lost before it changes anything.

        /data/config/topics.json cannot be read (no JSON). Restore a good copy, or remove the file
        and its .bak to start without it.
    """


class StoreFullError(StoreError):
    """The disk is full: the store refuses writes. Nothing is lost.

    When: the disk usage exceeds diskSpaceWarningLevelRatio, or there is no space for a new file.
    Then: the message was not stored. Stored messages are kept and can be read.
    Fix: free disk space, or keep messages for a shorter time (fileReservedTime). Sending works
    again without a restart.

        The disk has no room for the commit log in /data/commitlog: 95 of 100 bytes are used, 5 are
        free. Free disk space; sending then works again at once.
    """


class StoreTransientError(StoreError):
    """The system has run out of file descriptors or memory for the moment. Nothing is lost.

    When: a file cannot be opened or extended because file descriptors or memory are exhausted.
    Then: the request was not carried out, and the store is unchanged.
    Fix: raise the limit that the text names. The broker retries without a restart.

        The commit log in /data/commitlog cannot be written at present: Too many open files.
        Raise the limit of open files: `ulimit -n`, LimitNOFILE= of a service, or --ulimit nofile=
        of a container.
    """


class StoreUncertainError(StoreError):
    """A write failed half-way, so it is unknown whether a message is stored.

    When: a write was interrupted, or a master lost its role before its slaves acknowledged a
    message.
    Then: the message may reappear after a restart, or be stored at the new master. Until then it
    is not visible to consumers. Producers get `SendUnknownError`, or a `RequestError` whose text
    says so.
    Fix: look up the message by its key before you send it again.

        Writing the commit log in /data/commitlog failed, and the partial write cannot be undone:
        Input/output error. The message may reappear when the broker is restarted. The broker must
        be able to write there: change the rights, or set storePathRootDir.
    """


class MessageIllegalError(StoreError):
    """The message exceeds a limit of the store.

    When: the record would be larger than a file of the commit log, or the store does not support
    this kind of message.
    Then: the message was not stored. Other messages are not affected. Clients get
    MESSAGE_ILLEGAL (13).
    Fix: send a smaller message. The text names the size and the limit.

        The record would have 5000000 bytes, the limit is 4194304. Send a smaller message (or
        batch), or raise mappedFileSizeCommitLog.
    """


class ConsensusError(SluiceError):
    """The consensus service did not respond. A requested change may still take effect.

    When: a broker with automatic failover cannot reach etcd, or etcd has no leader.
    Then: master and slaves go on in their roles. No replica can become master, and no slave can
    leave the in-sync set.
    Fix: start etcd, or correct sluiceConsensus. Brokers retry without a restart.

        etcd at http://10.0.0.1:2379 does not respond (no connection). Start it, or correct
        sluiceConsensus; trying again.
    """


class RequestError(SluiceError):
    """A server responded with an error code.

    When: a broker, name server or proxy refuses a request. `code` and `remark` come from the
    response. `address` is the server, or "" if the server is this process.
    Then: the request was not carried out, unless the remark says otherwise.
    Fix: follow the sentence after the remark, which many codes have. Retry SYSTEM_BUSY (2) later.

        answered by 127.0.0.1:10911 with code 14: the disk is full. Try again, or
        check the broker's log and disk space.
    """

    def __init__(self, code: int, remark: str, *, address: str = "", fix: str = "") -> None:
        """Create the error of a response with this code and remark.

        `address` is the address of the server that responded; "" means this process. `fix` says
        what the user can do.
        """
        server = f" by {address}" if address else ""
        is_sentence = remark.endswith((".", "!", "?"))
        full_stop = "." if fix and not is_sentence else ""
        super().__init__(f"answered{server} with code {code}: {remark}{full_stop}", fix=fix)
        self.code = code
        self.remark = remark
        self.address = address


class TopicNotFoundError(RequestError):
    """The broker does not have the topic: TOPIC_NOT_EXIST (17).

    When: a request or a message names a topic that the broker does not have and may not create.
    Then: nothing was stored or changed.
    Fix: create the topic, or let brokers create topics (autoCreateTopicEnable).

        answered by 127.0.0.1:10911 with code 17: topic[orders] not exist. Create it with sluice
        topic create TOPIC, or set autoCreateTopicEnable=true on a broker.
    """


class GroupNotFoundError(RequestError):
    """The broker does not have the consumer group: SUBSCRIPTION_GROUP_NOT_EXIST (26).

    When: a request names a consumer group that the broker does not have.
    Then: nothing was read or changed.
    Fix: check the name with `sluice group list`. A group exists from when it is created, or from
    when its first consumer joins.

        answered by 127.0.0.1:10911 with code 26: no group billing. Create the group on the broker,
        or set autoCreateSubscriptionGroup=true on it.
    """


class PermissionDeniedError(RequestError):
    """The topic, the group, the broker or access control forbids the request: NO_PERMISSION (16).

    When: the permissions of a topic, group or broker forbid reading or writing, or access control
    refuses an access key, signature, address or operation (code 1 with an AclException).
    Then: nothing was stored, read or changed.
    Fix: correct the credentials or the rules. `sluice acl check` shows which rule decides.

        answered by 127.0.0.1:10911 with code 16: the topic is not writable. Check the permission of
        topic, group and broker, and the credentials.
    """


class ClientError(SluiceError):
    """The client could not do what was asked.

    When: a client detects an error itself, without the refusal of a server. Nearly always, a
    subclass is raised.
    Then: what was done depends on the subclass. For `ClientError` itself, nothing was done.
    Fix: follow the text.

        There is no broker to check the access key. Start one.
    """


class NameServerUnreachableError(ClientError):
    """None of the name servers responds.

    When: a client needs a route for the first time, and the request failed at every address. The
    text has the reason for each. Routes that are known stay in use.
    Then: nothing was sent.
    Fix: check the host and port, and that a name server runs. `sluice doctor` checks this first.

        no name server responded (127.0.0.1:9876: connection refused). Check the host and port, and
        make sure that the name server is running; to start one, run `sluice nameserver`.
    """


class RouteNotFoundError(ClientError):
    """No broker serves the topic.

    When: the name servers do not know the topic and no broker creates it, the broker that serves it
    is gone, or the topic does not have the requested queue.
    Then: nothing was sent or read.
    Fix: create the topic, start the broker, or correct the name. The text says which name servers
    and brokers were asked.

        the broker 'broker-b' is not in the route of 'orders'. Check that the broker is running and
        registered (sluice cluster list).
    """


class ConnectionLostError(ClientError):
    """The connection failed before the response arrived.

    When: a server cannot be reached, refuses TLS, stops, or closes the connection.
    Then: if no connection was made, nothing was sent. If a connection broke, the request may have
    been carried out. Producers and consumers retry, so they raise this error only from
    administrative calls.
    Fix: check the address, the firewall and TLS. The log of the server says why it closed a
    connection.

        Cannot connect to 127.0.0.1:8081: Connection refused. Check that a proxy runs there, and
        whether it requires TLS (--tls).
    """


class RequestTimeoutError(ClientError):
    """No response arrived within the timeout.

    When: a server is overloaded or unreachable, or no consumer replied to a `request` in time.
    Then: the request may have been carried out, or may still be.
    Fix: check the result before you repeat a request that must not be carried out twice. Raise the
    timeout of requests that take long.

        127.0.0.1:10911 did not respond to request 310 within 3 s. Check whether the server is
        overloaded or the network is slow.
    """


class SendError(ClientError):
    """The message was not stored.

    When: no attempt to send it reached a broker that accepted it. The text lists the attempts with
    their reasons. If a broker refused the last attempt, its `RequestError` is raised instead.
    Then: no broker has stored the message. The client has already tried again.
    Fix: remove the cause and send the message again.

        message 7F00 to 'orders' was not stored [broker-a: Cannot connect to 127.0.0.1:10911:
        Connection refused]. Check sluice cluster list, and that the brokers' addresses are
        reachable.
    """


class SendUnknownError(SendError):
    """No response arrived to an attempt to send, so the message may be stored or not.

    When: an attempt was transmitted, and its response did not arrive within the time for all
    attempts.
    Then: at least one attempt may have been stored, so sending again may create a duplicate.
    Fix: look up the message by its id or key (`sluice message show ID`). Send it again only if
    consumers tolerate duplicates (`@idempotent`).

        no response for message 7F00 to 'orders' (time for all attempts 3000 ms): it may be stored
        or not [127.0.0.1:10911: no answer]. Do not send it again unless consumers tolerate
        duplicates; look it up by its id first.
    """


class SubscriptionConflictError(ClientError):
    """Two consumers of one group have different subscriptions. The text shows both expressions.

    When: two consumers of one process or client subscribe to different messages of a topic in one
    group. With RocketMQ's brokers each would receive queues whose messages the other one needs.
    Then: the second subscription is refused. The first one continues.
    Fix: use the same expression in both, or use two groups, or let the broker keep a lane for each
    subscription (`sluice group update GROUP --contract lanes`).

        another client of this process also uses the group 'billing', with tags='a'; it would lose
        messages by tags='b'. Close the other client first, or use another group for it.
    """


class OffsetOutOfRangeError(ClientError):
    """The queue no longer has, or does not yet have, a message at the requested offset.

    When: a Spark stream or an archive finds that retention deleted messages that it had not read,
    that a topic was deleted and created again, or that queues disappeared. Consumers continue at
    another offset instead and report it (`OffsetMoved`).
    Then: nothing was skipped.
    Fix: allow the reader to continue with what is left (failOnDataLoss=false, on_gap: note). To
    avoid the error, read more often or keep messages longer: see `sluice group lag --at-risk`.

        retention deleted unread messages: broker-a:0 of 'orders' begins at 100 now, the stream was
        at 60: 40 messages are gone. Set failOnDataLoss=false to read what is left.
    """


class MessageNotFoundError(ClientError):
    """No stored message has the requested id.

    When: a message is looked up by its id, and no broker has it.
    Then: nothing was changed.
    Fix: name the topic of the message. The message may be deleted already, or the id may belong to
    another cluster.

        no message with the ID '7F00' was found in orders. Check the ID and the cluster; the message
        may also have been deleted.
    """


class UndecodableBodyError(ClientError):
    """The body of a message cannot be decompressed. The rest of the message can be read.

    When: `message.body` is read, and the stored bytes are damaged, use an unknown compression or
    one whose package is not installed, or exceed `body_bytes_max`. A consumer with
    `on_undecodable="raise"` raises the error at such a message.
    Then: other messages are not affected. `raw_body` returns the stored bytes, and `body_error`
    this error.
    Fix: follow the text. `reason` says why the body cannot be decoded.

        The body of message 7F00 cannot be decoded (topic 'orders', queue 3 of broker-a, offset 17):
        it is not valid zlib data: the data ends too early. Have its producer send it again;
        message.raw_body has the stored bytes.
    """

    def __init__(
        self,
        message_id: str,
        topic: str,
        broker: str,
        queue_id: int,
        queue_offset: int,
        *,
        reason: str,
        fix: str,
    ) -> None:
        """Create the error of one message, which the first five arguments identify.

        `reason` says why its body cannot be decoded, and `fix` what the user can do.
        """
        super().__init__(
            f"The body of message {message_id} cannot be decoded (topic {topic!r}, "
            f"queue {queue_id} of {broker or '-'}, offset {queue_offset}): {reason}.",
            fix=fix,
        )
        self.message_id = message_id
        self.topic = topic
        self.broker = broker
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.reason = reason


class MessageKeyMissingError(ClientError):
    """A message lacks the property by which an idempotent handler identifies it.

    When: a handler with `@idempotent(…, key="order_id")` receives a message without that property.
    Then: the handler was not called. The message is delivered again, and after the last retry it
    becomes a dead letter.
    Fix: send the property with every message, or use a key that all messages have.

        Message(id='7F00') lacks the property order_id, so it is unknown whether it was consumed
        before. Send it with the property, or use a key that all messages have.
    """


class RetryLaterError(ClientError):
    """A handler raises this error to have a message delivered again, without an error in the log.

    `delay_level` selects when the message is delivered again: 0 after the delay that the group has
    for this retry (10 s, 30 s … 2 h), n after delay level n of the broker, -1 never, so that it
    becomes a dead letter, and None as the consumer is configured. An ordered consumer ignores a
    level of 0 or more: it waits `suspend_s` seconds and tries the message again. `done` is for a
    handler that receives a list: the number of messages at the start of the list that it has
    processed, so that only the others are delivered again.

    When: a handler raises it. SluiceMQ itself never does.
    Then: the message is delivered again after the delay, or becomes a dead letter at once.
    Fix: nothing needs to be fixed.
    """

    def __init__(
        self,
        text: str = "",
        *,
        delay_level: int | None = None,
        suspend_s: float | None = None,
        done: int = 0,
    ) -> None:
        """Create the error. The arguments are stored in attributes of the same names."""
        super().__init__(text)
        self.done = done
        self.delay_level = delay_level
        self.suspend_s = suspend_s


class ClosedError(ClientError):
    """The client, producer or consumer is closed, or not started yet.

    When: it is used after its `async with` block, after `close` or `shutdown`, or before `start`.
    Then: nothing was sent. The report of `close` says what was in progress when it closed.
    Fix: create a new client, or do the work inside the block.

        this client does not run. Call start() first.
    """
