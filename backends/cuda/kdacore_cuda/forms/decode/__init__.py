"""The fused decode ops in one launch."""
