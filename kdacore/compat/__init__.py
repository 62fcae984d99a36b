"""Functions with the signatures of other projects, so that their callers change one line: the import."""
