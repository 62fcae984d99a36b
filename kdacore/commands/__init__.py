"""The small subcommands of ``kdacore``: one module each, imported when it is asked for."""
