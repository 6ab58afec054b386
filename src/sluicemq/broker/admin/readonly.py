"""The read-only broker (`--read-only`), which shows a copy of a store and never changes it.

The files of the store are an overlay (`files/overlay.py`): all writes stay in memory and are
discarded when the broker ends. The store and the tables work as usual on top of it. This module
does the rest:

- It refuses requests that would change the broker, with a remark that gives the reason. Consumers
  can consume: their groups and offsets exist in memory only.
- The copy may lack documents, such as topics.json. Topics that have only queues, and groups that
  have only offsets, are added to the tables.
- A copied broker.conf belongs to another broker. Its name servers and addresses are not used:
  otherwise clients of the original cluster would connect to this broker, or clients of this broker
  to that cluster.
"""

import logging
from dataclasses import replace
from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.config import StoreConfig
from sluicemq.config.settings import host_name
from sluicemq.files import Files
from sluicemq.model.system_names import REVIVE_TOPIC_PREFIX, SYNC_MEMBER_TOPIC_PREFIX
from sluicemq.model.topic import DEFAULT_CLUSTER, PERM_READ, GroupConfig, TopicConfig
from sluicemq.net.dispatch import Handler, Peer
from sluicemq.store.directory import detect_file_sizes
from sluicemq.store.store import Store
from sluicemq.wire import tables
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

log = logging.getLogger(__name__)

_R = RequestCode
_CHANGES: Final = (
    ("Sending is", (
        _R.SEND_MESSAGE, _R.SEND_MESSAGE_V2, _R.SEND_BATCH_MESSAGE, _R.SEND_REPLY_MESSAGE,
        _R.SEND_REPLY_MESSAGE_V2, _R.CONSUMER_SEND_MSG_BACK, _R.RECALL_MESSAGE,
        _R.SLUICE_CANCEL_DELAYED, _R.SLUICE_COMMIT_EPOCH,
    )),
    ("Transactions are", (
        _R.END_TRANSACTION, _R.RESUME_CHECK_HALF_MESSAGE, _R.SLUICE_RESOLVE_TRANSACTION,
    )),
    ("Changing topics is", (
        _R.UPDATE_AND_CREATE_TOPIC, _R.UPDATE_AND_CREATE_TOPIC_LIST, _R.DELETE_TOPIC_IN_BROKER,
        _R.UPDATE_AND_CREATE_STATIC_TOPIC, _R.CLEAN_UNUSED_TOPIC,
    )),
    ("Changing consumer groups is", (
        _R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, _R.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        _R.DELETE_SUBSCRIPTIONGROUP, _R.UPDATE_AND_GET_GROUP_FORBIDDEN,
        _R.SET_MESSAGE_REQUEST_MODE,
    )),
    ("Resetting offsets is", (_R.INVOKE_BROKER_TO_RESET_OFFSET, _R.CLONE_GROUP_OFFSET)),
    ("Consuming by POP, which stores what it hands out, is", (
        _R.POP_MESSAGE, _R.ACK_MESSAGE, _R.BATCH_ACK_MESSAGE, _R.CHANGE_MESSAGE_INVISIBLETIME,
        _R.POP_ROLLBACK,
    )),
    ("Deleting is", (_R.DELETE_EXPIRED_COMMITLOG, _R.CLEAN_EXPIRED_CONSUMEQUEUE)),
    ("Changing settings is", (
        _R.UPDATE_BROKER_CONFIG, _R.UPDATE_COLD_DATA_FLOW_CTR_CONFIG,
        _R.REMOVE_COLD_DATA_FLOW_CTR_CONFIG, _R.SET_COMMITLOG_READ_MODE,
        _R.RESET_MASTER_FLUSH_OFFSET, _R.AUTH_CREATE_USER, _R.AUTH_UPDATE_USER,
        _R.AUTH_DELETE_USER, _R.AUTH_CREATE_ACL, _R.AUTH_UPDATE_ACL, _R.AUTH_DELETE_ACL,
        _R.UPDATE_AND_CREATE_ACL_CONFIG, _R.DELETE_ACL_CONFIG,
        _R.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG,
    )),
)  # fmt: skip
"""The beginning of a sentence that says what is refused, and the request codes it is for.

Some of these requests are not implemented by any broker of SluiceMQ.
"""
REFUSED_CODES: Final = frozenset(code for _, codes in _CHANGES for code in codes)
"""The codes of all requests that a read-only broker refuses."""


