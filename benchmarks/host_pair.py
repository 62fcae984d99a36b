"""Host time of two checkouts, interleaved: what a change of the front end costs or saves.

    python -m benchmarks.host_pair BEFORE AFTER [--device cuda|stub] [--rounds 9] [--only TEXT] [--json out.json]

``BEFORE`` and ``AFTER`` are folders of kdacore checkouts. Every round starts a fresh process for each
checkout and each quantity, in alternating order. Only public calls are measured, so the two may have
any internal structure. Reported: the median over rounds of each, in microseconds, and their ratio.

Quantities: ``import kdacore``; the first NumPy call of a process (without imports); dispatch of a call
seen before whose backend does nothing (NumPy, torch, torch with gradients); the processor's time of a
training step with ``cp=`` on one of two ranks, whose backend and exchange do nothing; on a GPU the
host time of a decode, of a fused decode and of a prefill call, of prefill calls of lengths not seen
before, of a training step (forward, and forward with backward, seven arrays that want gradients,
nothing waited for) and of a training step of a function that does nothing, below which none can get,
and the first call of a process, on the CUDA backend. Rows that begin with "new lengths" are calls whose
lengths change, as a server's do: a pack of new tokens from a state pool, backend chosen automatically;
the same with a backend that does nothing; lengths seen before among a thousand; decoding of a new
number of sequences; and training steps, of which the time of an empty autograd function in the same
process is taken off. ``--device stub`` measures the calls of new lengths and the training steps with a
driver that does nothing, on CPU tensors, and so without autograd's thread for CUDA tensors; stages,
decoding, also of numbers of sequences not seen before, and the first prefill of a process too. It
reports the processor's time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

_NUMPY = """
rng = np.random.default_rng(0)
q, k, v, g = (rng.standard_normal((1, 64, 2, 16), dtype=np.float32) for _ in range(4))
x = dict(q=q, k=k, v=v, g=-np.abs(g), beta=np.full((1, 64, 2), 0.5, np.float32))
"""
_FIXED = """
from kdacore.bench.dispatch import NAME, NullPlugin
from kdacore.registry import REGISTRY
REGISTRY.register(NullPlugin(), NAME)
def call(): return kdacore.chunk_kda(**x, backend=NAME)
"""
_REPEAT = """
for _ in range(50): call()
best = []
for _ in range(60):
    start = time.perf_counter()
    for _ in range(COUNT): call()
    best.append((time.perf_counter() - start) / COUNT)
