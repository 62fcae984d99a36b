"""Compile the kernels with the real TPU compiler on a machine that has no TPU.

Needs ``libtpu`` (``pip install 'jax[tpu]'``). A topology description stands in for the chips; the
compiler is the one that runs on a TPU host, so memory overflow and unsupported operations are found
here. Times are not: nothing runs.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


MISSING = "libtpu is not installed; to get it: pip install 'jax[tpu]'"


def versions() -> dict[str, str] | None:
    """Versions of JAX and of the TPU compiler; None where libtpu is not installed."""
    try:
        return {n: importlib.metadata.version(n) for n in ("jax", "jaxlib", "libtpu")}
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(dumps: str | None = None) -> None:
    """Settings libtpu reads when it is first loaded: no TPU to look for, and where to write the
    schedules."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if dumps is not None:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"


def devices(generation: str) -> list[Any]:
    """Descriptions of the chips of a small slice."""
    from jax.experimental import topologies

    name = TOPOLOGIES[generation]
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


@dataclass(frozen=True)
class Compiled:
    """Compile time and sizes of one program."""

    seconds: float
    code_bytes: int
    temp_bytes: int
    """HBM the program needs beyond inputs and outputs."""
    hlo: str


def compile_for(fn: Callable[..., Any], *specs: Any) -> Compiled:
    """Compile ``fn`` for arguments whose sharding names TPU devices. Raises what the compiler
    raises."""
    import jax

    start = time.perf_counter()
    program = jax.jit(fn).trace(*specs).lower(lowering_platforms=("tpu",)).compile()
    size = program.memory_analysis()
    return Compiled(
        seconds=time.perf_counter() - start,
        code_bytes=size.generated_code_size_in_bytes,
        temp_bytes=size.temp_size_in_bytes,
        hlo=program.as_text(),
    )


@dataclass(frozen=True)
class Bundles:
    """The final schedule of one kernel: instruction bundles by loop depth, and what is in them."""

    by_depth: dict[int, int]
    matmuls: int
    spill_stores: int

    def per_head(self, heads: int, together: int) -> int:
        """Bundles for one head's 128 tokens: its part of the step's, and of those of an iteration over
        the step's ``heads``, which computes ``together``."""
        step, loop = self.by_depth.get(1, 0), self.by_depth.get(2, 0)
        return round(step / heads + loop / together)


_BUNDLE = re.compile(r"\s*0?x?[0-9a-f]+\s*(?:LB|LH|LE|PB|PF|CT)?: ([> ]*)")


def read_bundles(dumps: str, kernel: str) -> Bundles | None:
    """The newest schedule of a kernel in the dump folder; None when the compiler wrote none."""
    files = [f for f in glob.glob(f"{dumps}/*{kernel}*final_bundles.txt") if "schedule-analysis" not in f]
    if not files:
        return None
    text = Path(max(files)).read_text()
    depths = Counter(m.group(1).count(">") for m in map(_BUNDLE.match, text.splitlines()) if m)
    spills = len(re.findall(r"= vst \[vmem:[^\]]*_spill", text))
    return Bundles(dict(sorted(depths.items())), text.count("vmatmul"), spills)


def clear(dumps: str) -> None:
    shutil.rmtree(dumps, ignore_errors=True)
    os.makedirs(dumps)
