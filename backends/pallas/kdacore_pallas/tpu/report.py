"""``python -m kdacore_pallas.tpu.report``: what the real TPU compiler says about the kernels, with
no TPU.

Compiles forward, backward and decode at production shapes for each generation, alone and for
four chips under ``shard_map``, and writes code size, VMEM, spills, schedule lengths and HBM traffic
as JSON and as a table. Nothing is run and nothing is timed. Needs ``pip install 'jax[tpu]'``
(libtpu).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kdacore_pallas.tpu import compiler

Row = dict[str, Any]


def _row(
    what: str,
    generation: str,
    compiled: compiler.Compiled,
    dumps: str,
    kernel: str,
    heads: tuple[int, int] | None,
) -> Row:
    """``heads``: those of a step, and how many of them are computed side by side."""
    row: Row = {
        "what": what,
        "generation": generation,
        "compile_s": round(compiled.seconds, 2),
        "code_bytes": compiled.code_bytes,
        "temp_hbm_bytes": compiled.temp_bytes,
    }
    bundles = compiler.read_bundles(dumps, kernel)
    if bundles is not None:
        row |= {
            "bundles_by_depth": bundles.by_depth,
            "vmatmul": bundles.matmuls,
            "spill_stores": bundles.spill_stores,
        }
        if heads:
            row["heads_together"] = heads[1]
            row["bundles_per_head_and_128_tokens"] = bundles.per_head(*heads)
    return row


def _alone(generation: str, dumps: str) -> list[Row]:
    """Forward and backward, with and without kept start states, and decode, on one chip."""
    from jax.sharding import SingleDeviceSharding

    from kdacore_pallas.tpu import report_calls, traffic, vmem

    spec = report_calls.on(SingleDeviceSharding(compiler.devices(generation)[0]))
    size = report_calls.Size()
    request, inputs = report_calls.chunk_request(size, generation), report_calls.chunk_inputs(size, spec)
    pool = report_calls.recurrent_request(generation)
    given, starts = (inputs, inputs.v), report_calls.kept_starts(size, spec)
    calls: list[Any] = [
        ("forward", "chunk_forward", report_calls.forward_call(request), (inputs,), False),
        ("backward", "chunk_backward", report_calls.backward_call(request), given, False),
        (
            "forward, starts kept", "chunk_forward", report_calls.forward_call(request, keep_starts=True),
            (inputs,), True,
        ),
        (
            "backward from kept starts", "chunk_backward", report_calls.backward_call(request),
            (*given, starts), False,
        ),
        (
            "decode", "recurrent", report_calls.recurrent_call(pool), (report_calls.recurrent_inputs(pool, spec),),
            False,
        ),
    ]  # fmt: skip
    counts = (
        traffic.forward_traffic(request, inputs),
        traffic.backward_traffic(request, inputs),
        traffic.forward_traffic(request, inputs, keep_starts=True),
        traffic.backward_traffic(request, inputs, kept_starts=True),
    )
    rows = []
    for what, kernel, fn, args, keep in calls:
        compiler.clear(dumps)
        heads, need = None, vmem.recurrent_bytes(pool)
        if kernel != "recurrent":
            which = kernel.removeprefix("chunk_")
            hb = vmem.heads_per_step(request)
            heads = hb, vmem.heads_together(request, which, hb, keep)
            need = vmem.chunk_bytes(request, which, hb, keep, heads[1])
        row = _row(what, generation, compiler.compile_for(fn, *args), dumps, f"kdacore_{kernel}", heads)
        row |= {"vmem_need_bytes": need, "vmem_bytes": vmem.VMEM[generation]}
        rows.append(row)
    tokens = size.B * size.T * size.HV
    for row, found in zip(rows, counts, strict=False):
        row["hbm_bytes_per_token_head"] = round(found.moved / tokens, 1)
        row["least_bytes_per_token_head"] = round(found.least / tokens, 1)
    return rows


def _four_chips(generation: str, dumps: str) -> list[Row]:
    """Heads split over four chips by ``shard_map``: forward, backward and decode."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kdacore_pallas.tpu import report_calls

    mesh = Mesh(np.asarray(compiler.devices(generation)[:4]), ("heads",))
    local = report_calls.Size(H=8, HV=8)
    request = report_calls.chunk_request(local, generation)
    pool = report_calls.recurrent_request(generation, H=8)

    def split(dtype: str, *shape: int) -> PartitionSpec:
        axis = 2 if len(shape) >= 3 and shape[1] != 8 else {4: 1, 2: 0, 1: 0}[len(shape)]
        return PartitionSpec() if dtype == "int32" else PartitionSpec(*[None] * axis, "heads")

    def whole(dtype: str, *shape: int) -> Any:
        where = split(dtype, *shape)
        full = tuple(n * 4 if i < len(where) and where[i] else n for i, n in enumerate(shape))
        return jax.ShapeDtypeStruct(full, jax.numpy.dtype(dtype), sharding=NamedSharding(mesh, where))

    chunk_specs = report_calls.chunk_inputs(local, split)
    chunk_args = report_calls.chunk_inputs(local, whole)
    rows_out = chunk_specs._replace(A_log=PartitionSpec("heads"), dt_bias=PartitionSpec("heads"))
    state = PartitionSpec(None, "heads")
    calls = [
        (
            "forward", "chunk_forward", report_calls.forward_call(request),
            (chunk_specs,), (chunk_args,), (chunk_specs.v, state),
        ),
        (
            "backward", "chunk_backward", lambda i, do: tuple(report_calls.backward_call(request)(i, do)[:7]),
            (chunk_specs, chunk_specs.v), (chunk_args, chunk_args.v), tuple(rows_out[:7]),
        ),
        (
            "decode", "recurrent", report_calls.recurrent_call(pool), (report_calls.recurrent_inputs(pool, split),),
            (report_calls.recurrent_inputs(pool, whole),), (chunk_specs.v, state),
        ),
    ]  # fmt: skip
    rows = []
    for what, kernel, fn, in_specs, args, out_specs in calls:
        compiler.clear(dumps)
        sharded = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        compiled = compiler.compile_for(sharded, *args)
        row = _row(f"{what}, 4 chips", generation, compiled, dumps, f"kdacore_{kernel}", None)
        row["collectives"] = sum(
            compiled.hlo.count(f" {op}(") for op in ("all-reduce", "all-gather", "all-to-all")
        )
        rows.append(row)
    return rows


