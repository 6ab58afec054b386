"""The shop's database."""

from pathlib import Path

import sqlalchemy as sa

metadata = sa.MetaData()

orders = sa.Table(
    "orders",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("region", sa.String, nullable=False),
    sa.Column("cents", sa.Integer, nullable=False),
    sa.Column("state", sa.String, nullable=False),
)
announced = sa.Table(  # the transaction ids of the changes that were made
    "announced",
    metadata,
    sa.Column("transaction_id", sa.String, primary_key=True),
    sa.Column("order_id", sa.String, nullable=False),
)
bookings = sa.Table(
    "bookings",
    metadata,
    sa.Column("region", sa.String, nullable=False),
    sa.Column("cents", sa.Integer, nullable=False),
)
history = sa.Table(
    "history",
    metadata,
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("order_id", sa.String, nullable=False),
    sa.Column("event", sa.String, nullable=False),
)
letters = sa.Table(  # texts for a mailer to send
    "letters",
    metadata,
    sa.Column("order_id", sa.String, nullable=False),
    sa.Column("text", sa.String, nullable=False),
)


def open_database(path: Path) -> sa.Engine:
    """Open a SQLite file, and create its tables. Writers wait for each other up to 30 s."""
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})
    metadata.create_all(engine)
    return engine
