"""Headers of the requests that change access rules (mqadmin updateAclConfig and its kin)."""

from sluicemq.wire.declare import boolean, header, text


@header
class UpdateAccountRequest:
    """50: create an account or change one. Lists are joined by commas."""

    access_key: str = text("accessKey")
    secret_key: str | None = text("secretKey", default=None)
    white_address: str | None = text("whiteRemoteAddress", default=None)
    admin: bool | None = boolean("admin", default=None)
    topic_default: str | None = text("defaultTopicPerm", default=None)
    group_default: str | None = text("defaultGroupPerm", default=None)
    topic_permissions: str | None = text("topicPerms", default=None)
    group_permissions: str | None = text("groupPerms", default=None)


@header
class DeleteAccountRequest:
    """51."""

    access_key: str = text("accessKey")


@header
class AccessVersionResponse:
    """Answer to 52. Versions are JSON texts: the main file's, and each file's by its path."""

    version: str = text("version")
    all_versions: str = text("allAclFileVersion")
    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")


@header
class UpdateWhiteAddressesRequest:
    """53: the new list, joined by commas, of the main file or of the one that is named."""

    addresses: str = text("globalWhiteAddrs")
    file: str | None = text("aclFileFullPath", default=None)
