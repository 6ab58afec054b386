"""The settings of a broker that is one of several of its name: master and slaves."""

from dataclasses import dataclass
from typing import Final

from sluicemq.config.keys import (
    HOST,
    INTEGER,
    PATH,
    SERVERS,
    PushedConfig,
    setting,
)
from sluicemq.errors import ConfigurationError

MASTER_ROLES: Final = ("ASYNC_MASTER", "SYNC_MASTER")
IN_SYNC_UNWRITTEN: Final = 2
"""A SYNC_MASTER whose file does not say inSyncReplicas waits for one slave, as 4.9's."""


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(PushedConfig):
    """Role, place among the replicas, and the connection between them (spec/ha.md)."""

    broker_id: int = setting("brokerId", 0,
        "0 is the master, others are slaves; taken as 0 for a master. With sluiceConsensus: which "
        "of the replicas it is, 1 or more, whatever its role.")
    broker_role: str = setting("brokerRole", "ASYNC_MASTER",
        "SYNC_MASTER answers a send when its slaves have the message (inSyncReplicas), "
        "ASYNC_MASTER at once; SLAVE copies its master and serves reads. Not with "
        "sluiceConsensus, which says who is master; SYNC_MASTER and ASYNC_MASTER then say how "
        "it answers.", choices=(*MASTER_ROLES, "SLAVE"))
    broker_ip2: str | None = setting("brokerIP2", None,
        "Address that slaves are told. Default: as brokerIP1.", kind=HOST)
    ha_port: int | None = setting("haListenPort", None,
        "Port at which slaves connect; 0 takes a free one. Default: listenPort + 1.",
        kind=INTEGER, maximum=65_535)
    ha_master: tuple[str, ...] = setting("haMasterAddress", (),
        "`host:port` of the master's haListenPort. Default: what the name server tells.",
        kind=SERVERS)
    ha_peers: tuple[str, ...] = setting("sluiceReplicaPeers", (),
        "Addresses that may connect to haListenPort, as in plain_acl.yml's white list "
        "(`10.0.0.7;10.0.1.*`). Default: every one that the listening rule lets in; with "
        "aclEnable slaves of ours alone, which have asked for the state with a signature.")
    ha_heartbeat_ms: int = setting("haSendHeartbeatInterval", 5000,
        "Master and slave say something every so many ms.", minimum=10)
    ha_housekeeping_ms: int = setting("haHousekeepingInterval", 20_000,
        "A connection between them without traffic is closed after so many ms.", minimum=50)
    ha_batch_bytes: int = setting("haTransferBatchSize", 32_768,
        "Bytes of the log in one frame.", minimum=1024, maximum=1_048_576)
    ha_flow_control: bool = setting("haFlowControlEnable", False,
        "Slaves get no more than maxHaTransferByteInSecond.")
    ha_bytes_per_s: int = setting("maxHaTransferByteInSecond", 100 * 1024 * 1024,
        "Bytes a second to each slave; see haFlowControlEnable.", minimum=1024)
    gap_bytes_max: int = setting("haMaxGapNotInSync", 256 * 1024 * 1024,
        "A slave that is further behind than so many bytes does not count as one that can "
        "acknowledge.", aliases=("haSlaveFallbehindMax",), live=True)
    slave_timeout_ms: int = setting("slaveTimeout", 3000,
        "A send that waits for slaves longer is answered FLUSH_SLAVE_TIMEOUT, in ms.", minimum=1,
        live=True)
    in_sync_written: int | None = setting("inSyncReplicas", None,
        "SYNC_MASTER: so many replicas, the master among them, have a message before its send is "
        "answered. Default: 2. **Differs from RocketMQ, where it is 1 since 5.0: nobody is waited "
        "for.** Written out, 1 means that here too.", kind=INTEGER, minimum=1, live=True)
    in_sync_min: int = setting("minInSyncReplicas", 1,
        "Fewer are never enough: with enableAutoInSyncReplicas, and in the in-sync set of "
        "sluiceConsensus, below which sends are refused.", minimum=1, live=True)
    in_sync_auto: bool = setting("enableAutoInSyncReplicas", False,
        "With enableSlaveActingMaster: fewer than inSyncReplicas are enough when fewer can "
        "acknowledge.", live=True)
    catch_up_ms: int = setting("haMaxTimeSlaveNotCatchup", 2500,
        "With sluiceConsensus: a slave that has not had the whole log for this time, in ms, leaves "
        "the in-sync set; until then every send waits for it. The default is less than the lease "
        "(3 s) and slaveTimeout, so a slave that falls silent delays sends and fails none. "
        "**Differs from RocketMQ's controller, where it is 15000.**", minimum=100)
    slave_read: bool = setting("slaveReadEnable", False,
        "Consumers that are far behind are sent to a slave, and a slave serves them.", live=True)
    offset_check_in_slave: bool = setting("offsetCheckInSlave", False,
        "A slave moves the offset of a reader that is outside of its queue, as a master does; else "
        "the reader waits or goes to the master.", live=True)
    acting_master: bool = setting("enableSlaveActingMaster", False,
        "When the master is gone, the slave with the least id does what must go on: reads, "
        "delayed and timed messages, checks of transactions, POP.")
    remote_escape: bool = setting("enableRemoteEscape", False,
        "... and stores what comes of it on another master of the cluster.")
    skip_pre_online: bool = setting("skipPreOnline", False,
        "A master that comes back serves at once, before it has asked its slaves for what they "
        "have.")
    name_server_heartbeat_ms: int = setting("brokerHeartbeatInterval", 1000,
        "With enableSlaveActingMaster or sluiceConsensus: name servers hear that the broker lives "
        "every so many ms.", minimum=100)
    members_period_ms: int = setting("syncBrokerMemberGroupPeriod", 1000,
        "With enableSlaveActingMaster: the broker asks who else of its name lives every so many "
        "ms.", minimum=100)
    epoch_path: str = setting("storePathEpochFile", "",
        "The file of epochs. Default: epochFileCheckpoint below storePathRootDir.", kind=PATH)
    consensus: str = setting("sluiceConsensus", "",
        "Who decides which replica is master: `etcd://host:port,host:port`. Default: nobody, "
        "roles are those of the file. See [replication](replication.md).")
    consensus_user: str = setting("sluiceConsensusUser", "",
        "Account of sluiceConsensus; its rights: read and write below `sluicemq/`.")
    consensus_password: str = setting("sluiceConsensusPassword", "",
        "Its password. Shown to nobody.", is_secret=True)
    consensus_ca: str = setting("sluiceConsensusTrustCertPath", "",
        "With `etcds://`: PEM of who signs the certificates there. Default: whom the system "
        "trusts.", kind=PATH)
    consensus_certificate: str = setting("sluiceConsensusCertPath", "",
        "With `etcds://`: the certificate by which the broker shows itself, in PEM.", kind=PATH)
    consensus_key: str = setting("sluiceConsensusKeyPath", "",
        "Its key, in PEM. Default: in the same file.", kind=PATH)

    def __post_init__(self) -> None:
        if self.consensus:
            if self.is_slave:
                raise ConfigurationError(
                    "brokerRole = SLAVE with sluiceConsensus: the consensus says who is master.",
                    fix="Leave brokerRole out, or write how a master answers: SYNC_MASTER.",
                )
            if not self.broker_id:
                raise ConfigurationError(
                    "brokerId = 0 with sluiceConsensus: replicas are told apart by it.",
                    fix="Give each replica an id of its own, 1 or more, for good.",
                )
        elif self.is_slave and not self.broker_id:
            raise ConfigurationError(
                "brokerRole = SLAVE with brokerId = 0, which is the master's.",
                fix="Write brokerId = 1, or another number that no other slave has.",
            )
        elif not self.is_slave:
            object.__setattr__(self, "broker_id", 0)

    @property
    def is_slave(self) -> bool:
        """By the file."""
        return self.broker_role == "SLAVE"

    @property
    def in_sync_replicas(self) -> int:
        """How many replicas have a message before its send is answered, the master among them."""
        if self.broker_role != "SYNC_MASTER":
            return 1
        return IN_SYNC_UNWRITTEN if self.in_sync_written is None else self.in_sync_written
# fmt: on
