"""Tools over a store directory that no broker serves: they take no lock and, but for repair, write
not one byte. Found from the files alone; ours and Java's, sound and damaged ones.
"""
