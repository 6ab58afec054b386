"""What tests of programs that use SluiceMQ need: crashable files, clocks, embedded servers."""
