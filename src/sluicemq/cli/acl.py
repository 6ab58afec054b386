"""`sluice acl check|lint|status`: what access rules say, whether they are wise, how they stand."""

import os
from typing import Final

import click

from sluicemq.acl.loading import RuleFiles, RuleSource, decode_text, load_rule_files, load_rules
from sluicemq.acl.rules import SECRET_LENGTH_MIN, Permission, address_numbers, lint
from sluicemq.acl.verdict import (
    Resource,
    authorize_resource,
    group_resource,
    try_without_signature,
)
from sluicemq.cli.output import (
    Access,
    admin_options,
    client_options,
    json_option,
    print_json,
    print_records,
    print_result,
    show_time,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES

EXIT_NO: Final = 1
_file_option = click.option(
    "--file", "path", type=click.Path(dir_okay=False),
    help="The main file; by default plain_acl.yml here, else in $ROCKETMQ_HOME/conf.",
)  # fmt: skip
_compatible_option = click.option(
    "--compatible", "is_compatible", is_flag=True,
    help="Read the files as RocketMQ does, as with sluiceAclCompatible = true.",
)  # fmt: skip


@click.group()
def acl() -> None:
    """Try and check access rules; see how they stand."""


@acl.command()
@_file_option
@_compatible_option
@click.option("--access-key", help="Who asks; without it somebody without an account.")
@click.option("--topic", help="A topic.")
@click.option("--group", help="Or a consumer group.")
@click.option(
    "--action", type=click.Choice(["PUB", "SUB"]), default="SUB", show_default=True,
    help="Send to it (PUB), or read it (SUB).",
)  # fmt: skip
@click.option("--from", "host", default="", help="The caller's address; without it no white list.")
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
    """Give the verdict on a request with a right signature, and the rule that gives it.

    Exit code 1 when it is refused.
    """
    if (topic is None) == (group is None):
        raise click.UsageError("Give either --topic or --group.")
    numbers = address_numbers(host)
    if host and not numbers:
        raise click.UsageError(f"--from {host} is no IP address.")
    name = topic if topic is not None else group_resource(str(group))
    rules = load_rule_files(_texts(path), is_compatible=is_compatible).rules
    resource = Resource(name, Permission[action])
    verdict = try_without_signature(
        rules, access_key, host, lambda account: authorize_resource(account, resource)
    )
    word = "allowed" if verdict.is_allowed else "refused"
    reason = "" if verdict.is_allowed else f": {verdict.reason}"
    print_result(
        {"verdict": word, "rule": verdict.rule, "reason": verdict.reason},
        f"{word}{reason}\nrule: {verdict.rule}",
        as_json=as_json,
    )
    if not verdict.is_allowed:
        raise SystemExit(EXIT_NO)


@acl.command("lint")
@_file_option
@_compatible_option
@click.option(
    "--secret-length", type=click.IntRange(1), default=SECRET_LENGTH_MIN, show_default=True,
    help="Shorter secrets are a finding.",
)  # fmt: skip
@click.option("--online", is_flag=True, help="Ask the cluster whether topics and groups exist.")
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
    """Find what is allowed and yet not wise. Exit code 1 when there are findings."""
    texts = _texts(path)
    read = load_rule_files(texts, is_compatible=is_compatible)
    several = [
        load_rules(decode_text(name, data), name, is_compatible=is_compatible).rules
        for name, data in texts.contents
    ]
    topics = groups = None
    if online:
        with access.admin() as admin:
            topics, groups = frozenset(admin.topics()), frozenset(admin.groups())
    found = lint(several, secret_length_min=secret_length, topics=topics, groups=groups)
    records = [{"place": one.place, "text": one.text, "cure": one.fix} for one in found]
    records += [{"place": texts.contents[-1][0], "text": one, "cure": ""} for one in read.warnings]
    print_records(records, as_json=as_json, empty="Nothing to say.")
    if records:
        raise SystemExit(EXIT_NO)


@acl.command()
@admin_options
def status(admin: Admin, as_json: bool) -> None:
    """Show how the rules of each running broker, and of each protected name server, stand: since
    when they are in force, what is wrong with the newest files, who was refused. Needs an admin
    account."""
    for address, state in sorted(admin.access_status().items()):
        if as_json:
            print_json({"address": address, **state})
            continue
        if not state.get("enabled"):
            click.echo(f"{state['server']} {address}: no access control (aclEnable=false)")
            continue
        since = show_time(state.get("sinceMs") or 0)
        click.echo(
            f"{state['server']} {address}: {state['accounts']} accounts of {state['file']}, "
            f"in force since {since}"
        )
        if state.get("error"):
            click.echo(f"  the newest files are NOT in force: {state['error']}")
        for key, count in sorted((state.get("refused") or {}).items()):
            click.echo(f"  refused {key or 'without access key'}: {count:,}")


def _texts(path: str | None) -> RuleFiles:
    if path is None:
        places = ["plain_acl.yml", f"{os.environ.get('ROCKETMQ_HOME', '')}/conf/plain_acl.yml"]
        path = next((place for place in places if SYSTEM_FILES.exists(place)), places[0])
    try:
        return RuleSource(SYSTEM_FILES, path).read_files()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}.", fix="Name a readable file with --file."
        ) from error
