"""Calls of the fused decode ops and of records, with poison around what a call may touch, and what they must leave."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from kdacore import contract
from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, state_rows
from kdacore.ops import OPS
from kdacore.oracle.decode import oracle_decode
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import DecodeInputs, Request
from kdacore_triton import decode, recurrent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
KDA, GDN = "fused_decode_kda", "fused_decode_gated_delta_rule"
PARTS = ("record_update", "record_key", "record_decay")
FLAGS: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
MODEL = FLAGS | {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}
UNBOUNDED = FLAGS | {"use_gate_in_kernel": True}
BOUND = {torch.float32: 2e-5, torch.bfloat16: 4.5e-3, torch.float16: 4.5e-3}


def request_of(op: str, x: Any, **options: Any) -> Request:
    given = [options.get(o.name, o.default) for o in OPS[op].option_arguments]
    return contract.build_request(OPS[op], x, tuple(given))[0]


def copied(inputs: Any) -> Any:
    """The same values and strides in memory of their own."""
    made = [None if a is None else torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in inputs]
    for new, old in zip(made, inputs, strict=True):
        if new is not None:
            new.copy_(old)
    return type(inputs)(*made)


def on(device: str, inputs: Any) -> Any:
    """Inputs on a device, their strides kept."""
    if device == "cpu":
        return inputs
    made = []
    for a in inputs:
        b = None if a is None else torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device)
        made.append(b if b is None else b.copy_(a))
    return type(inputs)(*made)


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with NaN between any two of them, axes in another order."""
    memory = torch.full((*x.shape[::-1], 3), NAN, dtype=x.dtype)
    return memory[..., 1].permute(*reversed(range(x.ndim))).copy_(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().cpu().view(kind), b.contiguous().cpu().view(kind))


def error(got: torch.Tensor, want: Any) -> float:
    found = to_float64(got.detach().cpu())
    assert found.shape == want.shape
    size = np.linalg.norm(want)
    return float(np.linalg.norm(found - want) / (size if size > 0 else 1.0))


