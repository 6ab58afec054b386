"""What SluiceMQ costs, beside the real broker where Java is there: `make bench`."""
