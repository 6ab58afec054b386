"""Mutants: small wrong patches of the product, each of which a test has to catch.

    table.py     the patches, by area, with the reason and the test
    patching.py  finds a function by its module and name, and patches its text
    running.py   a copy of the repository in which mutants run, one at a time
    __main__.py  the command `make mutants`

A mutant names its function, not a line. So it survives when code moves within a module, and the
house test says at once when the text that it replaces is gone.
"""
