"""`sluice completion SHELL`: print the completion script of click, which calls `sluice`."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in bash (4.4 or later), zsh or fish.

    For bash, write eval "$(sluice completion bash)" to ~/.bashrc. For zsh, write the same with zsh
    to ~/.zshrc. For fish, run: sluice completion fish > ~/.config/fish/completions/sluice.fish
    """
    from sluicemq.cli import main  # noqa: PLC0415 - it imports this module

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    click.echo(completion_class(main, {}, "sluice", "_SLUICE_COMPLETE").source())
