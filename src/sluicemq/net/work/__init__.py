"""Work that takes long: in slices of the loop, or in another thread."""
