"""`python -m sluicemq` is `sluice`."""

from sluicemq.cli import main

if __name__ == "__main__":
    main(prog_name="sluice")