print(sorted(best)[len(best) // 4])
"""
_TORCH = "import torch\nx = {n: torch.from_numpy(a) for n, a in x.items()}\n"
_ON = {"cuda": 'device, backend = "cuda", "cuda"\n', "stub": 'device, backend = "cpu", "stub"\n'}
_CUDA = """
import torch, torch.nn.functional
def rand(*s): return torch.randn(*s, device=device, dtype=torch.bfloat16)
options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
               safe_gate=True, lower_bound=-5.0, backend=backend)
automatic = {n: value for n, value in options.items() if n != "backend"}
def tokens(B, T, H):
    x = dict(q=rand(B, T, H, 128), k=rand(B, T, H, 128), v=rand(B, T, H, 128), g=rand(B, T, H, 128), beta=rand(B, T, H))
    return dict(x, A_log=torch.zeros(H, device=device))
"""
_DECODE = """
x = tokens(8, 1, 32)
pool = torch.zeros(16, 32, 128, 128, device=device)
rows = torch.arange(8, device=device, dtype=torch.int32)
def call():
    return kdacore.fused_recurrent_kda(**x, initial_state=pool, state_indices=rows, inplace_state=True, **options)
torch.set_grad_enabled(False)
"""
_FUSED_DECODE = """
x = dict(x=rand(8, 1, 12288), g=rand(8, 1, 32, 128), beta=rand(8, 1, 32), z=rand(8, 1, 32, 128),
         A_log=torch.zeros(32, device=device), conv_weight=rand(12288, 4), norm_weight=rand(128),
         conv_state=rand(16, 12288, 3))
pool = torch.zeros(16, 32, 128, 128, device=device)
rows = torch.arange(8, device=device, dtype=torch.int32)
def call():
    return kdacore.fused_decode_kda(**x, initial_state=pool, state_indices=rows, inplace_state=True, **options)
torch.set_grad_enabled(False)
"""
_STAGES = """
from kdacore import stages
import torch.nn.functional
x = tokens(1, 64, 8)
gc, Akk = torch.zeros(1, 64, 8, 128), rand(1, 64, 8, 64)
torch.set_grad_enabled(False)
def intra(): return stages.kda_chunk_intra(x["q"], x["k"], gc, x["beta"], backend=backend)
def recompute(): return stages.kda_recompute_w_u(x["k"], x["v"], x["beta"], gc, Akk, backend=backend)
"""
_NEW_SEQUENCES = """
x = tokens(300, 1, 2)
pool = torch.zeros(300, 2, 128, 128, device=device)
rows = torch.arange(300, device=device, dtype=torch.int32)
torch.set_grad_enabled(False)
def of(N): return {n: y[:N] if y.dim() > 1 else y for n, y in x.items()} | dict(state_indices=rows[:N])
calls = [of(N) for N in range(1, 300)]
taken = []
for i, given in enumerate(calls):
    start = time.process_time()
    kdacore.fused_recurrent_kda(**given, initial_state=pool, inplace_state=True, **options)
    if i > 30: taken.append(time.process_time() - start)
print(sorted(taken)[len(taken) // 4])
"""
_PREFILL = """
x = tokens(1, 512, 8)
def call(): return kdacore.chunk_kda(**x, output_final_state=True, **options)
torch.set_grad_enabled(False)
"""
_TRAINING = """
names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
x = dict(tokens(1, TOKENS, 8), dt_bias=torch.zeros(8, 128, device=device))
x = {n: x[n].requires_grad_() for n in names}
leaves = list(x.values())
weight = torch.ones_like(x["v"])
def forward(): return kdacore.chunk_kda(**x, **options)[0]
class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arrays):
        ctx.save_for_backward(*arrays)
        return torch.empty_like(arrays[2])
    @staticmethod
    def backward(ctx, grad):
        return tuple([torch.empty_like(y) for y in ctx.saved_tensors])
def nothing(): return Nothing.apply(*leaves)
def both(step):
    step().backward(weight)
    for y in leaves: y.grad = None
"""
_NEW_LENGTHS = """
x = tokens(1, 700, 2)
torch.set_grad_enabled(False)
def of_length(T): return {n: y[:, :T].contiguous() if y.dim() > 1 else y for n, y in x.items()}
calls = [of_length(T) for T in range(64, 700)]
for given in calls[:36]: kdacore.chunk_kda(**given, **options)
taken = []
for given in calls[36:]:
    start = time.perf_counter()
    kdacore.chunk_kda(**given, **options)
    taken.append(time.perf_counter() - start)
print(sorted(taken)[len(taken) // 4])
"""
_ONCE_EACH = """
def once_each(calls, passes=1):
    for _ in range(passes):
        taken = []
        for call in calls:
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 4]
"""
_POOL_PACK = """
import functools
torch.set_grad_enabled(False)
sequences, longest = 4, 64 + 1036
x = tokens(1, longest, 8)
x["out"] = torch.empty_like(x["v"])
pool = torch.zeros(64, 8, 128, 128, device=device)
rows = torch.arange(sequences, dtype=torch.int32, device=device)
fresh = torch.zeros(sequences, dtype=torch.bool, device=device)
def call_of(T):
    given = {n: y[:, :T] if y.dim() > 1 else y for n, y in x.items()}
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=device) * (T // sequences)
    return functools.partial(kdacore.chunk_kda, **given, cu_seqlens=offsets, initial_state=pool, state_indices=rows,
                             has_initial_state=fresh, inplace_state=True, **automatic)
calls = [call_of(T) for T in range(64, longest)]
once_each(calls[:36])
calls = calls[36:]
"""
_POOL_DECODE = """
import functools
torch.set_grad_enabled(False)
first, most = 32, 384
x = tokens(most, 1, 32)
pool = torch.zeros(most, 32, 128, 128, dtype=torch.bfloat16, device=device)
rows = torch.arange(most, dtype=torch.int32, device=device)
def call_of(N):
    given = {n: y[:N] if y.dim() > 1 else y for n, y in x.items()}
    return functools.partial(kdacore.fused_recurrent_kda, **given, initial_state=pool, state_indices=rows[:N],
                             inplace_state=True, **automatic)
calls = [call_of(N) for N in range(first, most)]
once_each(calls[:36])
calls = calls[36:]
"""
_TRAINING_LENGTHS = """
whole = {n: y.detach() for n, y in x.items()}
def step_of(T):
    given = {n: (y[:, :T] if y.dim() > 2 else y).clone().requires_grad_() for n, y in whole.items()}
    leaves, weight = list(given.values()), torch.ones_like(given["v"])
    def step(forward):
        forward().backward(weight)
        for y in leaves: y.grad = None
    return (lambda: step(lambda: kdacore.chunk_kda(**given, **options)[0]),
            lambda: step(lambda: Nothing.apply(*leaves)))
steps = [step_of(T) for T in range(65, 65 + 220)]
for step, empty in steps[:20]: step(), empty()
steps = steps[20:]
above = lambda ours, empty: print(ours - empty)
"""
_CHOSEN_NULL = """
import dataclasses
from kdacore.bench.dispatch import NullPlugin
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.types import InputGrads, Outputs
def do_nothing(request, inputs):
    o = inputs.v.new_empty(inputs.v.shape) if inputs.out is None else inputs.out
    return Outputs(o, inputs.initial_state if request.output_final_state else None)
def no_gradients(request, inputs, saved, grads):
    return InputGrads(*[None if x is None else x.new_empty(x.shape) for x in inputs[:8]])
class Chosen(NullPlugin):
    @hookimpl
    def kdacore_backends(self):
        (null,) = super().kdacore_backends()
        ops = {name: dataclasses.replace(op, forward=do_nothing, backward=no_gradients, cost=lambda request: 1e-9)
               for name, op in null.ops.items()}
        return [dataclasses.replace(null, name="chosen", auto_kinds=None, ops=ops)]
REGISTRY.register(Chosen(), "chosen")
"""
_NUMPY_LENGTHS = """
import functools
x["out"] = np.empty_like(x["v"])
def call_of(T):
    given = {n: np.concatenate([y] * (T // 64 + 1), 1)[:, :T] for n, y in x.items()}
    return functools.partial(kdacore.chunk_kda, **given, use_qk_l2norm_in_kernel=True)
calls = [call_of(T) for T in range(64, 700)]
once_each(calls[:36])
calls = calls[36:]
"""
_ONE_RANK = """
import torch
torch.set_num_threads(1)
def rand(*s): return torch.randn(*s)
def call_of(rank):
    x = {n: rand(1, 16, 2, 8) for n in ("q", "k", "v", "g")}
    x |= dict(beta=rand(1, 16, 2), A_log=torch.zeros(2), dt_bias=torch.zeros(2, 8))
    x = {n: a.requires_grad_() for n, a in x.items()}
    leaves, weight = list(x.values()), torch.ones(1, 16, 2, 8)
    options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                   safe_gate=True, lower_bound=-5.0, backend=NAME, cp=OneRank(rank, 2))
    def step():
        kdacore.chunk_kda(**x, **options)[0].backward(weight)
        for y in leaves: y.grad = None
    return step
call = call_of(RANK)
"""
_STEPS = {
    "training B1 H8, forward": "def call(): return forward()\n",
    "training B1 H8, forward and backward": "def call(): return both(forward)\n",
    "the same of a function that does nothing": "def call(): return both(nothing)\n",
}
_WAIT = "torch.cuda.synchronize(); start = time.perf_counter()\n"
_HEAD = "import time\nimport numpy as np\n"
_PASS = "print(once_each(calls))\n"
_TAKEN = "print(time.perf_counter() - start)"


def _quantities(device: str) -> dict[str, str]:
    """Python code of each quantity; it prints seconds."""
    found = {
        "import kdacore": "import time\nstart = time.perf_counter()\nimport kdacore\n" + _TAKEN,
        "first NumPy call": _HEAD
        + "import kdacore"
        + _NUMPY
        + "start = time.perf_counter()\nkdacore.chunk_kda(**x)\n"
        + _TAKEN,
        "dispatch, NumPy": _HEAD + "import kdacore" + _NUMPY + _FIXED + _REPEAT.replace("COUNT", "200"),
        "dispatch, torch": _HEAD
        + "import kdacore"
        + _NUMPY
        + _TORCH
        + _FIXED
        + _REPEAT.replace("COUNT", "200"),
        "dispatch, torch with gradients": _HEAD
        + "import kdacore"
        + _NUMPY
        + _TORCH
        + "x = {n: a.requires_grad_() for n, a in x.items()}\n"
        + _FIXED
        + _REPEAT.replace("COUNT", "100"),
    }
    found["new lengths, NumPy, front end alone"] = (
        _HEAD + "import kdacore" + _NUMPY + _CHOSEN_NULL + _ONCE_EACH + _NUMPY_LENGTHS + _PASS
    )
    new_lengths = "import kdacore\n" + _NEW_LENGTHS
    one_rank = f"{Path(__file__).with_name('one_rank.py').read_text()}\ninstall()\n"
    steps = _REPEAT.replace("COUNT", "100").replace("perf_counter", "process_time")
    found |= {
        f"training with cp=, rank {rank} of 2": one_rank
        + _HEAD
        + "import kdacore\n"
        + _ONE_RANK.replace("RANK)", f"{rank})")
        + steps
        for rank in (0, 1)
    }
    if device == "cuda":
        repeat = _REPEAT.replace("COUNT", "50").replace(
            "    start = time.perf_counter()\n",
            "    torch.cuda.synchronize()\n    start = time.perf_counter()\n",
        )
        start = _HEAD + _ON[device] + _CUDA
        found["decode B8 H32, host"] = start + "import kdacore\n" + _DECODE + repeat
        found["fused decode B8 H32, host"] = start + "import kdacore\n" + _FUSED_DECODE + repeat
        found["prefill B1 T512 H8, host"] = start + "import kdacore\n" + _PREFILL + repeat
        found["prefill B1 H2 of lengths not seen before, host"] = start + new_lengths
        found |= _lengths(start)
        training = _TRAINING.replace("TOKENS", "512")
        found |= {
            name: start + "import kdacore\n" + training + step + repeat for name, step in _STEPS.items()
        }
        found["first CUDA prefill of a process"] = (
            start
            + "rand(8, 8) @ rand(8, 8)\n"
            + _WAIT
            + "import kdacore\n"
            + _PREFILL
            + "call()\ntorch.cuda.synchronize()\n"
            + _TAKEN
        )
    if device == "stub":
        stub = f"{Path(__file__).with_name('stub_cuda.py').read_text()}\ninstall()\n"
        start = stub + _HEAD + _ON[device] + _CUDA
        training = _TRAINING.replace("TOKENS", "64")
        # All of it is this process's own work, which other processes on the machine interrupt.
        repeat = steps
        found["prefill B1 H2 of lengths not seen before, host"] = start + new_lengths.replace(
            "perf_counter", "process_time"
        )
        found |= {
            name: start + "import kdacore\n" + training + step + repeat for name, step in _STEPS.items()
        }
        found |= {
            f"stage {name}, host": start + "import kdacore\n" + _STAGES + f"call = {name}\n" + repeat
            for name in ("intra", "recompute")
        }
        found["decode B8 H32, host"] = start + "import kdacore\n" + _DECODE + repeat
        found["fused decode B8 H32, host"] = start + "import kdacore\n" + _FUSED_DECODE + repeat
        found["decode H2 of a number of sequences not seen before, host"] = (
            start + "import kdacore\n" + _NEW_SEQUENCES
        )
        found["first prefill of a process"] = (
            start
            + "rand(8, 8) @ rand(8, 8)\nimport kdacore\n"
            + _PREFILL
            + "start = time.process_time()\ncall()\nprint(time.process_time() - start)"
        )
        hopper = stub.replace("\ninstall()", "\ninstall_as_hopper()")
        own_time = {
            name: code.replace("perf_counter", "process_time")
            for name, code in _lengths(
                hopper + _HEAD + _ON["stub"].replace('"stub"', '"cuda"') + _CUDA
            ).items()
        }
        found |= own_time
    return found


def _lengths(start: str) -> dict[str, str]:
    """Calls of a server whose lengths change at every step, and training steps whose lengths do."""
    pack = start + "import kdacore\n" + _ONCE_EACH + _POOL_PACK
    steps = _TRAINING.replace("TOKENS", "285") + _TRAINING_LENGTHS
    training = start + "import kdacore\n" + _ONCE_EACH + steps
    above = "above(once_each([a for a, _ in steps]), once_each([b for _, b in steps]))\n"
    alone = start + "import kdacore\n" + _CHOSEN_NULL + _ONCE_EACH
    return {
        "new lengths, chunk_kda, pack from a pool": pack + _PASS,
        "new lengths, the same, front end alone": alone + _POOL_PACK + _PASS,
        "new lengths among the last 1,000": pack + "print(once_each(calls, passes=3))\n",
        "new lengths, the same again": pack + "print(once_each([calls[500]] * 2000))\n",
        "new lengths, fused_recurrent_kda from a pool": start
        + "import kdacore\n"
        + _ONCE_EACH
        + _POOL_DECODE
        + _PASS,
        "new lengths, fused_recurrent_kda, front end alone": alone + _POOL_DECODE + _PASS,
        "new lengths, training, front end alone, above an empty function": alone
        + 'options["backend"] = "chosen"\n'
        + steps
        + above,
        "new lengths, training, above an empty function": training + above,
        "new lengths, training, the same again, above an empty function": training
        + "above(once_each([steps[0][0]] * 600), once_each([steps[0][1]] * 600))\n",
    }


def _measure(checkout: Path, code: str) -> float:
    folders = [
        checkout,
        *(checkout / "backends" / name for name in ("reference", "triton", "cuda", "pallas")),
    ]
    path = os.pathsep.join(
        [*map(str, folders), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{checkout}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main() -> int:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda", "stub"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only quantities whose name contains this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    wanted = {n: code for n, code in _quantities(args.device).items() if args.only in n}
    for name, code in wanted.items():
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        for i in range(args.rounds + 1):
            sides = [("before", args.before), ("after", args.after)]
            for side, checkout in sides if i % 2 else sides[::-1]:
                taken = _measure(checkout.resolve(), code)
                if i:  # the first round compiles bytecode
                    seconds[side].append(taken * 1e6)
        medians = {side: statistics.median(values) for side, values in seconds.items()}
        ratio = medians["after"] / medians["before"]
        rows.append({"quantity": name, "unit": "us", **medians, "ratio": ratio, "samples": seconds})
        print(f"{name:32} {medians['before']:12.2f} {medians['after']:12.2f} us  {ratio:.3f} x", flush=True)
    if args.json:
        record = {
            "what": "benchmarks.host_pair",
            "device": args.device,
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "rounds": args.rounds,
            "pairs": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
