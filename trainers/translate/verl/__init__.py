"""verl's keys in ours: ``translation.py``, with a file for each part of a configuration."""
