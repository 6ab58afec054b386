"""The settings of a broker as a replica: its role, its id, and replication."""

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
"""The value of inSyncReplicas for a SYNC_MASTER whose file does not set it, as in RocketMQ 4.9."""


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(PushedConfig):
    """The role and id of a replica, and its connections to the others (spec/ha.md)."""

    broker_id: int = setting("brokerId", 0,
        "0 is the master, other ids are slaves. A master always has id 0. With sluiceConsensus it "
        "identifies the replica, must be 1 or more, and does not depend on the role.")
    broker_role: str = setting("brokerRole", "ASYNC_MASTER",
        "SYNC_MASTER responds to a send when its slaves have the message (inSyncReplicas), "
        "ASYNC_MASTER responds at once, and SLAVE copies its master and serves reads. With "
        "sluiceConsensus, which decides who is master, SLAVE is not allowed, and the other two "
        "say how a master responds.", choices=(*MASTER_ROLES, "SLAVE"))
    broker_ip2: str | None = setting("brokerIP2", None,
        "Address that the broker advertises to slaves. Default: chosen like brokerIP1.", kind=HOST)
    ha_port: int | None = setting("haListenPort", None,
        "Port on which slaves connect. 0 takes a free port. Default: listenPort + 1.",
        kind=INTEGER, maximum=65_535)
    ha_master: tuple[str, ...] = setting("haMasterAddress", (),
        "`host:port` of the master's haListenPort. Default: the address that the name server "
        "returns.",
        kind=SERVERS)
    ha_peers: tuple[str, ...] = setting("sluiceReplicaPeers", (),
        "Addresses that may connect to haListenPort, in the form of the white list in "
        "plain_acl.yml (`10.0.0.7;10.0.1.*`). Default: all addresses from which the broker "
        "accepts connections. With aclEnable it is only SluiceMQ's slaves, which have requested "
        "the state with a signature.")
    ha_heartbeat_ms: int = setting("haSendHeartbeatInterval", 5000,
        "Interval of heartbeats between master and slave, in ms.", minimum=10)
    ha_housekeeping_ms: int = setting("haHousekeepingInterval", 20_000,
        "Time after which a connection between master and slave without traffic is closed, in ms.",
        minimum=50)
    ha_batch_bytes: int = setting("haTransferBatchSize", 32_768,
        "Maximum size of the part of the commit log in one frame to a slave, in bytes.",
        minimum=1024, maximum=1_048_576)
    ha_flow_control: bool = setting("haFlowControlEnable", False,
        "The rate at which the commit log is sent to each slave is limited to "
        "maxHaTransferByteInSecond.")
    ha_bytes_per_s: int = setting("maxHaTransferByteInSecond", 100 * 1024 * 1024,
        "Maximum rate of the commit log to each slave, in bytes per second, if "
        "haFlowControlEnable is true.", minimum=1024)
    gap_bytes_max: int = setting("haMaxGapNotInSync", 256 * 1024 * 1024,
        "A slave that is behind by more than this, in bytes, does not count as a slave that can "
        "acknowledge.", aliases=("haSlaveFallbehindMax",), live=True)
    slave_timeout_ms: int = setting("slaveTimeout", 3000,
        "Maximum time that a send waits for slaves, in ms. After that the response is "
        "FLUSH_SLAVE_TIMEOUT.", minimum=1,
        live=True)
    in_sync_written: int | None = setting("inSyncReplicas", None,
        "SYNC_MASTER: number of replicas, including the master, that must have a message before "
        "the response to its send. Default: 2. **Differs from RocketMQ, where the default is 1 "
        "since 5.0, so that a send waits for no slave.** If it is set to 1, it means 1 in "
        "SluiceMQ too.", kind=INTEGER, minimum=1, live=True)
    in_sync_min: int = setting("minInSyncReplicas", 1,
        "Minimum for inSyncReplicas if enableAutoInSyncReplicas lowers it, and minimum size of "
        "the in-sync set of sluiceConsensus: below it, sends are refused.", minimum=1, live=True)
    in_sync_auto: bool = setting("enableAutoInSyncReplicas", False,
        "With enableSlaveActingMaster: fewer replicas than inSyncReplicas are enough if fewer can "
        "acknowledge.", live=True)
    catch_up_ms: int = setting("haMaxTimeSlaveNotCatchup", 2500,
        "With sluiceConsensus: time after which a slave that has not had the whole log leaves the "
        "in-sync set, in ms. Until then every send waits for it. The default is less than the "
        "lease (3 s) and slaveTimeout, so a slave that stops responding delays sends but does not "
        "fail them. **Differs from RocketMQ's controller, where it is 15000.**", minimum=100)
    slave_read: bool = setting("slaveReadEnable", False,
        "Consumers that are far behind are redirected to a slave, and a slave serves them.",
        live=True)
    offset_check_in_slave: bool = setting("offsetCheckInSlave", False,
        "A slave corrects the offset of a reader that is outside of its queue, as a master does. "
        "If false, the reader waits or is sent to the master.", live=True)
    acting_master: bool = setting("enableSlaveActingMaster", False,
        "If the master is unreachable, the slave with the lowest id becomes acting master: it "
        "serves reads and POP, delivers delayed and timed messages, and checks transactions.")
    remote_escape: bool = setting("enableRemoteEscape", False,
        "With enableSlaveActingMaster: the acting master stores new messages, such as due ones, "
        "on another master of the cluster.")
    skip_pre_online: bool = setting("skipPreOnline", False,
        "A master that comes back serves clients at once, before it has asked its slaves for what "
        "they have.")
    name_server_heartbeat_ms: int = setting("brokerHeartbeatInterval", 1000,
        "With enableSlaveActingMaster or sluiceConsensus: interval of heartbeats to name servers, "
        "in ms.", minimum=100)
    members_period_ms: int = setting("syncBrokerMemberGroupPeriod", 1000,
        "With enableSlaveActingMaster: interval at which the broker asks which replicas of its "
        "name are alive, in ms.", minimum=100)
    epoch_path: str = setting("storePathEpochFile", "",
        "File with the terms of the commit log, which RocketMQ calls epochs. Default: "
        "epochFileCheckpoint below storePathRootDir.", kind=PATH)
    consensus: str = setting("sluiceConsensus", "",
        "The service that decides which replica is master: `etcd://host:port,host:port`. Default: "
        "none, and the roles are those of the file. See [replication](replication.md).")
    consensus_user: str = setting("sluiceConsensusUser", "",
        "Account for sluiceConsensus. It needs permission to read and write below `sluicemq/`.")
    consensus_password: str = setting("sluiceConsensusPassword", "",
        "Password of sluiceConsensusUser. Never shown.", is_secret=True)
    consensus_ca: str = setting("sluiceConsensusTrustCertPath", "",
        "With `etcds://`: PEM file with the authorities that sign the certificates of etcd. "
        "Default: the authorities of the system.", kind=PATH)
    consensus_certificate: str = setting("sluiceConsensusCertPath", "",
        "With `etcds://`: PEM file with the certificate that the broker presents to etcd.",
        kind=PATH)
    consensus_key: str = setting("sluiceConsensusKeyPath", "",
        "PEM file with the private key for sluiceConsensusCertPath. Default: the same file.",
        kind=PATH)

    def __post_init__(self) -> None:
        """Check that the role and the id fit together, and set the id of a master to 0.

        With consensus, the replicas choose the master: a configured slave is not allowed, and each
        replica needs an id other than 0, which stays. Without consensus, a slave needs an id other
        than 0. Raises ConfigurationError.
        """
        if self.consensus:
            if self.is_slave:
                raise ConfigurationError(
                    "brokerRole = SLAVE is not allowed with sluiceConsensus, which decides who is"
                    " master.",
                    fix="Remove brokerRole, or set it to SYNC_MASTER or ASYNC_MASTER.",
                )
            if not self.broker_id:
                raise ConfigurationError(
                    "brokerId = 0 is not allowed with sluiceConsensus, which needs an id for each"
                    " replica.",
                    fix="Give each replica a different id of 1 or more, and never change it.",
                )
        elif self.is_slave and not self.broker_id:
            raise ConfigurationError(
                "brokerId = 0 is not allowed with brokerRole = SLAVE: 0 is the id of the master.",
                fix="Set brokerId = 1, or another number that no other slave has.",
            )
        elif not self.is_slave:
            object.__setattr__(self, "broker_id", 0)

    @property
    def is_slave(self) -> bool:
        """Whether the file says that the broker is a slave."""
        return self.broker_role == "SLAVE"

    @property
    def in_sync_replicas(self) -> int:
        """The number of replicas, including the master, that a send waits for."""
        if self.broker_role != "SYNC_MASTER":
            return 1
        return IN_SYNC_UNWRITTEN if self.in_sync_written is None else self.in_sync_written
# fmt: on
