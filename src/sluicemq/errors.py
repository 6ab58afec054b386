"""Every exception that SluiceMQ raises, in one tree.

    SluiceError
    ├── ConfigurationError      a key, value or option of the user is wrong
    ├── ProtocolError           bytes that are not the protocol (close the connection)
    ├── FilterError             a filter expression
    │   ├── FilterSyntaxError   ... does not compile
    │   └── FilterEvaluationError  ... cannot be evaluated on this message: no match
    ├── StoreError              the store on disk
    │   ├── StoreLockedError    another living process owns it
    │   ├── StoreDamagedError   bytes before the durable mark are bad, or a file has another size
    │   ├── StoreFullError      no space left, writes are refused
    │   ├── StoreTransientError the system has run short of something: the same works later
    │   ├── StoreUncertainError what was written may come back after a restart
    │   └── MessageIllegalError the message breaks a limit of the store
    ├── ConsensusError          the consensus service did not answer: the change is done or not
    ├── RequestError            a request was answered with a code that is not success
    │   ├── TopicNotFoundError
    │   ├── GroupNotFoundError
    │   └── PermissionDeniedError
    └── ClientError             the client could not do what was asked
        ├── NameServerUnreachableError
        ├── RouteNotFoundError
        ├── ConnectionLostError
        ├── RequestTimeoutError
        ├── SendError           the message was not stored
        │   └── SendUnknownError  it may be stored: do not resend blindly
        ├── SubscriptionConflictError
        ├── OffsetOutOfRangeError
        ├── MessageNotFoundError
        ├── UndecodableBodyError  the body of a message cannot be decompressed
        ├── MessageKeyMissingError  a handler cannot tell whether it had the message before
        ├── ClosedError
        └── RetryLaterError   raised by a handler: give me the message again

The text of every error names the value, the limit and the fix; `fix` holds the last part alone.
Errors never carry secrets. The docstring of a class is its page: when it comes, what was done and
what was not, what to do, an example. `sluice explain error NAME` prints it, and a note below the
text says so (design/0028).
"""

import functools


def install_extra(name: str) -> str:
    """The cure for a package that comes with an extra: no package index has SluiceMQ yet, so it
    is installed again from where it came."""
    return (
        f"Install the extra {name!r}: pip install '.[{name}]' in the checkout,"
        f" or the path of the wheel followed by [{name}]."
    )


class SluiceError(Exception):
    """The root of all errors of SluiceMQ: `fix` says what the user can do about it.

    When: never itself; catch it to catch all of them.
    Then: each class says below what was done and what was not.
    Fix: the last sentence of the text, which `fix` holds alone.
    """

    def __init__(self, text: str, *, fix: str = "") -> None:
        super().__init__(f"{text} {fix}".rstrip())
        self.fix = fix

    @functools.cached_property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """What tracebacks print below the text: the way to the page of this class. Made when it is
        asked for, and what `add_note` adds to."""
        return [f"More: sluice explain error {self.page()}"]

    PAGE = ""
    """The page of this class alone, where its module has moved since the page was published."""

    @classmethod
    def page(cls) -> str:
        """Return the name of the page about this class: `PAGE`, or else the class name, after its
        module unless that is `errors`."""
        if published := cls.__dict__.get("PAGE", ""):
            return str(published)
        name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("sluicemq.")
        return name.removeprefix("errors.")

    @property
    def fact(self) -> str:
        """The text without the fix, for errors that quote this one and have a fix of their own."""
        return str(self).removesuffix(self.fix).rstrip().removesuffix(".")


class ConfigurationError(SluiceError):
    """A key, value or option is wrong; the text names it and its range.

    When: a client, server, pipeline or command is given what it cannot work with: an unknown name,
    a value out of range, a port in use, a package that is not installed.
    Then: nothing was sent, stored or started.
    Fix: correct what the text names. The same call again fails again.

        Port 9876 is in use already (127.0.0.1:9876). Stop the other process, or configure another
        port.
    """


class ProtocolError(SluiceError):
    """Bytes of the other side are not the protocol. The connection has to be closed.

    When: something else than RocketMQ's protocol answers at that port, an answer is cut short or
    contradicts itself, or a text that should be an address or a message id is none.
    Then: the connection is closed and what waited for an answer on it fails. What an unreadable
    answer was to is not known to be done or not.
    Fix: check the port: 9876 is the name server, 10911 a broker, 8081 a proxy.

        'broker-a' is not an address. Write host:port, for example 127.0.0.1:10911.
    """


class FilterError(SluiceError):
    """A filter expression is at fault.

    When: never itself; it catches both kinds of its faults.
    Then: no message is lost: an expression that does not compile subscribes to nothing.
    Fix: `sluice filter check 'EXPRESSION'` shows what an expression means and what fails in it.
    """


