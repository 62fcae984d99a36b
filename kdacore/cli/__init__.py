"""The command line: one file for each subcommand, joined in ``main.py``."""
