"""Pipelines: files that declare a source, a transformation and sinks; and ready pipelines.

`file.py` reads and checks a pipeline file, `plan.py` builds its DataFrame and the dry run,
`writers.py` has a writer for each kind of sink, and `run.py` runs the pipeline. Each ready
pipeline is a module with a Python function (`archive.py`, `deadletters.py`, `trace.py`, `audit.py`,
`dedup.py`). `ready.py` has the parts that they share.
"""
