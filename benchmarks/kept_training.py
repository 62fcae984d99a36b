"""Training with and without ``disable_recompute`` on the CUDA backend: ``python -m benchmarks.kept_training``.

On a Hopper GPU, K = V = 128. Outputs and gradients are held against the float64 oracle on a short call, and gradients
of both ways bit for bit against each other on the timed one, before anything is timed. Then, in turns: forward and
backward of both ways, the forwards alone, and each launch that only one of them has, with one and two warpgroups a
block.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch

from benchmarks.cuda_launches import buffers_of, separately
from benchmarks.launches import inputs_of, on_host, row, training_arguments
from kdacore.bench import arrays as made
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.bench.results import Results
from kdacore.selfcheck.check import relative_error
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import kernels
from kdacore_cuda.forms.backward import launches as backward_launches
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_forward import CHUNK
from kdacore_cuda.forms.saving_forward import launches as forward_launches
from kdacore_cuda.forms.torch_forward import readable
from kdacore_reference.oracle import oracle_backward, oracle_forward, to_float64

OUTPUT_BOUND, GRADIENT_BOUND = 9e-3, 1.6e-2
"""Twice the contract's bounds for 16-bit inputs: the short call is one of its hard cases."""
PRESET = "kept-training"


def call_of(case: Case, gates: str) -> tuple[Request, Request, ChunkInputs, OutputGrads]:
    """The request that keeps nothing, the one that keeps, inputs and output gradients on the GPU."""
    request, inputs, x = inputs_of(case, gates)
    plain = dataclasses.replace(request, needs_grad=True, disable_recompute=False)
    kept = dataclasses.replace(plain, disable_recompute=True)
    if chosen(kept).form != "saving_forward":
        raise SystemExit(f"{case.name}: with {case.value_heads} value heads nothing is kept")
    return plain, kept, inputs, OutputGrads(made.output_gradient(case, x), None)


def train(request: Request, inputs: ChunkInputs, grads: OutputGrads) -> InputGrads:
    """Forward and backward."""
    saved = chunk_forward.forward(request, inputs).saved
    return chunk_backward.backward(request, inputs, saved, grads)


def gate(case: Case, timed: tuple[Request, Request, ChunkInputs, OutputGrads]) -> None:
    """Raises AssertionError where something is wrong."""
    short = dataclasses.replace(case, name="short", T=300, H=20, HV=0)
    _, kept, inputs, grads = call_of(short, "random")
    host = on_host(inputs)
    o = chunk_forward.forward(kept, inputs).o
    found = {"o": relative_error(to_float64(o), to_float64(oracle_forward(kept, host).o))}
    want = oracle_backward(kept, host, OutputGrads(None if grads.o is None else grads.o.cpu(), None))
    pairs = zip(InputGrads._fields, train(kept, inputs, grads), want, strict=True)
    found |= {n: relative_error(to_float64(a), to_float64(b)) for n, a, b in pairs if a is not None}
    print("against the oracle:", {k: f"{v:.1e}" for k, v in found.items()})
    if not all(v < (OUTPUT_BOUND if k == "o" else GRADIENT_BOUND) for k, v in found.items()):
        raise AssertionError(f"wrong: {found}")
    plain, kept, inputs, grads = timed
    both = zip(train(plain, inputs, grads), train(kept, inputs, grads), strict=True)
    if not all(a is b or torch.equal(a, b) for a, b in both):
        raise AssertionError("gradients with and without what is kept differ")


def steps_of(plain: Request, kept: Request, inputs: ChunkInputs, grads: OutputGrads) -> dict[str, Step]:
    """What is timed."""
    given, layout = readable(CHUNK, kept, inputs, rows_apart=False)
    like, wanted = inputs.v, InputGrads(*[x is not None for x in inputs[: len(InputGrads._fields)]])
    arrays = given._asdict() | {"o": torch.empty_like(like), "d_o": grads.o}
    alone: dict[str, Step] = {}
    for n in (1, 2):
        with mock.patch.object(kernels, "walk_warpgroups", lambda *given, n=n: n):
            forward = forward_launches.launches_of(kept)
            reverse = backward_launches.launches_of(kept, wanted, "operands").first
        if n == 1:
            arrays |= buffers_of(forward, like) | buffers_of(reverse, like)
            separately(forward, layout, like, arrays)["prepare"]()
        alone[f"kept outputs, {n} warpgroups"] = separately(forward, layout, like, arrays)["outputs"]
        alone[f"kept reverse, {n} warpgroups"] = separately(reverse, layout, like, arrays)["scan"]
    return {
        "recomputed training": lambda: train(plain, inputs, grads),
        "kept training": lambda: train(kept, inputs, grads),
        "recomputed forward": lambda: chunk_forward.forward(plain, inputs),
        "kept forward": lambda: chunk_forward.forward(kept, inputs),
        **alone,
    }


def main() -> None:
    args, case = training_arguments(__doc__)
    load = results.load()
    gate(case, call_of(case, "random"))
    found = interleave(steps_of(*call_of(case, "init")), CudaClock(), Budget(args.samples, 60.0))
    shape = f"B1 T{case.T} H{case.H} HV{case.value_heads} K128 V128 {case.gate}"
    for name, t in found.items():
        print(f"{name:28} {1e3 * t.median:7.3f} ms")
    if args.json:
        rows = [row(PRESET, shape, case, name, "cuda", t) for name, t in found.items()]
        results.write(args.json, results.document(Results(rows, []), [PRESET], load))


if __name__ == "__main__":
    main()
