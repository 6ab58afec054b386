"""A broker over a copy of a store that must not change: `--read-only`.

Its files are an overlay (`files/overlay.py`), so whatever it does to them stays in memory and ends
with it; store and tables run above that as ever. What is left to do here:

- requests that change something are refused with a text that says why. Consumers may consume: their
  groups and offsets live in memory;
- the copy may lack tables: topics and groups that only the queues and offsets tell of are shown;
- a copied broker.conf belongs to another broker: neither its name servers nor its addresses may be
  used, or the clients of a living cluster would be led here, and ours there.
"""

import logging
from dataclasses import replace
from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
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
# What is refused, and what the codes of it are. Some are not built yet, here or at all.
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
REFUSED: Final = frozenset(code for _, codes in _CHANGES for code in codes)


def refusals(root: str) -> dict[int, Handler]:
    """The handlers that refuse, by code."""

    def refusing(what: str) -> Handler:
        text = (
            f"This broker is read-only: it shows the store in {root} and changes nothing. {what} "
            "refused. For a broker that takes changes, start one without --read-only."
        )

        def refuse(command: Command, peer: Peer) -> Command:
            return Command(ResponseCode.NO_PERMISSION, {}, remark=text)

        return refuse

    return {int(code): refusing(what) for what, codes in _CHANGES for code in codes}


def prepare(settings: Settings, files: Files) -> None:
    """Blocking: make the settings fit the store that is there: its paths and sizes, no addresses of
    the broker that the copy was taken from, its names where none are given. Raises StoreError
    without a store."""
    store, config = settings.store, settings.broker
    log_path, queue_path = f"{store.root}/commitlog", f"{store.root}/consumequeue"
    if files.names(log_path) and (store.commit_log_path, store.consume_queue_path) != (
        log_path, queue_path,
    ):  # fmt: skip
        log.info("read-only: the paths of the configuration are not used but those in the store")
        store = replace(store, commit_log_path=log_path, consume_queue_path=queue_path)
    settings.store = store = detect_file_sizes(store, files)
    log.info(
        "the store in %s is opened read-only (files of %d and %d bytes): nothing of it changes, "
        "offsets of consumers live in memory",
        store.root, store.commit_log_file_bytes, store.consume_queue_file_bytes,
    )  # fmt: skip
    if config.broker_ip1 or config.broker_ip2:
        log.info("read-only: brokerIP1 and brokerIP2 of the configuration are not used")
    broker, cluster = config.broker_name, config.cluster_name
    document = Document(files, f"{store.root}/config/topics.json", str)
    for name in (document.load(tables.decode_topic_table_file) or tables.TopicTable()).topics:
        if name.startswith(SYNC_MEMBER_TOPIC_PREFIX) and broker == host_name():
            broker = name.removeprefix(SYNC_MEMBER_TOPIC_PREFIX)
        elif name.startswith(REVIVE_TOPIC_PREFIX) and cluster == DEFAULT_CLUSTER:
            cluster = name.removeprefix(REVIVE_TOPIC_PREFIX)
    settings.broker = replace(
        config, broker_name=broker, cluster_name=cluster, broker_ip1=None, broker_ip2=None
    )


def show_all(store: Store, topics: Topics, groups: Groups, offsets: Offsets) -> None:
    """Put topics and groups into the tables that only queues and offsets tell of."""
    found: dict[str, int] = {}
    for topic, queue_id in store.queues():
        found[topic] = max(found.get(topic, 0), queue_id + 1)
    for topic, count in found.items():
        if topic not in topics:
            topics.put(TopicConfig(topic, count, count, PERM_READ))
    for group, _, _, _ in offsets.iter_offsets():
        if group not in groups:
            groups.put(GroupConfig(group))
