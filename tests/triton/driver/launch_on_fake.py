"""Run in a process whose CUDA driver is fake: the fast launch must hand the driver what Triton's own launch does."""

import ctypes
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch

STREAM, DEVICE = 77, -1  # CPU tensors say they are on device -1

lib = ctypes.CDLL("libcuda.so.1")
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch._C._cuda_getDevice = lambda: DEVICE
torch._C._cuda_getCurrentRawStream = lambda device: STREAM

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kdacore.types import DecodeInputs, Device, Outputs, RecurrentInputs, Request  # noqa: E402
from kdacore_triton import decode as decode_step  # noqa: E402
from kdacore_triton import recurrent  # noqa: E402
from kdacore_triton.decode_aot import meta_call  # noqa: E402
from kdacore_triton.fixed_launch import FixedLaunch  # noqa: E402
from kdacore_triton.launch import TRITON, Launcher  # noqa: E402


class Last(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64), ("params", ctypes.c_uint64 * 128), ("launches", ctypes.c_int),
    ]  # fmt: skip


lib.fake_last.restype = ctypes.POINTER(Last)


@triton.jit(do_not_specialize=["n", "m"], do_not_specialize_on_alignment=["rows"])
def rows_kernel(out, rows, absent, n, m, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), (tl.load(rows + n) + m).to(tl.float32))


@triton.jit
def kernel(x, y, absent, n, one, wide, scale, flag, SIZE: tl.constexpr, NAME: tl.constexpr, ON: tl.constexpr):
    i = tl.arange(0, SIZE)
    v = tl.load(x + i * one, mask=i < n).to(tl.float32) * scale + wide
    if absent is not None:
        v += tl.load(absent + i)
    if flag:
        v += 1
    if ON:
        tl.store(y + i, v)


class Pair(NamedTuple):
    first: Any
    second: Any


@triton.jit(do_not_specialize=["n"])
def grouped_kernel(arrays: Pair, n, numbers: Pair, absent: Pair, SIZES: tl.constexpr):
    v = tl.load(arrays.first + n + tl.arange(0, SIZES[0])).to(tl.float32) * numbers.first + numbers.second
    if absent.first is not None:
        v += tl.load(absent.second)
    tl.store(arrays.second + tl.arange(0, SIZES[0]), v)


def launched(call) -> tuple:
    before = lib.fake_last().contents.launches
    call()
    last = lib.fake_last().contents
    assert last.launches == before + 1, "exactly one launch"
    return (tuple(last.grid), tuple(last.block), last.stream, last.function, tuple(last.params))


def compare(n: int, one: int, wide: int, absent: bool, warps: int, sizes: list[int]) -> None:
    x, y = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    args = (x, y, torch.zeros(64) if absent else None, n, one, wide, 0.375, True)
    constexprs = {"SIZE": 64, "NAME": "a name", "ON": True}
    lib.fake_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    grid = (5, 3, 2)
    options = {"enable_fp_fusion": True, **constexprs, "num_warps": warps, "num_stages": 1}
    want = launched(lambda: kernel[grid](*args, **options))
    assert want[:3] == (grid, (32 * warps, 1, 1), STREAM), want[:3]
    assert want[4][0] == x.data_ptr() and want[4][1] == y.data_ptr()
    launcher = Launcher(kernel)
    first = launched(lambda: launcher(grid, *args, num_warps=warps, **constexprs))
    again = launched(lambda: launcher(grid, *args, num_warps=warps, **constexprs))
    prepared = launcher.prepare(grid, *args, num_warps=warps, **constexprs)
    pointers = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
    direct = launched(lambda: prepared(grid, *pointers))
    fixed = prepared.fix(grid, *pointers[3:])
    most = launched(lambda: fixed(list(pointers[:3])))
    for name, got in (("first", first), ("again", again), ("direct", direct), ("fixed", most)):
        assert got == want, (name, got, want)
    assert len(launcher.bind(num_warps=warps, **constexprs)._cache) == 1
    assert (prepared._launch is not prepared.compiled.run) == ((3, 6) <= TRITON <= (3, 9))


P, I32, I64, F32, I1 = 8, 4, 8, 4, 1
compare(17, 1, 5, False, 4, [P, P, I32, I32, F32, I1, P, P])
compare(16, 1, 2**40, True, 2, [P, P, P, I32, I64, F32, I1, P, P])
compare(1, 2, 48, False, 1, [P, P, I32, I32, F32, I1, P, P])


