"""`sluice acl`: check access rules against a request, lint them, and show which are in force."""

import os

import click

from sluicemq.acl.loading import RuleFiles, RuleSource, decode_text, load_rule_files, load_rules
from sluicemq.acl.rules import SECRET_LENGTH_MIN, Permission, address_numbers, lint
from sluicemq.acl.verdict import (
    Resource,
    authorize_resource,
    group_resource,
    try_without_signature,
)
from sluicemq.cli.ending import EXIT_FINDINGS
from sluicemq.cli.output import (
    Access,
    admin_options,
    client_options,
    format_time,
    json_option,
    print_json,
    print_records,
    print_result,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES

_file_option = click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False),
    help="Main file of the access rules. Default: plain_acl.yml in the current directory, else in "
    "$ROCKETMQ_HOME/conf.",
)
_compatible_option = click.option(
    "--compatible",
    "is_compatible",
    is_flag=True,
    help="Interpret the files as RocketMQ does (sluiceAclCompatible = true).",
)


@click.group()
def acl() -> None:
    """Check access rules, and show which are in force."""


@acl.command()
@_file_option
@_compatible_option
@click.option(
    "--access-key", help="Access key of the request. Without it, the request has no account."
)
@click.option("--topic", help="Topic of the request. Give either a topic or a group.")
@click.option("--group", help="Consumer group of the request.")
@click.option(
    "--action",
    type=click.Choice(["PUB", "SUB"]),
    default="SUB",
    show_default=True,
    help="What the request does: send (PUB) or receive (SUB).",
)
@click.option(
    "--from",
    "host",
    default="",
    help="IP address of the client. Without it, no white list applies.",
)
@json_option
def check(
    path: str | None,
    is_compatible: bool,
    access_key: str | None,
    topic: str | None,
    group: str | None,
    action: str,
    host: str,
    as_json: bool,
) -> None:
    """Show whether a correctly signed request is allowed, and which rule decides it.

    Exit code 1 if the request is refused.
    """
    if (topic is None) == (group is None):
        raise click.UsageError("Give either --topic or --group.")
    if host and not address_numbers(host):
        raise click.UsageError(f"--from must be an IP address, got {host}.")

    resource_name = topic if topic is not None else group_resource(str(group))
    resource = Resource(resource_name, Permission[action])
    rules = load_rule_files(_read_rule_files(path), is_compatible=is_compatible).rules
    verdict = try_without_signature(
        rules, access_key, host, lambda account: authorize_resource(account, resource)
    )

    if verdict.is_allowed:
        outcome = "allowed"
        reason = ""
    else:
        outcome = "refused"
        reason = f": {verdict.reason}"
    print_result(
        {"verdict": outcome, "rule": verdict.rule, "reason": verdict.reason},
        f"{outcome}{reason}\nrule: {verdict.rule}",
        as_json=as_json,
    )
    if not verdict.is_allowed:
        raise SystemExit(EXIT_FINDINGS)


@acl.command("lint")
@_file_option
@_compatible_option
@click.option(
    "--secret-length",
    type=click.IntRange(1),
    default=SECRET_LENGTH_MIN,
    show_default=True,
    help="Minimum length of a secret, in characters. A shorter secret is a finding.",
)
@click.option(
    "--online",
    is_flag=True,
    help="Also check with the cluster whether the topics and groups of the rules exist.",
)
@client_options
@json_option
def lint_files(
    access: Access,
    path: str | None,
    is_compatible: bool,
    secret_length: int,
    online: bool,
    as_json: bool,
) -> None:
    """Find rules that are valid but unsafe or without effect. Exit code 1 if there are findings."""
    files = _read_rule_files(path)
    # A warning about a file is about what the files mean together.
    warnings = load_rule_files(files, is_compatible=is_compatible).warnings
    rules_of_files = [
        load_rules(decode_text(name, content), name, is_compatible=is_compatible).rules
        for name, content in files.contents
    ]

    topics = groups = None  # None means not to check against the cluster
    if online:
        with access.admin() as admin:
            topics = frozenset(admin.topics())
            groups = frozenset(admin.groups())
    findings = lint(rules_of_files, secret_length_min=secret_length, topics=topics, groups=groups)
    records = [
        {"place": finding.place, "text": finding.text, "cure": finding.fix} for finding in findings
    ]
    last_file, _ = files.contents[-1]
    records += [{"place": last_file, "text": warning, "cure": ""} for warning in warnings]
    print_records(records, as_json=as_json, empty="No findings.")
    if records:
        raise SystemExit(EXIT_FINDINGS)


@acl.command()
@admin_options
def status(admin: Admin, as_json: bool) -> None:
    """Show the access rules in force on each broker, and on name servers with access control.

    For each server: since when they are in force, errors in newer files, and how often each
    account was refused. Requires an admin account.
    """
    for address, state in sorted(admin.access_status().items()):
        if as_json:
            print_json({"address": address, **state})
            continue
        if not state.get("enabled"):
            click.echo(f"{state['server']} {address}: no access control (aclEnable=false)")
            continue
        since = format_time(state.get("sinceMs") or 0)
        click.echo(
            f"{state['server']} {address}: {state['accounts']} accounts of {state['file']}, "
            f"in force since {since}"
        )
        if state.get("error"):
            click.echo(f"  the newest files are invalid and NOT in force: {state['error']}")
        for key, count in sorted((state.get("refused") or {}).items()):
            click.echo(f"  refused {key or 'without access key'}: {count:,}")


def _read_rule_files(path: str | None) -> RuleFiles:
    """Return the main file of access rules at `path`, and the files in the folder `acl` beside it.

    None means plain_acl.yml in the current folder, or in $ROCKETMQ_HOME/conf if the first does not
    exist. Raises ConfigurationError if a file cannot be read.
    """
    if path is None:
        paths = ["plain_acl.yml", f"{os.environ.get('ROCKETMQ_HOME', '')}/conf/plain_acl.yml"]
        path = next((candidate for candidate in paths if SYSTEM_FILES.exists(candidate)), paths[0])
    try:
        return RuleSource(SYSTEM_FILES, path).read_files()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}.", fix="Name a readable file with --file."
        ) from error
