"""A test kit for programs that use SluiceMQ: embedded servers, a virtual clock, faulty disks."""
