"""Pipelines: files that declare a source, a transformation and sinks; and ready pipelines.

`file.py` reads and checks a pipeline file, and `run.py` runs it. Each ready pipeline is a module
with a Python function (`archive.py`, `deadletters.py`, `trace.py`, `audit.py`, `dedup.py`).
`ready.py` has the parts that they share.
"""
