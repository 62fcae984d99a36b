"""Kernels before they run: sources, compiler, the cubins and handlers in the package, the cache on disk."""
