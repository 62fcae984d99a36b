"""Device code. Nothing here is imported before a call runs on this backend."""
