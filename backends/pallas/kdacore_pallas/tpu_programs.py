"""``python -m kdacore_pallas.tpu_programs``: callers' programs, compiled for TPUs without one, on
both JAX backends.

Each is a call of the public functions, or a small model of them, inside ``shard_map`` over chips of
a topology: alone, or four. Compile time, code, and memory beside arguments and results are written
as JSON and as a table; a call that a backend or the compiler refuses is written with the reason.
Nothing is run and nothing is timed. Needs ``pip install 'jax[tpu]'`` (libtpu). What the compiler
says about the kernels alone is in :mod:`kdacore_pallas.tpu.report`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kdacore_pallas.tpu import compiler

Array = Any
Row = dict[str, Any]
BACKENDS = ("pallas", "xla")


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: bfloat16 arrays, float32 states, everything computed in the call."""

    T: int = 8192
    H: int = 32
    HV: int = 32
    K: int = 128
    B: int = 1
    op: str = "chunk_kda"
    sequences: int = 0
    """Number of sequences of a pack; 0 without one."""
    slots: int = 0
    """Number of rows of a decode call's state pool; 0 without one."""
    chips: int = 1
    """Heads are split over them."""
    flat: bool = False
    """Rows are arguments, and results, ``[B, T, heads * K]``: as projections before and after the call have them."""


def heads(n: int, **sizes: Any) -> Shape:
    return Shape(H=n, HV=n, **sizes)


GDN = "chunk_gated_delta_rule"
SHAPES: dict[str, Shape] = {
    "T256 H2": heads(2, T=256),
    "T256 H2 gdn": heads(2, T=256, op=GDN),
    "T8192 H32": Shape(),
    "T8192 H32 gdn": Shape(op=GDN),
    "H6": heads(6),
    "H96": heads(96),
    "T65536": Shape(T=65536),
    "K64": Shape(K=64),
    "pack of 37": Shape(sequences=37),
    "GVA 16/64": Shape(H=16, HV=64),
    "4 chips": Shape(chips=4),
}
FLAT = {
    "T8192 H32, flat": Shape(flat=True),
    "K64, flat": Shape(K=64, flat=True),
    "pack of 37, flat": Shape(sequences=37, flat=True),
    "GVA 16/64, flat": Shape(H=16, HV=64, flat=True),
}
"""The memory of these is that of the kernels: arrays ``[B, T, heads, K]`` at a program's border are copied."""
STEPS: dict[str, Shape] = {
    "decode 256": Shape(T=1, B=256, slots=512),
    "decode 4096 slots": Shape(T=1, B=4096, slots=4096),
    "decode 256, 4 chips": Shape(T=1, B=256, slots=512, chips=4),
    "recurrent T256 H2": heads(2, T=256, op="fused_recurrent_kda"),
}
MODEL = {"4 layers": heads(8, T=2048)}
KEPT = ("T8192 H32", "4 chips")
"""Shapes whose gradient is also compiled with the chunks' start states kept, on the backend that keeps them."""


class Program(NamedTuple):
    """A program to compile."""

    shape: str
    what: str
    """``forward``, ``gradient`` (the forward included), ``gradient, starts kept`` (with ``disable_recompute``) or
    ``step`` (of a decode)."""
    backend: str
    generation: str


def programs() -> list[Program]:
    """What the committed report holds: all shapes for one generation, a few for the others."""
    found = []
    for generation in compiler.TOPOLOGIES:
        few = ("T256 H2", "T8192 H32", "4 chips", "decode 256")
        for shape in (*SHAPES, *STEPS, *MODEL):
            if generation == "v6e" or shape in few:
                whats = (
                    ("step",)
                    if shape in STEPS
                    else ("gradient",)
                    if shape in MODEL
                    else ("forward", "gradient")
                )
                found += [Program(shape, what, backend, generation) for what in whats for backend in BACKENDS]
                if shape in KEPT:
                    found.append(Program(shape, "gradient, starts kept", "pallas", generation))
    whats = ("forward", "gradient")
    return found + [Program(shape, what, "pallas", "v6e") for shape in FLAT for what in whats]


CHEAP = [
    Program("T256 H2", "forward", "xla", "v6e"),
    Program("T256 H2", "gradient", "xla", "v6e"),
    Program("T256 H2", "forward", "pallas", "v6e"),
    Program("recurrent T256 H2", "step", "xla", "v6e"),
]
"""Names of the programs that a test compiles again each time."""


