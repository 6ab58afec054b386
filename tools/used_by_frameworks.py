"""Names that vulture takes for unused, and why they are not. `make lint` passes this file to it.

Fields of request headers and bodies are declared because RocketMQ sends them, and members of
enumerations because a protocol defines them. Frameworks call methods by their names.
"""

# Fields of RocketMQ's headers, bodies and configurations: sluicemq.wire, sluicemq.model.
batch_unique_id  # noqa: B018, F821