class FilterSyntaxError(FilterError):
    """The expression does not compile; `position` is the index of the character at fault.

    When: at `subscribe`, before anything is asked for; or a broker refuses the expression.
    Then: nothing is subscribed and no message is read.
    Fix: correct it where the text points. `sluice filter check` shows the place and what may
    follow.

        The tag expression '||' has separators but no tag. Write TagA || TagB, or * for all
        messages.
    """

    def __init__(self, text: str, *, position: int = 0, fix: str = "") -> None:
        super().__init__(text, fix=fix)
        self.position = position


class FilterEvaluationError(FilterError):
    """The expression cannot be evaluated on this message, which therefore does not match.

    When: an SQL92 filter takes a property for a number and the message has a text there. It is
    counted and shown (`sluice filter test`, `sluice explain message`), not raised to consumers.
    Then: that message does not match, as with RocketMQ; the others go on.
    Fix: send the property as the expression takes it, or write the literal so that it takes more
    (30.0 instead of 30). `reason` is the fact without the message's value: what errors are counted
    by.

        a condition on the left cannot be compared with the string 'x'. Put the property on the
        left: a = TRUE.
    """

    def __init__(self, text: str, *, fix: str = "", reason: str = "") -> None:
        super().__init__(text, fix=fix)
        self.reason = reason or self.fact


class StoreError(SluiceError):
    """The store cannot do what was asked.

    When: the disk fails a read or a write, a replica's log does not fit its master's, or a command
    on a store directory (`sluice store`) is given one that it must not touch.
    Then: the request is not carried out; where a write failed half-way the text says what may be
    left of it.
    Fix: the text has it; look at the disk and the broker's log. Producers see a `RequestError`.

        /data/copy is no backup. Name what `sluice store backup` made.
    """


class StoreLockedError(StoreError):
    """Another living process owns the store directory.

    When: a broker starts, or `sluice store` writes, where a broker runs already.
    Then: nothing was touched. The lock of a dead process never stands in the way.
    Fix: stop the process that the text names, or give this broker a directory of its own.

        /data/store/lock is locked by process 1, which is running. Stop it, or give this broker a
        storePathRootDir of its own.
    """


class StoreDamagedError(StoreError):
    """Files are not what they must be: damaged bytes, or another size than configured.

    When: a start, a bulk read or a check of an archive finds bytes that were safe once and are not
    what was written, or files of another size than the settings say.
    Then: nothing was changed and nothing thrown away: the broker does not start over damage.
    Fix: restore the file from a backup or a replica; `sluice store verify` lists what is wrong,
    `sluice store repair` says what would be lost before it does anything.

        /data/config/topics.json cannot be read (no JSON). Put back a good copy, or remove the file
        and its .bak to start without it.
    """


class StoreFullError(StoreError):
    """There is no room: writes are refused, nothing is lost.

    When: the disk is fuller than diskSpaceWarningLevelRatio, or a new file finds no room.
    Then: the message was not stored; what is stored stays and can be read.
    Fix: make room, or keep less (fileReservedTime). Sends work again by themselves.

        The disk has no room for the commit log in /data/commitlog: 95 of 100 bytes are used, 5 are
        free. Free disk space; sending then works again at once.
    """


class StoreTransientError(StoreError):
    """The system is short of something (descriptors, memory): nothing is lost, and the same works
    when it has it again.

    When: opening or growing a file fails for want of descriptors or memory.
    Then: the request was not carried out and the store is as it was.
    Fix: raise the limit that the text names; the broker tries again by itself.

        The commit log in /data/commitlog cannot be written at present: Too many open files.
        Let the process have more open files: `ulimit -n`, LimitNOFILE= of a service, --ulimit
        nofile= of a container.
    """


class StoreUncertainError(StoreError):
    """The disk failed half-way: what was written may be there or not when the store is opened.

    When: a write was cut off, or a master lost its role before its slaves confirmed a message.
    Then: the message may come back after a restart or be with the new master; it is not shown to
    consumers meanwhile. Producers get `SendUnknownError`, or the answer that says so.
    Fix: look the message up by its key before you send it again.

        Writing the commit log in /data/commitlog failed, and the partial write cannot be undone:
        Input/output error. The message may reappear when the broker is restarted. The broker must
        be able to write there: change the rights, or set storePathRootDir.
    """


class MessageIllegalError(StoreError):
    """The message breaks a limit of the store.

    When: a record would be larger than a file of the log, or is of a kind that the store lacks.
    Then: it was not stored; others are not affected. Clients see code 13.
    Fix: send less in one message; the text has size and limit.

        The record would have 5000000 bytes, the limit is 4194304. Send a smaller message (or
        batch), or raise mappedFileSizeCommitLog.
    """


