"""The version of kdacore."""

__version__ = "0.1.0"