# --- the programs ---------------------------------------------------------------------------------


def _arrays(x: Shape) -> dict[str, tuple[tuple[int, ...], str, int | None]]:
    """Shape, dtype and axis of heads of each argument."""
    scalar = x.op == GDN
    T, N = x.T, x.sequences or x.B
    found: dict[str, tuple[tuple[int, ...], str, int | None]] = {
        "q": ((x.B, T, x.H, x.K), "bfloat16", 2),
        "k": ((x.B, T, x.H, x.K), "bfloat16", 2),
        "v": ((x.B, T, x.HV, x.K), "bfloat16", 2),
        "g": ((x.B, T, x.HV) if scalar else (x.B, T, x.HV, x.K), "bfloat16", 2),
        "beta": ((x.B, T, x.HV), "bfloat16", 2),
        "A_log": ((x.HV,), "float32", 0),
        "dt_bias": ((x.HV,) if scalar else (x.HV, x.K), "float32", 0),
    }
    if x.flat:
        found |= {n: ((*found[n][0][:2], math.prod(found[n][0][2:])), *found[n][1:]) for n in "qkvg"}
    if x.sequences:
        found["cu_seqlens"] = ((N + 1,), "int32", None)
    if x.slots:
        found["initial_state"] = ((x.slots, x.HV, x.K, x.K), "float32", 1)
        found["state_indices"] = ((x.B,), "int32", None)
    return found


def _call(x: Shape, backend: str, **more: Any) -> Callable[[dict[str, Array]], tuple[Array, Array]]:
    import kdacore

    op = getattr(kdacore, "fused_recurrent_kda" if x.slots else x.op)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
    }
    if x.slots:
        options["inplace_state"] = True
    options |= more

    def call(arrays: dict[str, Array]) -> tuple[Array, Array]:
        if not x.flat:
            return op(**arrays, **options, backend=backend)[:2]  # type: ignore[no-any-return]
        rows = {n: arrays[n].reshape(x.B, x.T, -1, x.K) for n in "qkvg"}
        o, states = op(**arrays | rows, **options, backend=backend)[:2]
        return o.reshape(arrays["v"].shape), states

    return call


def _gradient(x: Shape, backend: str, **more: Any) -> Callable[[dict[str, Array]], Any]:
    """Gradients of every array for a loss of the outputs."""
    import jax
    import jax.numpy as jnp

    call = _call(x, backend, **more)

    def loss(wanted: dict[str, Array], rest: dict[str, Array]) -> Array:
        return jnp.sum(jnp.square(call(wanted | rest)[0].astype(jnp.float32)))

    def gradient(arrays: dict[str, Array]) -> Any:
        rest = {n: a for n, a in arrays.items() if n == "cu_seqlens"}
        return jax.grad(loss)({n: a for n, a in arrays.items() if n not in rest}, rest)

    return gradient