def _variants(generation: str, dumps: str) -> list[Row]:
    """Planned cost of the forward kernel: two inverses, two chunk sizes."""
    from jax.sharding import SingleDeviceSharding

    from kdacore_pallas.tpu import report_calls, vmem

    spec = report_calls.on(SingleDeviceSharding(compiler.devices(generation)[0]))
    size = report_calls.Size()
    request, inputs = report_calls.chunk_request(size, generation), report_calls.chunk_inputs(size, spec)
    hb, rows = vmem.heads_per_step(request), []
    heads = hb, vmem.heads_together(request, "forward", hb)
    for inverse, chunk in report_calls.VARIANTS:
        compiler.clear(dumps)
        compiled = compiler.compile_for(report_calls.forward_variant(request, inverse, chunk), inputs)
        row = _row("forward variant", generation, compiled, dumps, "kdacore_chunk_forward", heads)
        row |= {"inverse": inverse, "chunk": chunk}
        cost = row.get("bundles_per_head_and_128_tokens")
        if cost is not None:
            row["planned_bundles"] = cost * size.B * size.HV * -(-size.T // 128)
        rows.append(row)
    return rows


def report(generations: list[str], dumps: str) -> dict[str, Any]:
    """Everything, as JSON-able data. A compiler error is raised, not recorded: a report has no
    failed rows."""
    rows: list[Row] = []
    for generation in generations:
        rows += _alone(generation, dumps) + _four_chips(generation, dumps)
    for generation in [g for g in ("v5e", "v6e") if g in generations]:
        rows += _variants(generation, dumps)
    versions = compiler.versions()
    return {"schema": 1, "run_on_tpu": False, "versions": versions, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """The report as lines of text."""
    lines = []
    for row in found["rows"]:
        name = " ".join(str(row[k]) for k in ("generation", "what", "inverse", "chunk") if k in row)
        rest = {k: v for k, v in row.items() if k not in ("generation", "what", "inverse", "chunk")}
        lines.append(f"{name}: " + ", ".join(f"{k} {v}" for k, v in rest.items()))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kdacore_pallas.tpu.report", description=__doc__)
    parser.add_argument(
        "--generations", nargs="+", default=list(compiler.TOPOLOGIES), choices=compiler.TOPOLOGIES
    )
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args(argv)
    if compiler.versions() is None:
        print(compiler.MISSING, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as dumps:
        compiler.environment(dumps)
        found = report(args.generations, dumps)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