def groups() -> None:
    """Members of groups are handed over one after another, with what Triton's own launch of the tuples hands over."""
    x, y = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    lib.fake_expect(7, (ctypes.c_int * 7)(P, P, I32, F32, I32, P, P))
    options = {"enable_fp_fusion": True, "SIZES": (64, 1), "num_warps": 1, "num_stages": 1}
    grid = (2, 1, 1)
    want = launched(lambda: grouped_kernel[grid](Pair(x, y), 3, Pair(0.5, 6), Pair(None, None), **options))
    assert want[4][:2] == (x.data_ptr(), y.data_ptr()) and want[4][2] == 3 and want[4][4] == 6, want[4]
    launcher = Launcher(grouped_kernel)
    args, bound = (x, y, 3, 0.5, 6, None, None), launcher.bind(SIZES=(64, 1), num_warps=1)
    first = launched(lambda: bound(grid, *args))
    again = launched(lambda: bound(grid, *args))
    prepared = bound.prepare(grid, *args)
    fixed = prepared.fix(grid, *args[2:])
    most = launched(lambda: fixed([x.data_ptr(), y.data_ptr()]))
    names: list[str] = []
    triton.knobs.runtime.launch_enter_hook.add(hook := lambda metadata: names.append(metadata.get()["name"]))
    hooked = launched(lambda: prepared(grid, x.data_ptr(), y.data_ptr(), *args[2:]))
    triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["grouped_kernel"], names
    for name, got in (("first", first), ("again", again), ("fixed", most), ("hooked", hooked)):
        assert got == want, (name, got, want)
    fixed_launch = FixedLaunch(launcher, DEVICE, grid, args[2:], {"SIZES": (64, 1)}, 1)
    for _ in range(2):
        got = launched(lambda: fixed_launch(x, y))
        assert got == want, (got, want)


groups()


