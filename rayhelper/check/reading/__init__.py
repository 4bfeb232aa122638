"""What the source of a class says: files, names, objects, and what values are."""
