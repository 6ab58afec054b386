"""RocketMQ's `mqadmin` without Java: the same commands, flags and output.

`table.COMMANDS` declares each command of RocketMQ 5.5.0: its name, its flags and its function. A
function calls `Admin`, then prints what RocketMQ's tool would print. `commands.run` parses the
command line and prints errors in the form of that tool. A command that has no counterpart in
SluiceMQ fails with a text that says what to use instead.
"""
