"""Tools for store directories: describe, verify, dump, repair, backup and restore.

They find everything from the files of a store, without its configuration, and accept stores of
SluiceMQ and of RocketMQ, also damaged ones. `verify`, `dump` and `back_up` take no lock and do not
change the store. `repair` with `write` locks the store, so that no broker uses it meanwhile.
"""