def _model(x: Shape, backend: str) -> tuple[Callable[[dict[str, Array]], Any], dict[str, Any]]:
    """Gradients of four layers, each a call between two projections, by ``scan`` and ``remat``; and
    the arguments."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    width = x.H * x.K
    call = _call(x, backend)

    def layer(rows: Array, weights: dict[str, Array]) -> tuple[Array, None]:
        made = jnp.split(rows @ weights["into"], [width * n for n in (1, 2, 3, 4)], axis=-1)
        q, k, v, g = (a.reshape(x.B, x.T, x.H, x.K) for a in made[:4])
        gate = {"A_log": weights["A_log"], "dt_bias": weights["dt_bias"]}
        o, _ = call({"q": q, "k": k, "v": v, "g": g, "beta": made[4], **gate})
        return rows + o.reshape(x.B, x.T, width) @ weights["out"], None

    def loss(weights: dict[str, Array], rows: Array) -> Array:
        last, _ = lax.scan(jax.checkpoint(layer), rows, weights)
        return jnp.sum(jnp.square(last.astype(jnp.float32)))

    def gradient(arrays: dict[str, Array]) -> Any:
        weights = {n: a for n, a in arrays.items() if n != "rows"}
        return jax.grad(loss)(weights, arrays["rows"])

    return gradient, {
        "rows": ((x.B, x.T, width), "bfloat16", None),
        "into": ((4, width, 4 * width + x.H), "bfloat16", None),
        "out": ((4, width, width), "bfloat16", None),
        "A_log": ((4, x.H), "float32", None),
        "dt_bias": ((4, x.H, x.K), "float32", None),
    }


# --- compiling them -------------------------------------------------------------------------------


def compiled(program: Program) -> Row:
    """What the compiler says about a program, or why it was refused."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from kdacore.errors import UnsupportedError

    x = (SHAPES | FLAT | STEPS | MODEL)[program.shape]
    gradient = program.what.startswith("gradient")
    if program.shape in MODEL:
        fn, arrays = _model(x, program.backend)
    else:
        arrays = _arrays(x)
        kept = {"disable_recompute": True} if program.what.endswith("kept") else {}
        fn = (_gradient if gradient else _call)(x, program.backend, **kept)
    mesh = Mesh(np.asarray(compiler.devices(program.generation)[: x.chips]), ("heads",))
    specs = {n: P() if axis is None else P(*[None] * axis, "heads") for n, (_, _, axis) in arrays.items()}
    results: Any = (P(None, None, "heads"), P(None, "heads"))
    if gradient:
        results = {n: spec for n, spec in specs.items() if n not in ("cu_seqlens", "rows")}
    run = jax.shard_map(fn, mesh=mesh, in_specs=(specs,), out_specs=results, check_vma=False)
    row: Row = program._asdict()
    given = {
        n: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, specs[n]))
        for n, (shape, dtype, _) in arrays.items()
    }
    pool = {n: a for n, a in given.items() if n == "initial_state"}
    others = {n: a for n, a in given.items() if n not in pool}
    try:
        traced = jax.jit(lambda pool, others: run(pool | others), donate_argnums=0).trace(pool, others)
        lowered = traced.lower(lowering_platforms=("tpu",))
        start = time.perf_counter()
        made = lowered.compile()
    except UnsupportedError as error:
        return row | {"refused": str(error)}
    except jax.errors.JaxRuntimeError as error:
        return row | {"refused": "the compiler: " + str(error).splitlines()[0]}
    seconds = time.perf_counter() - start
    size, text = made.memory_analysis(), made.as_text()
    row |= {
        "compile_s": round(seconds, 2),
        "code_bytes": size.generated_code_size_in_bytes,
        "temp_hbm_bytes": size.temp_size_in_bytes,
        "argument_bytes": size.argument_size_in_bytes,
    }
    if x.chips > 1:
        names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
        row["collectives"] = len(re.findall(rf" (?:{names})(?:-start)?\(", text))
    return row


def report(wanted: Sequence[Program]) -> dict[str, Any]:
    """All of them, as JSON-able data."""
    versions = compiler.versions()
    rows = []
    for program in wanted:
        rows.append(compiled(program))
        print(line(rows[-1]), flush=True)
    return {"schema": 1, "run_on_tpu": False, "versions": versions, "rows": rows}


def with_rows(before: dict[str, Any], found: dict[str, Any]) -> list[Row]:
    """The rows of a report, some of them compiled again, by the same versions, in the order of
    :func:`programs`."""
    if before["versions"] != found["versions"]:
        raise SystemExit(f"the file is of {before['versions']}: compile all programs again")
    rows = {tuple(row[n] for n in Program._fields): row for row in (*before["rows"], *found["rows"])}
    return [rows[program] for program in programs() if program in rows]


def line(row: Row) -> str:
    """A row of the report as text."""
    name = " ".join((row["generation"], row["backend"], row["what"], row["shape"]))
    rest = {n: value for n, value in row.items() if n not in Program._fields}
    return f"{name}: " + ", ".join(f"{n} {value}" for n, value in rest.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kdacore_pallas.tpu_programs", description=__doc__)
    parser.add_argument(
        "--cheap", action="store_true", help="only the programs that a test compiles each time"
    )
    parser.add_argument(
        "--only", default="", help="a part of the line that names a program; other rows of the file are kept"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args(argv)
    if compiler.versions() is None:
        print(compiler.MISSING, file=sys.stderr)
        return 2
    compiler.environment()
    wanted = CHEAP if args.cheap else programs()
    wanted = [p for p in wanted if args.only in line(p._asdict())]
    found = report(wanted)
    if args.out is not None:
        if args.only and args.out.exists():
            found["rows"] = with_rows(json.loads(args.out.read_text()), found)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