def make_refusing_handlers(root: str) -> dict[int, Handler]:
    """Return handlers that refuse requests of `REFUSED_CODES`, by request code.

    Each handler answers with NO_PERMISSION and changes nothing. `root` is the directory of the
    store, for the text of the answers.
    """

    def make_handler(subject: str) -> Handler:
        remark = (
            f"This broker is read-only: it shows the store in {root} and changes nothing. "
            f"{subject} refused. For a broker that accepts changes, start one without --read-only."
        )

        def refuse(command: Command, peer: Peer) -> Command:
            """Answer NO_PERMISSION with the remark that names the store."""
            return Command(ResponseCode.NO_PERMISSION, {}, remark=remark)

        return refuse

    return {int(code): make_handler(subject) for subject, codes in _CHANGES for code in codes}


def prepare_settings(settings: Settings, files: Files) -> None:
    """Change `settings` so that they fit the store that is read. Blocking.

    - If the store contains a commit log, the paths in the store replace other configured paths.
    - The sizes of the files are detected.
    - brokerIP1 and brokerIP2 are removed, because they are addresses of the original broker.
    - A broker name or cluster name that is the default is replaced by the name in a system topic.

    Path and address changes are logged. Raises StoreError if the directory contains no store.
    """
    settings.store = _adapt_store_config(settings.store, files)
    log.info(
        "opened the store in %s read-only (files of %d and %d bytes): its files never change, and "
        "offsets of consumers are kept in memory",
        settings.store.root,
        settings.store.commit_log_file_bytes,
        settings.store.consume_queue_file_bytes,
    )
    if settings.broker.broker_ip1 or settings.broker.broker_ip2:
        log.info("read-only: ignoring brokerIP1 and brokerIP2 of the configuration")
    broker_name, cluster_name = _find_names(settings, files)
    settings.broker = replace(
        settings.broker,
        broker_name=broker_name,
        cluster_name=cluster_name,
        broker_ip1=None,
        broker_ip2=None,
    )


def _adapt_store_config(config: StoreConfig, files: Files) -> StoreConfig:
    """Return `config` adapted to the store in `config.root`.

    If the store has a commit log, the paths in the store replace other configured paths. The sizes
    of the files are those of the files on disk.
    """
    log_path = f"{config.root}/commitlog"
    queue_path = f"{config.root}/consumequeue"
    configured_paths = (config.commit_log_path, config.consume_queue_path)
    if files.names(log_path) and configured_paths != (log_path, queue_path):
        log.info("read-only: using the paths in the store instead of those in the configuration")
        config = replace(config, commit_log_path=log_path, consume_queue_path=queue_path)
    return detect_file_sizes(config, files)


def _find_names(settings: Settings, files: Files) -> tuple[str, str]:
    """Return the names of the broker and of its cluster.

    They are the configured names. But if a name is the default, it is taken from the name of a
    system topic in the store, which contains it.
    """
    broker_name = settings.broker.broker_name
    cluster_name = settings.broker.cluster_name
    document = Document(files, f"{settings.store.root}/config/topics.json", str)
    topic_table = document.load(tables.decode_topic_table_file) or tables.TopicTable()
    for topic in topic_table.topics:
        if topic.startswith(SYNC_MEMBER_TOPIC_PREFIX) and broker_name == host_name():
            broker_name = topic.removeprefix(SYNC_MEMBER_TOPIC_PREFIX)
        elif topic.startswith(REVIVE_TOPIC_PREFIX) and cluster_name == DEFAULT_CLUSTER:
            cluster_name = topic.removeprefix(REVIVE_TOPIC_PREFIX)
    return broker_name, cluster_name


def add_missing_topics_and_groups(
    store: Store, topics: Topics, groups: Groups, offsets: Offsets
) -> None:
    """Add topics of the store, and groups with committed offsets, that are missing in the tables.

    An added topic can only be read, and has as many queues as its highest queue id requires. An
    added group has the default configuration.
    """
    queue_counts: dict[str, int] = {}
    for topic, queue_id in store.queues():
        queue_counts[topic] = max(queue_counts.get(topic, 0), queue_id + 1)
    for topic, count in queue_counts.items():
        if topic not in topics:
            topics.put(TopicConfig(topic, count, count, PERM_READ))
    for group, _, _, _ in offsets.iter_offsets():
        if group not in groups:
            groups.put(GroupConfig(group))
