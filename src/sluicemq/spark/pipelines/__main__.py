"""A pipeline file for spark-submit: `spark-submit … sluicemq/spark/pipelines/__main__.py FILE`.

The same as `sluice pipeline run FILE`, without the command line's packages: also
`python -m sluicemq.spark.pipelines FILE [--master M] [--conf K=V] [--dry-run] [--json]`.
"""

import argparse
import sys

from sluicemq.errors import SluiceError
from sluicemq.spark.pipelines.program import run_file


def main() -> int:
    parser = argparse.ArgumentParser(prog="sluicemq.spark.pipelines", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--master", help="Spark's master; default: spark-submit's, else local[*].")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="Say what would be done.")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout.")
    given = parser.parse_args()
    settings = dict(one.split("=", 1) for one in given.conf if "=" in one)
    try:
        return run_file(given.file, master=given.master, settings=settings,
                        dry_run=given.dry_run, as_json=given.json)  # fmt: skip
    except SluiceError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
