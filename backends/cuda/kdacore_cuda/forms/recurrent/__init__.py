"""The recurrent ops in one launch."""
