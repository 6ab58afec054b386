"""The other side: real RocketMQ clients and servers, pinned, fetched once and driven from Python.

toolchain.py   fetches jars and the Go module into the cache and compiles our drivers against them
clusters.py    starts a name server and a broker, ours or the real ones, and stops them again
drivers.py     talks to a driver process: a command a line, JSON lines back

The benchmarks use it too.
"""
