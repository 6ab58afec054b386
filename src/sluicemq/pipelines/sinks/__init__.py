"""What pipelines write to: topics, Parquet files, tables of databases, and archives.

`writers.py` has a writer for each kind of sink of a pipeline file. `databases.py` writes rows to
tables by key. `archive_runs.py` has the files that record the runs of an archive, and `verify.py`
compares the rows of an archive with the messages at the brokers.
"""
