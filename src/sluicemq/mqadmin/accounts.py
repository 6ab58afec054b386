"""Access rules of brokers, as mqadmin of RocketMQ 4 and 5.3 changes them (spec/acl.md): accounts in
plain_acl.yml.
"""

from typing import Final

from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import Given, Session
from sluicemq.wire import fastjson
from sluicemq.wire.headers import UpdateAccountRequest

_VERSION: Final = "{:<16}  {:<22}  {:<22}  {:<20}  {:<22}  {:<22}"
_FIELDS: Final = (
    "accessKey", "secretKey", "whiteRemoteAddress", "admin", "defaultTopicPerm",
    "defaultGroupPerm", "topicPerms", "groupPerms",
)  # fmt: skip


def _addresses(session: Session, given: Given) -> list[str]:
    """The broker that is named, or all of the cluster, slaves too."""
    if "brokerAddr" in given:
        return [given["brokerAddr"]]
    found = session.brokers(given["clusterName"])
    return [one for master, slaves in found for one in (master, *slaves) if one]


def update(session: Session, given: Given) -> None:
    """Create an account, or change what is given."""
    account = UpdateAccountRequest(
        access_key=given["accessKey"],
        secret_key=given["secretKey"],
        white_address=given.get("whiteRemoteAddress"),
        admin=given.truth("admin") if "admin" in given else None,
        topic_default=given.get("defaultTopicPerm"),
        group_default=given.get("defaultGroupPerm"),
        topic_permissions=given.get("topicPerms"),
        group_permissions=given.get("groupPerms"),
    )
    for address in _addresses(session, given):
        session.admin.update_account(address, account)
        session.say(f"create or update plain access config to {address} success.")
    asked: dict[str, object] = {
        name: f"'{java.shown(given.get(name))}'" for name in _FIELDS if name != "secretKey"
    }
    asked |= {"admin": given.truth("admin"), "topicPerms": None, "groupPerms": None}
    asked |= {
        name: given[name].split(",") for name in ("topicPerms", "groupPerms") if name in given
    }
    session.write(java.record("PlainAccessConfig", asked, "{}"))


def delete(session: Session, given: Given) -> None:
    """Delete an account."""
    for address in _addresses(session, given):
        session.admin.delete_account(address, given["accessKey"])
        session.say(f"delete plain access config account from {address} success.")
    session.write(f"account's accessKey is:{given['accessKey']}")


def white_addresses(session: Session, given: Given) -> None:
    """Set who is let in without a signature."""
    for address in _addresses(session, given):
        session.admin.set_white_addresses(
            address, given["globalWhiteRemoteAddresses"], given.get("aclFileFullPath")
        )
        session.say(f"update global white remote addresses to {address} success.")


def show(session: Session, given: Given) -> None:
    """All accounts, without their secrets."""
    for address in session.addresses(given):
        found = session.admin.accounts(address)
        white = java.shown(found.get("globalWhiteAddrs", []))
        session.say(f"\n{'globalWhiteRemoteAddresses':<20}: {white}\n\naccounts:")
        for account in found.get("plainAccessConfigs", ()):
            for name in _FIELDS:
                value = account.get(name)
                session.say(f"  {name:<18}: {'' if value is None else java.shown(value)}")
            session.say()


def versions(session: Session, given: Given) -> None:
    """Which edition of the rules is in force."""
    is_one = "brokerAddr" in given
    if not is_one:
        session.say(
            _VERSION.format(
                "#Cluster Name", "#Broker Name", "#Broker Addr", "#AclFilePath",
                "#AclConfigVersionNum", "#AclLastUpdateTime",
            )
        )  # fmt: skip
    for address in session.addresses(given):
        found = session.admin.account_versions(address)
        for path, version in fastjson.loads(found.all_versions).items():
            session.say(
                _VERSION.format(
                    found.cluster, found.broker, found.address, path, version["counter"],
                    java.second_text(version["timestamp"]),
                )
            )  # fmt: skip
    whose = "broker's" if is_one else "cluster's"
    end = f" Address:{given['brokerAddr']} " if is_one else ""
    session.say(f"get {whose} plain access config version success.{end}")
