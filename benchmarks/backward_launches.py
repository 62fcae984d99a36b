"""Launches of the chunk backward, two backends interleaved: ``python -m benchmarks.backward_launches``.

On a Hopper GPU, K = V = 128. Gradients of both backends are held against the float64 oracle on a short
call and against each other on the timed one before anything is timed.
"""

from __future__ import annotations

import torch

from benchmarks.cuda_launches import buffers_of, separately
from benchmarks.launches import inputs_of, on_host, row, training_arguments
from kdacore.bench import arrays as made
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.bench.results import Figure, Results
from kdacore.selfcheck.check import relative_error
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward.launches import launches_of
from kdacore_cuda.forms.chunk_forward import CHUNK
from kdacore_cuda.forms.torch_forward import readable
from kdacore_reference.oracle import oracle_backward, to_float64
from kdacore_triton import chunk_backward as triton
from kdacore_triton.chunk_backward_plan import plan_backward

BOUND = 1.6e-2
"""Twice the contract's bound on gradients of 16-bit inputs: what two backends may be apart."""
PRESET = "backward-launches"


def call_of(case: Case, gates: str) -> tuple[Request, ChunkInputs, OutputGrads]:
    """Request, inputs and output gradients of one case on the GPU."""
    request, inputs, x = inputs_of(case, gates)
    return request, inputs, OutputGrads(made.output_gradient(case, x), None)


def apart(got: InputGrads, want: InputGrads) -> dict[str, float]:
    """Relative distance of each gradient."""
    pairs = zip(InputGrads._fields, got, want, strict=True)
    return {n: relative_error(to_float64(a), to_float64(b)) for n, a, b in pairs if a is not None}


def gate(case: Case) -> None:
    """Raises AssertionError where a gradient is wrong."""
    short = Case(name="short", phase="training", T=300, H=2, gate=case.gate)
    # The gradient of "init" gates is a handful of large numbers, whose rounding does not average out.
    request, inputs, grads = call_of(short, "random")
    want = oracle_backward(
        request, on_host(inputs), OutputGrads(None if grads.o is None else grads.o.cpu(), None)
    )
    for name, backend in (("cuda", chunk_backward), ("triton", triton)):
        found = apart(backend.backward(request, inputs, (), grads), want)
        print(f"{name} against the oracle:", {k: f"{v:.1e}" for k, v in found.items()})
        if not all(v < BOUND for v in found.values()):
            raise AssertionError(f"{name} is wrong: {found}")
    request, inputs, grads = call_of(case, "random")
    found = apart(
        chunk_backward.backward(request, inputs, (), grads), triton.backward(request, inputs, (), grads)
    )
    print(f"cuda against triton, {case.name}:", {k: f"{v:.1e}" for k, v in found.items()})
    if not all(v < 2 * BOUND for v in found.values()):
        raise AssertionError(f"the backends are apart: {found}")


def cuda_steps(
    request: Request, inputs: ChunkInputs, grads: OutputGrads, kept: torch.Tensor | None = None
) -> dict[str, Step]:
    """The launches of the hand-written backward, each on what the ones before it left; ``kept``: what the
    forward kept of its segments. Sums over chunks, and over the value heads of a group, are in ``all`` alone."""
    r, wanted = request, InputGrads(*[x is not None for x in inputs[: len(InputGrads._fields)]])
    first, second = launches_of(r, wanted, "" if kept is None else "maps", sums_to_caller=True)
    given, layout = readable(CHUNK, r, inputs, rows_apart=False)
    like, slots = inputs.v, int(second.numbers["slots"])
    arrays = given._asdict() | {"d_o": grads.o, "saved": kept}
    arrays |= {
        name: torch.empty_like(getattr(inputs, name[1:])) for name in ("dq", "dk", "dv", "dg", "dbeta")
    }
    for name, width in (("dA_part", ()), ("dbias_part", (r.K,))):
        arrays[name] = like.new_empty((slots, r.HV, *width), dtype=torch.float32)
    arrays |= buffers_of(first, like) | buffers_of(second, like)
    before = separately(first, layout, like, arrays)
    steps = {**before, "gradients": separately(second, layout, like, arrays)["grads"]}
    for run in steps.values():
        run()
    saved = () if kept is None else (kept,)
    return {**steps, "all": lambda: chunk_backward.backward(request, inputs, saved, grads)}


def triton_steps(request: Request, inputs: ChunkInputs, grads: OutputGrads) -> dict[str, Step]:
    """The same of the Triton backward."""
    plan = plan_backward(request)
    work = triton._run_prepare(request, plan, inputs)
    prepared = dict(work)
    triton._run_scan(request, plan, inputs, work, grads.o, None)
    scanned = dict(work)
    return {
        "prepare": lambda: triton._run_prepare(request, plan, inputs),
        "scan": lambda: triton._run_scan(request, plan, inputs, dict(prepared), grads.o, None),
        "gradients": lambda: triton._run_grads(request, plan, inputs, dict(scanned), grads.o, None),
        "all": lambda: triton.backward(request, inputs, (), grads),
    }


def main() -> None:
    args, case = training_arguments(__doc__)
    load = results.load()
    gate(case)
    steps = {
        f"{backend} {name}": step
        for backend, make in (("cuda", cuda_steps), ("triton", triton_steps))
        for name, step in make(*call_of(case, "init")).items()
    }
    found = interleave(steps, CudaClock(), Budget(args.samples, 60.0))
    shape = f"B1 T{case.T} H{case.H} HV{case.value_heads} K128 V128 {case.gate}"
    rows = [row(PRESET, shape, case, name, name.split()[0], t) for name, t in found.items()]
    figures = [
        Figure(preset=PRESET, name=f"{name}: triton over cuda", value=ratio, unit="x", want="", met=None)
        for name in ("prepare", "scan", "gradients", "all")
        for ratio in [found[f"triton {name}"].median / found[f"cuda {name}"].median]
    ]
    for name, t in found.items():
        print(f"{name:20} {1e3 * t.median:7.3f} ms")
    if args.json:
        results.write(args.json, results.document(Results(rows, figures), [PRESET], load))


if __name__ == "__main__":
    main()
