"""What pipelines write to: tables of databases, archives, and topics in steps.

`databases.py` writes rows to tables by key. `archive_runs.py` has the files that record the runs of
an archive, and `verify.py` compares the rows of an archive with the messages at the brokers.
`steps.py` sends messages again in steps that can be resumed.
"""