def prefers_l1() -> None:
    """Shared memory is asked for as the programs need it, by the launchers that say so alone."""
    x = torch.zeros(64)
    args, constexprs = (
        (x, x, None, 17, 1, 5, 0.5, True),
        {"SIZE": 64, "NAME": "l1", "ON": True, "num_warps": 4},
    )
    Launcher(kernel)((1, 1, 1), *args, **constexprs)
    assert lib.fake_attribute(9) == 0
    prepared = Launcher(kernel, prefer_l1=True).prepare((1, 1, 1), *args, **constexprs)
    shared = prepared.compiled.metadata.shared
    assert lib.fake_attribute(9) == -(-100 * 16 * (shared + 1024) // 233472), lib.fake_attribute(9)


prefers_l1()


def decode(given_out: bool, norm: bool, rows: bool = False) -> None:
    """The fast path passes the same arguments as the ordinary path, and leaves unusual arrays to it.

    ``rows``: states go to other rows of another pool, one row is no slot, and some sequences start from zeros.
    """
    B, H, K = 2, 2, 64
    tokens = [torch.randn(B, 1, H, K).bfloat16() for _ in range(4)]
    pool, index = torch.zeros(4, H, K, K), torch.tensor([2, 0], dtype=torch.int32)
    out = torch.empty(B, 1, H, K, dtype=torch.bfloat16) if given_out else None
    x = RecurrentInputs(*tokens, beta=torch.rand(B, 1, H), initial_state=pool, state_indices=index, out=out)
    r = Request(
        op="fused_recurrent_kda", kind="torch", device=Device("cuda", DEVICE, "sm_90"), B=B, T=1, H=H, HV=H, K=K,
        V=K, N=B, dtype="bfloat16", state_dtype="float32", scale=0.1, qk_l2norm=norm, pool_size=4,
        state_indices_ndim=1, inplace_state=True, output_final_state=given_out,
    )  # fmt: skip
    made: list[Outputs] = []
    target = pool
    if rows:
        target = torch.zeros(6, H, K, K)
        x = x._replace(
            write_indices=torch.zeros(B + 1, dtype=torch.int32)[1:], write_pool=target,
            has_initial_state=torch.ones(B + 1, dtype=torch.bool)[1:],
        )  # fmt: skip
        r = replace(r, null_index=0, write_indices_ndim=1, write_pool_size=6)

    def call(inputs: RecurrentInputs = x) -> None:
        made.append(recurrent.forward(r, inputs))

    # Two floats among them; what is absent or 1 is compiled in.
    sizes = [P] * (9 + 2 * rows) + [I32] * (27 + 2 * rows)
    lib.fake_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    call()
    short = recurrent.fast_path(r, x)
    assert short is not None, "the kernel has been launched for these strides"
    quick = launched(lambda: made.append(Outputs(*short(tuple(x)))))
    plain = launched(call)
    assert quick[:4] == plain[:4]
    for i, (short_way, long_way) in enumerate(zip(quick[4], plain[4], strict=True)):
        assert short_way == long_way or (i == 4 and not given_out), i  # 4: a fresh output each time
    for outputs in made:
        assert (outputs.final_state is target) == given_out and (outputs.o is out) == given_out
    wide = torch.randn(B, 1, H, 2 * K).bfloat16()[..., :K]
    assert recurrent.fast_path(r, x._replace(q=wide)) is None, "never launched so"
    assert short(x._replace(k=torch.randn(B * H * K + 1).bfloat16()[1:].view(B, 1, H, K))) is None
    launched(lambda: call(x._replace(q=wide)))
    strided = x._replace(q=wide)
    again = recurrent.fast_path(r, strided)
    assert again is not None and launched(lambda: again(tuple(strided)))[4][0] == wide.data_ptr()
    backwards = x._replace(q=wide.mT.contiguous().mT)
    launched(lambda: call(backwards))
    assert recurrent.fast_path(r, backwards) is None, "it has to be copied"


decode(False, True)
decode(True, False)
decode(True, False, rows=True)


def fused_decode(given_out: bool, records: bool) -> None:
    """The fused op's fast path passes what its ordinary path does: addresses in x, records, windows."""
    arch = "sm_90"
    r, on_meta = meta_call(arch, T=3 if records else 1, H=2, HV=4, K=64, records=records, windows=records)
    x = DecodeInputs(*(None if a is None else torch.zeros(a.shape, dtype=a.dtype) for a in on_meta))
    if given_out:
        x = x._replace(out=torch.zeros(r.B, r.T, r.HV, r.V, dtype=torch.bfloat16))
    r = replace(r, device=Device("cuda", DEVICE, arch), output_final_state=given_out)
    made: list[Outputs] = []

    def call() -> None:
        made.append(decode_step.forward(r, x))

    lib.fake_expect(1, (ctypes.c_int * 1)(P))
    call()
    launch = decode_step._plan(r).launch_for(x)
    (compiled,) = [p.compiled for b in decode_step.launcher._bound.values() for p in b._cache.values()][-1:]
    kinds = compiled.src.signature.values()
    members = [
        m for kind in kinds for m in (kind if isinstance(kind, tuple) else (kind,)) if m != "constexpr"
    ]
    lib.fake_expect(
        len(members), (ctypes.c_int * len(members))(*(P if m[0] == "*" else I32 for m in members))
    )
    short = decode_step.fast_path(r, x)
    assert launch.prepared is not None and short is not None
    quick = launched(lambda: made.append(Outputs(*short(tuple(x)))))
    plain = launched(call)
    assert quick[:4] == plain[:4]
    differ = [i for i, (a, b) in enumerate(zip(quick[4], plain[4], strict=True)) if a != b]
    assert len(differ) <= (not given_out), differ  # a fresh output each time
    size, keys = x.x.element_size(), r.H * r.K
    assert quick[4][:3] == tuple(x.x.data_ptr() + n * size for n in (0, keys, 2 * keys))
    assert (made[-1].o is x.out) == given_out and (made[-2].final_state is x.initial_state) == given_out
    odd = x._replace(z=torch.zeros(x.z.numel() + 1, dtype=torch.bfloat16)[1:].view(x.z.shape))
    assert short(tuple(odd)) is None, "not aligned"


fused_decode(False, False)
fused_decode(True, True)


def server_prefill() -> None:
    """Row numbers may lie at any address: they are not what a kernel is compiled for the alignment of."""
    out, rows = torch.zeros(64), torch.zeros(9, dtype=torch.int32)
    lib.fake_expect(4, (ctypes.c_int * 4)(P, P, I32, I32))
    launch = FixedLaunch(Launcher(rows_kernel), DEVICE, (1, 1, 1), (None, 5, 7), {"SIZE": 64}, 4)
    for numbers in (rows[:8], rows[1:], rows[1:]):
        got = launched(lambda n=numbers: launch(out, numbers=(n,)))
        assert got[4][:4] == (out.data_ptr(), numbers.data_ptr(), 5, 7), got[4][:4]
    assert launch._prepared is not None
    assert len(launch._launcher.bind(SIZE=64, num_warps=4)._cache) == 1


server_prefill()


@triton.jit(do_not_specialize=["n", "m"])
def broken_kernel(out, rows, absent, n, m, SIZE: tl.constexpr):
    tl.static_assert(SIZE > 64, "not as small as that")
    tl.store(out, m)


def built_before() -> None:
    """Building launches nothing, says what cannot be built, and is what the next launch takes."""
    out, rows = torch.zeros(64), torch.zeros(9, dtype=torch.int32)
    launches = lib.fake_last().contents.launches
    launch = FixedLaunch(Launcher(rows_kernel), DEVICE, (1, 1, 1), (None, 6, 7), {"SIZE": 32}, 4)
    launch.build(out, numbers=(rows,))
    prepared = launch._prepared
    assert prepared is not None and prepared.compiled.module is not None, "loaded too"
    launch.build(out, numbers=(rows,))
    assert launch._prepared is prepared
    broken = FixedLaunch(Launcher(broken_kernel), DEVICE, (1, 1, 1), (None, 6, 7), {"SIZE": 32}, 4)
    try:
        broken.build(out, numbers=(rows,))
    except triton.CompilationError as error:
        assert "not as small as that" in str(error)
    else:
        raise AssertionError("it cannot be built")
    assert lib.fake_last().contents.launches == launches
    got = launched(lambda: launch(out, numbers=(rows,)))
    assert got[4][:4] == (out.data_ptr(), rows.data_ptr(), 6, 7), got[4][:4]
    assert launch._prepared is prepared
    bound = Launcher(rows_kernel).bind(SIZE=16, num_warps=4)
    assert bound.build((1, 1, 1), out[1:], rows, None, 6, 7) is bound.prepare(
        (1, 1, 1), out[1:], rows, None, 6, 7
    )


built_before()
print("ok", triton.__version__)
sys.exit(0)
