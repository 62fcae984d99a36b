"""A kdacore backend to learn from; see ``plugin.py``."""