class ConsensusError(SluiceError):
    """The consensus service did not answer; a change asked for may be done, now or later.

    When: a broker that fails over cannot reach etcd, or etcd has no leader.
    Then: roles stay as they are until its lease runs out; a master that cannot renew it steps down.
    Fix: start etcd, or correct sluiceConsensus. Brokers try again by themselves.

        etcd at http://10.0.0.1:2379 does not answer (no connection). Start it, or correct
        sluiceConsensus; trying again.
    """


class RequestError(SluiceError):
    """A server answered with a code that is not success.

    When: a broker, name server or proxy refuses a request; `code` and `remark` are its own words,
    `address` is the server, "" where it is this process.
    Then: it was not carried out, unless the remark says otherwise.
    Fix: behind the remark, for the codes that have one. Code 2 (busy) can be tried again later.

        answered by 127.0.0.1:10911 with code 14: the disk is full. The broker cannot write: look at
        its disk space and its log.
    """

    def __init__(self, code: int, remark: str, *, address: str = "", fix: str = "") -> None:
        where = f" by {address}" if address else ""
        end = "." if fix and not remark.endswith((".", "!", "?")) else ""
        super().__init__(f"answered{where} with code {code}: {remark}{end}", fix=fix)
        self.code = code
        self.remark = remark
        self.address = address


class TopicNotFoundError(RequestError):
    """The topic does not exist there (code 17).

    When: a broker is asked about, or sent to, a topic that it lacks and may not create.
    Then: nothing was stored or changed.
    Fix: create the topic, or let brokers create topics: autoCreateTopicEnable.

        answered by 127.0.0.1:10911 with code 17: topic[orders] not exist. Create it: sluice topic
        create TOPIC, or set autoCreateTopicEnable=true on the broker.
    """


class GroupNotFoundError(RequestError):
    """The consumer group does not exist there (code 26).

    When: a broker is asked about a consumer group that it does not know.
    Then: nothing was read or changed.
    Fix: check the name (`sluice group list`); a group exists once a consumer joined, or it was
    created.

        answered by 127.0.0.1:10911 with code 26: no group billing. Create the group on the broker,
        or set autoCreateSubscriptionGroup=true there.
    """


class PermissionDeniedError(RequestError):
    """The topic, group, broker or access rules forbid it (code 16).

    When: topic, group or broker lack the permission to be written or read; or access control (code
    1, AclException) refuses key, signature, address or right.
    Then: nothing was stored, read or changed.
    Fix: correct credentials or rules: `sluice acl check` says which rule decides.

        answered by 127.0.0.1:10911 with code 16: the topic is not writable. Check the permission of
        topic, group and broker, and the credentials.
    """


class ClientError(SluiceError):
    """The client could not do what was asked.

    When: it is the root of what happens on the client's side; raised itself where no class fits.
    Then: the classes below say it.
    Fix: in the text.

        no broker is there to check the access key. Start one.
    """


class NameServerUnreachableError(ClientError):
    """None of the name servers answers.

    When: the first use of a client, or a new topic, and every address failed; the text has each
    reason. Routes that are known stay in use meanwhile.
    Then: nothing was sent.
    Fix: check host and port, and that a name server runs. `sluice doctor` begins there.

        no name server answers [127.0.0.1:9876: Cannot connect to 127.0.0.1:9876: Connection
        refused]. Check host and port, and that the name server runs (sluice nameserver).
    """


class RouteNotFoundError(ClientError):
    """No broker serves the topic.

    When: the name servers know no such topic and no broker creates one; a broker has gone; or a
    queue was named that the topic lacks.
    Then: nothing was sent or read.
    Fix: create the topic, start the broker, or correct the name: the text says which name servers
    and brokers were asked.

        the broker 'broker-b' is not in the route of 'orders'. See sluice cluster status.
    """


class ConnectionLostError(ClientError):
    """The connection broke before the answer came.

    When: a server cannot be reached, refuses TLS, stops, or closes the connection.
    Then: where no connection was made, nothing was sent; where one broke, the request may have been
    carried out. Producers and consumers try again and raise this only from administration.
    Fix: check address, firewall and TLS; the server's log says why it closed a connection.

        127.0.0.1:8081 cannot be reached: Connection refused. Is a proxy started there, and does it
        want TLS (--tls)?
    """


