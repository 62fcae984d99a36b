"""Ways to compute an op, a folder each: its kernels, the sizes of its grids and workspaces, its launches."""