def draw(
    op: str, lengths: tuple[int, ...] | int, T: int = 1, *, H: int = 2, HV: int = 2, K: int = 16, V: int = 16,
    taps: int = 4, columns: int = 0, dtype: torch.dtype = torch.float32, state: torch.dtype = torch.float32,
    v_first: bool = False, gated: bool = True, raw: bool = True, records: int = 0, windows: bool = False,
    slots: list[int] | None = None, padding: int = 0, seed: int = 0, **more: Any,
) -> DecodeInputs:  # fmt: skip
    """A call in place on pools, of a pack (``lengths``) or of a number of sequences of T tokens each.

    Rows that no sequence names, and tokens behind the pack, hold NaN.
    """
    rng = np.random.default_rng(seed)
    packed = not isinstance(lengths, int)
    N = len(lengths) if packed else lengths
    size = (1, sum(lengths) + padding) if packed else (N, T)
    longest = max(lengths) if packed else T
    D, rows = 2 * H * K + HV * V, N + 3
    scalar = OPS[op].scalar_gate

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape, np.float32)).to(dtype)

    gate = (HV,) if scalar else (HV, K)
    x: dict[str, Any] = {
        "x": normal(*size, D, dtype=dtype), "g": normal(*size, *gate), "beta": normal(*size, HV),
        "initial_state": normal(rows, HV, *((V, K) if v_first else (K, V)), dtype=state),
        "state_indices": torch.tensor(slots or [int(i) for i in 1 + rng.permutation(N)], dtype=torch.int32),
    }  # fmt: skip
    if raw:
        x |= {"A_log": normal(HV), "dt_bias": normal(*gate)}
    else:
        x["g"] = -x["g"].abs()
    if taps:
        x |= {"conv_weight": normal(D, taps), "conv_bias": normal(D)}
        x["conv_state"] = normal(rows, D, columns or taps - 1, dtype=dtype)
    if gated:
        x |= {"z": normal(*size, HV, V, dtype=dtype), "norm_weight": 1 + normal(HV, V).abs()}
    if packed:
        x["cu_seqlens"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        for name in ("x", "g", "beta", "z"):
            if name in x:
                x[name][:, sum(lengths) :] = NAN
    if records:
        tails = ((HV, V), (H, K), gate)
        x |= {name: normal(N + 1, records, *tail) for name, tail in zip(PARTS, tails, strict=True)}
        x["record_decay"] = torch.sigmoid(x["record_decay"])
        x["record_indices"] = torch.tensor(rng.permutation(N), dtype=torch.int32)
        x["num_replayed"] = torch.tensor(rng.integers(0, records + 1, N), dtype=torch.int32)
    if windows:
        x["conv_windows"] = normal(N + 1, max(longest, records), taps - 1, D, dtype=dtype)
    unused = [i for i in range(rows) if i not in x["state_indices"].flatten().tolist()]
    for name in ("initial_state", "conv_state"):
        if name in x:
            x[name][unused] = NAN
    return DecodeInputs(**(x | more))


def run(request: Request, x: Any) -> Any:
    """The call on whatever device there is; what it wrote is in ``x`` afterwards."""
    there = on(DEVICE, x)
    forward = recurrent.forward if request.op.startswith("fused_recurrent") else decode.forward
    got = forward(request, there)
    for mine, its in zip(x, there, strict=True):
        if mine is not None and mine is not its:
            mine.copy_(its)
    return got


def check(op: str, x: Any, **options: Any) -> Any:
    """A call in place against the oracle: output, states, windows and records; all else keeps its bits."""
    options = {"inplace_state": True, "null_index": 0} | options
    request = request_of(op, x, **options)
    before = copied(x)
    oracle = oracle_decode if op in (KDA, GDN) else oracle_forward
    want = oracle(request, before)
    got = run(request, x)
    bound = BOUND[x[0].dtype]
    lengths = np.full(request.N, request.T)
    if request.packed:
        lengths = np.diff(x.cu_seqlens.numpy())
    tokens = int(lengths.sum())
    o, want_o = got.o.cpu(), want.o
    if request.packed:
        assert not o[:, tokens:].any()
        o, want_o = o[:, :tokens], want_o[:, :tokens]
    assert error(o, want_o) <= bound
    values = {n: getattr(x, n).numpy() for n in INDEX_VALUES if getattr(x, n, None) is not None}
    rows = state_rows(request, values, lengths)
    check_pool(x, before, rows, want.final_state, getattr(x, request.written_pool), request)
    convolution = [name for name in ("conv_state", "conv_windows") if request.has(name)]
    names = [*convolution, *(PARTS if request.has("record_update") else ())]
    stored = dict(zip(names, want.written, strict=True))
    for name in convolution:
        assert_stored(getattr(x, name), getattr(before, name), stored[name])
    if request.has("record_update"):
        check_records(x, before, rows, lengths, [stored[name] for name in PARTS])
    return got


def check_pool(x: Any, before: Any, rows: Any, want: Any, pool: torch.Tensor, request: Request) -> None:
    was = getattr(before, request.written_pool)
    goals = rows.final if rows.per_token is None else rows.per_token
    written = np.unique(goals[goals != ZEROS])
    others = np.setdiff1d(np.arange(len(pool)), written)
    bound = BOUND[torch.float32] if pool.dtype == torch.float32 else 3.3e-3
    bound = max(bound, BOUND[x[0].dtype] if x[0].dtype != torch.float32 else 0.0)
    assert error(pool[written], want[written]) <= bound
    assert same_bits(pool[others], was[others])


def assert_stored(got: torch.Tensor, before: torch.Tensor, want: Any) -> None:
    """Tokens that were copied have their bits; where the oracle has changed nothing, the array keeps its own."""
    found, was = to_float64(got), to_float64(before)
    np.testing.assert_array_equal(found, want)
    kept = (want == was) | np.isnan(was)
    assert same_bits(torch.where(torch.tensor(kept), got, before), before)


def check_records(x: Any, before: Any, rows: Any, lengths: Any, want: Any) -> None:
    written = np.zeros(before.record_update.shape[:2], bool)
    for row, length in zip(rows.records, lengths, strict=True):
        if row != ZEROS:
            written[row, :length] = True
    for name, wanted in zip(PARTS, want, strict=True):
        got, was = getattr(x, name), getattr(before, name)
        assert same_bits(got[~written], was[~written]), name
        if written.any():
            assert error(got[written], wanted[written]) <= 2e-5, name


@dataclasses.dataclass
class Drafts:
    """Tokens of each sequence."""

    tokens: list[dict[str, torch.Tensor]]

    def lengths(self) -> list[int]:
        return [next(iter(x.values())).shape[1] for x in self.tokens]

    def joined(self) -> dict[str, torch.Tensor]:
        """One after another in a pack."""
        pack = {name: torch.cat([x[name] for x in self.tokens], 1) for name in self.tokens[0]}
        return {**pack, "cu_seqlens": torch.tensor(np.cumsum([0, *self.lengths()]), dtype=torch.int32)}