class RequestTimeoutError(ClientError):
    """No answer within the time given.

    When: a server is overloaded or cut off, or nobody replied to a `request` in time.
    Then: the request may have been carried out, now or later.
    Fix: look before you repeat what must not be done twice; raise the timeout where work takes
    long.

        127.0.0.1:10911 did not answer request 310 within 3 s. Is the server overloaded, or the
        network slow?
    """


class SendError(ClientError):
    """The message was not stored.

    When: every attempt of a send was refused or did not leave; the text has each with its reason. A
    single refusal is raised as it is: a `RequestError`.
    Then: the message is on no broker.
    Fix: send it again once the reason is gone.

        the batch is empty. Give at least one message.
    """


class SendUnknownError(SendError):
    """The answer is missing: the message may be stored or not.

    When: an attempt left and its answer did not come within the time for all attempts.
    Then: at least one attempt may have been stored, so sending again may make a duplicate.
    Fix: look the message up by its id or key (`sluice message show ID`), or send again where
    consumers tolerate duplicates (`@idempotent`).

        no answer for message 7F00 to 'orders' (time for all attempts 3000 ms): it may be stored or
        not [127.0.0.1:10911: no answer]. Do not simply send it again unless consumers tolerate
        duplicates; look it up by its id first.
    """


class SubscriptionConflictError(ClientError):
    """Two different subscriptions in one group; the text shows both expressions.

    When: two consumers of one process, or of one client, ask for different messages of a topic in
    one group; with RocketMQ's brokers each would be handed queues whose messages the other wants.
    Then: the second subscription is not made; the first goes on.
    Fix: give both one expression, or groups of their own; or let the broker keep lanes
    (`sluice group update GROUP --contract lanes`).

        the group 'billing' is read by another client of this process too, with tags 'a'; tags 'b'
        would take messages from it. Close the other one first, or give it another group.
    """


class OffsetOutOfRangeError(ClientError):
    """The offset asked for is not in the queue any more, or not yet.

    When: a stream or an archive finds that retention deleted what it had not read, that a topic was
    deleted and created again, or that queues disappeared. Consumers move by themselves and say so
    (`OffsetMoved`).
    Then: nothing is skipped before you say so.
    Fix: go on with what is left (failOnDataLoss=false, on_gap: note), and read more often or keep
    messages longer: `sluice group lag --at-risk`.

        retention passed the stream: broker-a/0 of 'orders' begins at 100 now, the stream was at 60:
        40 messages are gone. Set failOnDataLoss=false to go on with what is left.
    """


class MessageNotFoundError(ClientError):
    """No stored message has that id.

    When: a message is looked up by id and no broker has it.
    Then: nothing was changed.
    Fix: name its topic; it may be deleted already, or the id be of another cluster.

        no message has the id 7F00 in orders. It may be deleted already, or the id is of another
        cluster.
    """


class UndecodableBodyError(ClientError):
    """The body of a message cannot be decompressed; the rest of the message can be read.

    When: `message.body` is read and the stored bytes are damaged, are compressed in a way that is
    unknown or whose package is missing, or exceed `body_bytes_max`. A consumer with
    `on_undecodable="raise"` raises it at such a message.
    Then: other messages are not affected. `raw_body` has the stored bytes, `body_error` this error.
    Fix: in the text; `reason` is why decoding failed.

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
    """A message lacks the key by which an idempotent handler would know it again.

    When: `@idempotent(…, key="order_id")` gets a message without that property.
    Then: the handler was not called and the message comes again, at last as a dead letter.
    Fix: send the property with every message, or use a key that all have.

        Message(id='7F00') lacks the property order_id, so nobody can say whether it was consumed
        before. Send it with the property, or use a key that all messages have.
    """


class RetryLaterError(ClientError):
    """A handler raises it to get the message again, without an error in the log.

    `delay_level`: 0 the group's ladder (10 s, 30 s … 2 h), n a level of the broker, -1 never: dead
    letters. None: as the consumer is set up. `suspend_s`: how long an ordered queue rests. `done`:
    a handler of lists is done with so many of the first messages, the others come again.

    When: your handler raises it; SluiceMQ never does.
    Then: the message is not acknowledged and comes again after the delay.
    Fix: none is needed.
    """

    def __init__(
        self,
        text: str = "",
        *,
        delay_level: int | None = None,
        suspend_s: float | None = None,
        done: int = 0,
    ) -> None:
        super().__init__(text)
        self.done = done
        self.delay_level = delay_level
        self.suspend_s = suspend_s


class ClosedError(ClientError):
    """The client, producer or consumer is closed.

    When: it is used behind its `async with`, after `close` or `shutdown`, or before `start`.
    Then: nothing was sent. What was under way when it closed is in the report of `close`.
    Fix: make a new one, or do the work inside the block.

        this client does not run. Call start() first.
    """
