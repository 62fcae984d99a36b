"""kdacore's CUDA backend: hand-written kernels, compiled by NVRTC or shipped as cubins. No build
step at install."""

__version__ = "0.1.0"
