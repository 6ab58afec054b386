"""Pipelines: a file that says what comes in, what becomes of it and where it goes; and ready ones.

`file.py` reads and checks the file, `run.py` runs it, `ready.py` is what the ready pipelines are
made of; each of those is a module of its own, with a Python function behind it.
"""
