"""RocketMQ's `mqadmin`, without Java: its commands and flags, its lines and columns.

`table.COMMANDS` declares each command of the tool of 5.5.0: its name, its flags, what it does. A
command asks through the operations of `Admin` and prints; `commands.run` parses as the tool does,
and says errors in its form. What a SluiceMQ cluster does not have is refused with a sentence that
names what to use instead.
"""
