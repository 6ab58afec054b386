"""`sluice completion SHELL`: click's own script, which asks `sluice` for the words that fit."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what completes commands and options of sluice in a shell: bash 4.4, zsh or fish.

    For bash: eval "$(sluice completion bash)" in ~/.bashrc; for zsh the same in ~/.zshrc; for
    fish: sluice completion fish > ~/.config/fish/completions/sluice.fish
    """
    from sluicemq.cli import main  # noqa: PLC0415 - it imports this module

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "sluice", "_SLUICE_COMPLETE").source())
