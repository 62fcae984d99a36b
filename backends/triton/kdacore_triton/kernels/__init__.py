"""Device code. Nothing here is imported before a call reaches this backend."""
