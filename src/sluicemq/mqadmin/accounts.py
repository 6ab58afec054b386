"""Commands for the accounts in plain_acl.yml, as mqadmin of RocketMQ 4 and 5.3 has them.

The format of the file and the requests are in spec/acl.md.
"""

from typing import Final

from sluicemq.acl.rules import ACCOUNT_FIELDS
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import FlagValues, Session
from sluicemq.wire import fastjson
from sluicemq.wire.headers import UpdateAccountRequest

_VERSION_ROW: Final = "{:<16}  {:<22}  {:<22}  {:<20}  {:<22}  {:<22}"
_VERSION_HEADING: Final = _VERSION_ROW.format(
    "#Cluster Name",
    "#Broker Name",
    "#Broker Addr",
    "#AclFilePath",
    "#AclConfigVersionNum",
    "#AclLastUpdateTime",
)


def _find_target_addresses(session: Session, values: FlagValues) -> list[str]:
    """Return the address in flag `brokerAddr`, or those of all brokers of a cluster.

    The slaves of the cluster are included.
    """
    if "brokerAddr" in values:
        return [values["brokerAddr"]]
    return session.all_addresses(values["clusterName"])


def update_account(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateAclConfig`: create an account, or change the given fields of one."""
    is_admin = values.get_bool("admin") if "admin" in values else None  # None: stays as it is
    account = UpdateAccountRequest(
        access_key=values["accessKey"],
        secret_key=values["secretKey"],
        white_address=values.get("whiteRemoteAddress"),
        admin=is_admin,
        topic_default=values.get("defaultTopicPerm"),
        group_default=values.get("defaultGroupPerm"),
        topic_permissions=values.get("topicPerms"),
        group_permissions=values.get("groupPerms"),
    )
    for address in _find_target_addresses(session, values):
        session.admin.update_account(address, account)
        session.print_line(f"create or update plain access config to {address} success.")
    session.write(java.format_object("PlainAccessConfig", _make_account_fields(values), "{}"))


def _make_account_fields(values: FlagValues) -> dict[str, object]:
    """Return the fields of an account, from the flags, as RocketMQ's tool prints them.

    The secret key is left out.
    """
    fields: dict[str, object] = {}
    for name in ACCOUNT_FIELDS:
        if name == "admin":
            fields[name] = values.get_bool(name)
        elif name in ("topicPerms", "groupPerms"):
            fields[name] = values[name].split(",") if name in values else None
        elif name != "secretKey":
            fields[name] = f"'{java.format_value(values.get(name))}'"
    return fields


def delete_account(session: Session, values: FlagValues) -> None:
    """Run `mqadmin deleteAclConfig`: delete an account."""
    for address in _find_target_addresses(session, values):
        session.admin.delete_account(address, values["accessKey"])
        session.print_line(f"delete plain access config account from {address} success.")
    session.write(f"account's accessKey is:{values['accessKey']}")


def set_white_addresses(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateGlobalWhiteAddr`: set the addresses that need no signature."""
    for address in _find_target_addresses(session, values):
        session.admin.set_white_addresses(
            address, values["globalWhiteRemoteAddresses"], values.get("aclFileFullPath")
        )
        session.print_line(f"update global white remote addresses to {address} success.")


def show_accounts(session: Session, values: FlagValues) -> None:
    """Run `mqadmin getAclConfig`: print all accounts, with masked secret keys."""
    for address in session.target_addresses(values):
        rules = session.admin.accounts(address)
        white_list = java.format_value(rules.get("globalWhiteAddrs", []))
        session.print_line(f"\n{'globalWhiteRemoteAddresses':<20}: {white_list}\n\naccounts:")
        for account in rules.get("plainAccessConfigs", ()):
            for name in ACCOUNT_FIELDS:
                field = account.get(name)
                field_text = "" if field is None else java.format_value(field)
                session.print_line(f"  {name:<18}: {field_text}")
            session.print_line()


def show_account_versions(session: Session, values: FlagValues) -> None:
    """Run `mqadmin clusterAclConfigVersion`: print the version of each broker's access rules."""
    has_address = "brokerAddr" in values
    if not has_address:
        session.print_line(_VERSION_HEADING)
    for address in session.target_addresses(values):
        versions = session.admin.account_versions(address)
        for path, version in fastjson.loads(versions.all_versions).items():
            session.print_line(
                _VERSION_ROW.format(
                    versions.cluster,
                    versions.broker,
                    versions.address,
                    path,
                    version["counter"],
                    java.format_time_seconds(version["timestamp"]),
                )
            )
    if has_address:
        session.print_line(
            f"get broker's plain access config version success. Address:{values['brokerAddr']} "
        )
    else:
        session.print_line("get cluster's plain access config version success.")
