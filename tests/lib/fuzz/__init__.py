"""Fuzzing of a running broker: what nobody in their right mind sends, and what it does to others.

    python -m fuzz --inputs 1000000 --seed 1 --corpus tests/golden/traffic

    corpus    recorded requests (or built-in ones) as templates
    mutate    a template and a random number generator -> an input: bytes for a socket
    sql       expressions that nearly are SQL92
    rules     files that nearly are plain_acl.yml, read in this process
    http2     the same for gRPC over HTTP/2 (--grpc), from what grpcio wrote (grpc_calls)
    connections  the same in memory, without sockets
    drive     a broker in a process of its own, batches of inputs, a bystander, the memory, the log

Inputs travel in batches, each over a connection of its own and seeded by its number, so that a
batch can be repeated alone. All but the last of a batch are frames that a broker reads; then comes
a question that has to be answered, and then one that may break the connection.

The verdict: the broker lives, every batch is answered, the bystander is answered in time, its
memory stays in bounds, and nothing in its log is a traceback.
"""
