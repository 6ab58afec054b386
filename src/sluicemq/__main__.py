"""Let `python -m sluicemq` run the command `sluice`."""

from sluicemq.cli import main

if __name__ == "__main__":
    main(prog_name="sluice")
