"""`sluice pipeline run|check|list`: pipelines on Spark from a file (docs/pipelines.md).

`run` writes progress to stderr, so stdout is free for `--json`: a line for each event, or the plan
of a dry run. `check` needs neither cluster nor Spark. Exit codes: 0 done, 1 problems in the file or
a failure, 2 wrong usage.
"""

import click

from sluicemq.cli.output import json_option, print_json, print_records


@click.group()
def command() -> None:
    """Data pipelines on Spark: run, check and list them."""


@command.command("run")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--master", help="Spark's master, as in spark://host:7077; default local[*].")
@click.option(
    "--conf", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; repeatable."
)
@json_option
def run_command(
    file: str, dry_run: bool, master: str | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Run the pipeline of FILE.

    Ctrl-C and SIGTERM let a stream finish its micro-batch; a second one stops at once.
    """
    from sluicemq.spark.pipelines.__main__ import run_file  # noqa: PLC0415 - pyspark

    wrong = [one for one in settings if "=" not in one]
    if wrong:
        raise click.UsageError(f"--conf is {wrong[0]!r}: write KEY=VALUE.")
    chosen = dict(one.split("=", 1) for one in settings)
    raise SystemExit(
        run_file(file, master=master, settings=chosen, dry_run=dry_run, as_json=as_json)
    )


@command.command("check")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@json_option
@click.pass_context
def check_command(context: click.Context, file: str, as_json: bool) -> None:
    """Say what is wrong in FILE: line, key, cure. Needs no cluster and starts no Spark."""
    from sluicemq.spark.pipelines.file import check_pipeline  # noqa: PLC0415 - pyspark

    pipeline, problems = check_pipeline(file)
    for one in problems:
        if as_json:
            print_json({
                "file": file, "line": one.line, "key": one.key, "what": one.what,
                "cure": one.cure, "severity": "error" if one.is_error else "warning",
            })  # fmt: skip
        else:
            click.echo(one.told(file))
    if pipeline is None:
        context.exit(1)
    if not as_json:
        click.echo(f"{file}: the pipeline {pipeline.name!r} is right.")


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the ready pipelines (`use: NAME`) and their fields."""
    from sluicemq.spark.pipelines.ready import NAMES, REQUIRED, ready  # noqa: PLC0415 - pyspark

    if not as_json:
        for name in NAMES:
            click.echo(f"{name}: {ready(name).what}")
        click.echo()
    records = [
        {
            "pipeline": name,
            "field": one.name,
            "kind": " | ".join(one.words) or one.kind,
            "default": "required" if one.default is REQUIRED else one.default,
            "what": one.what,
        }
        for name in NAMES
        for one in ready(name).fields
    ]
    print_records("", records, as_json=as_json, empty="There is none.")
