"""SluiceMQ: a RocketMQ-compatible message system whose data pipeline runs on Spark.

Names exported here are the public Python API. They are loaded on first use, so that
`import sluicemq` stays cheap for servers and for the command line.
"""

__version__ = "0.1.0"
