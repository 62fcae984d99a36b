"""The launches of the cuda backend's programs, each by itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kdacore.bench.clock import Step
from kdacore_cuda.forms.launches import Launches, Layout
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.program import Launch

Tensors = Mapping[str, torch.Tensor | None]


def buffers_of(launches: Launches, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The buffers that launches need, uninitialised, on ``like``'s device."""
    sizes = launches.buffers.items()
    return {name: like.new_empty(size, dtype=torch.uint8) for name, size in sizes if size}


def separately(
    launches: Launches, layout: Layout | None, like: torch.Tensor, arrays: Tensors
) -> dict[str, Step]:
    """By name, what makes one launch of a program alone: the others have no blocks. Launches that share their number of
    blocks are left out.

    Args:
        launches: the launches.
        layout: how the arguments lie; None: contiguous.
        like: a tensor on their device.
        arrays: by their names in the program.
    """
    program = launches.program
    numbers = launches.with_layout(layout)
    grids = {x.name: x.grid for x in program.steps if isinstance(x, Launch)}

    def alone(name: str) -> Step:
        idle = {grid: 0 for other, grid in grids.items() if other != name}
        packed = program.pack_numbers(numbers | idle)
        return lambda: torch_launch.run(program, packed, launches.arch, like, arrays)

    shared = {grid for grid in grids.values() if list(grids.values()).count(grid) > 1}
    return {name: alone(name) for name, grid in grids.items() if grid not in shared}
