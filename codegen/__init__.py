"""Programs that write parts of the source from its definitions."""
