"""One call spread over ranks: the share of each rank, and the shares put together and held to the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kdacore
from kdacore.calls.arrays import host_values
from kdacore.calls.description import specs
from kdacore.calls.values import PER_TOKEN, Shape, to_kind
from kdacore.ops import HOST_ARGUMENTS
from kdacore.selfcheck.bounds import bound
from kdacore.testing.cases import MODEL, UNBOUNDED_MODEL, Case
from kdacore.testing.expected import expected, expected_gradients, weights
from kdacore.types import Device

SHARED = ("A_log", "dt_bias", "initial_state")
"""Arguments that every rank holds whole: their gradients are sums over ranks."""


def case(
    op: str = "chunk_kda",
    *,
    shape: Shape,
    gates: str = "slow",
    dtype: str = "float32",
    initial_state: bool = True,
    final_state: bool = True,
    backend: str = "reference",
    factor: float = 1.0,
    seed: int = 0,
    note: str = "",
    state_dtype: str = "float32",
    host_offsets: bool = False,
    **options: Any,
) -> Case:
    """A call over the whole row. ``shape.T`` is that of the whole row."""
    kda = op == "chunk_kda"
    made = Case(
        check="gradients", backend=backend, op=op, kind="torch", shape=shape, gates=gates, dtype=dtype,
        gate_dtype=dtype, beta_dtype=dtype, initial_state=initial_state, state_dtype=state_dtype, factor=factor,
        host_offsets=host_offsets, seed=seed, note=note,
    )  # fmt: skip
    plain = {"use_qk_l2norm_in_kernel": True} if kda or not options else {}
    return made.having(**{**plain, "output_final_state": final_state, **options})


def share(whole: Case, ranks: int, rank: int, device: str = "cpu") -> dict[str, Any]:
    """The arrays of one rank: its tokens, and whole what every rank holds."""
    T = whole.shape.T // ranks
    wanted, found = specs(whole), {}
    for name, x in host_values(whole).items():
        if name in PER_TOKEN:
            x = x[:, rank * T : (rank + 1) * T]
        place = "cpu" if name in HOST_ARGUMENTS else device
        found[name] = to_kind(np.ascontiguousarray(x), "torch", wanted[name].dtype, place)
    return found


def run_rank(
    whole: Case, cp: Any, ranks: int, rank: int, device: str = "cpu", call: Any = None
) -> dict[str, Any]:
    """One rank's results and gradients, as NumPy arrays."""
    arrays = share(whole, ranks, rank, device)
    learned = [name for name, x in arrays.items() if x.is_floating_point()]
    for name in learned:
        arrays[name].requires_grad_(True)
    options = dict(whole.options)
    function = call or getattr(kdacore, whole.op)
    results = function(**arrays, **options, cp=cp, backend=whole.backend)
    o, state = results[0], results[1]
    w = weights(whole)
    T = whole.shape.T // ranks
    do = torch.as_tensor(w.o[:, rank * T : (rank + 1) * T], device=device, dtype=o.dtype)
    leaves: list[Any] = [o]
    grads: list[Any] = [do]
    if state is not None:
        # Each rank's copy gets a part of the gradient, by powers of two: the parts are to be added up.
        part = torch.as_tensor(w.final_state, device=device).to(state.dtype)
        leaves.append(state)
        grads.append(part * 0.5 ** min(rank + 1, ranks - 1))
    torch.autograd.backward(leaves, grads)
    found = {"o": o, "final_state": state, **{f"d{name}": arrays[name].grad for name in learned}}
    if len(results) > 2:
        found["checkpoints"] = results[2]
    return {name: x.detach().cpu().double().numpy() for name, x in found.items() if x is not None}


def together(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of the whole row from those of its ranks."""
    found: dict[str, Any] = {}
    for name in shares[0]:
        parts = [share[name] for share in shares]
        if name == "final_state":
            for part in parts[1:]:
                np.testing.assert_array_equal(part, parts[0], err_msg="final states differ between ranks")
            found[name] = parts[0]
        elif name.removeprefix("d") in SHARED:
            found[name] = np.sum(parts, axis=0)
        else:
            found[name] = np.concatenate(parts, axis=1)
    return found


def check(whole: Case, shares: list[dict[str, Any]]) -> None:
    """Hold the ranks' results and gradients to the oracle's on the whole row, within the contract's bounds."""
    found = together(shares)
    wanted = {**expected(whole), **{f"d{name}": x for name, x in expected_gradients(whole).items()}}
    assert set(found) == set(wanted), (set(found), set(wanted))
    cpu = Device("cpu")
    for name, want in wanted.items():
        got = found[name]
        assert got.shape == want.shape, (name, got.shape, want.shape)
        quantity: Any = "o" if name == "o" else "gradient" if name.startswith("d") else "state"
        dtypes = [whole.dtype]
        if name in ("final_state", "dinitial_state"):
            dtypes.append(whole.state_dtype)
        limit = whole.factor * bound(quantity, cpu, *dtypes)
        size = np.linalg.norm(want)
        error = np.linalg.norm(got - want) / size if size else np.abs(got).max(initial=0.0)
        assert error <= limit, f"{whole.id} {whole.shape}: {name}: error {error:.2e}, limit {limit:.2e}"


BOUNDED = {**MODEL}
UNBOUNDED = {**UNBOUNDED_MODEL}


def cases(ranks: int) -> list[Case]:
    """The calls that are checked on so many ranks."""
    T = ranks * 24

    def row(**sizes: Any) -> Shape:
        return Shape(**{"T": T, "H": 2, "HV": 2, "K": 16, "V": 12, **sizes})

    def pack(*lengths: int, padding: int = 0, **sizes: Any) -> Shape:
        assert sum(lengths) + padding == T, (lengths, padding, T)
        return row(lengths=lengths, padding=padding, **sizes)

    crossing = pack(5, 0, 1, T - 6 - 17, 0, 17)
    hole = pack(24, T - 24 - 3, 0, 3)
    short = pack(3, 0, 9, padding=T - 12)
    found = [
        case(shape=row(B=2), note="rows", **BOUNDED),
        case(shape=row(B=2), gates="zero", note="no-decay", initial_state=False),
        case(shape=row(HV=4), gates="init", note="grouped", state_v_first=True, **UNBOUNDED),
        case(shape=crossing, note="crossing", **BOUNDED),
        case(shape=crossing, gates="mixed", note="mixed", factor=2.0, state_v_first=True, host_offsets=True),
        case(shape=hole, gates="zero", note="at-the-border", initial_state=False),
        case(shape=short, note="padding", gates="init", **UNBOUNDED),
        case(shape=crossing, note="no-final-state", final_state=False),
        case("chunk_gated_delta_rule", shape=row(HV=4), note="gdn", **BOUNDED),
        case("chunk_gated_delta_rule", shape=crossing, note="gdn-crossing", use_qk_l2norm_in_kernel=True),
    ]  # fmt: skip
    return found


def more_cases(ranks: int) -> list[Case]:
    """Longer and wider calls, and those of flash-linear-attention's own tests of context parallelism: T = 1024."""
    found = []
    fla = {
        2: ((300, 400, 324), (512, 512), (100, 150, 200, 250, 124, 100, 100)),
        4: ((700, 324), (1024,)),
    }
    for i, lengths in enumerate(fla.get(ranks, ())):
        for op in ("chunk_kda", "chunk_gated_delta_rule"):
            shape = Shape(T=1024, H=4, HV=4, K=64, V=64, lengths=lengths)
            note, plain = f"fla-{i}", {"use_qk_l2norm_in_kernel": True}
            found.append(
                case(op, shape=shape, gates="init", dtype="float16", note=note, initial_state=False, **plain)
            )
    T = 96 * ranks
    rng = np.random.default_rng(ranks)
    for i in range(6):
        lengths = []
        while sum(lengths) < T:
            lengths.append(min(int(rng.choice((0, 1, 15, 16, 17, 63, 64, 65, 96, 200))), T - sum(lengths)))
        shape = Shape(T=T, H=1, HV=2, K=20, V=12, lengths=tuple(lengths))
        gates = ("slow", "zero", "floor", "mixed", "init", "random")[i]
        found.append(case(shape=shape, gates=gates, seed=i, note=f"lengths-{i}", factor=2.0))
    wide = Shape(B=2, T=64 * ranks, H=2, HV=4, K=32, V=64)
    found.append(
        case(shape=wide, dtype="bfloat16", state_dtype="bfloat16", gates="init", note="bf16", **BOUNDED)
    )
    found.append(
        case(shape=wide, dtype="float64", gates="zero", note="float64", use_qk_l2norm_in_kernel=True)
    )
    return found
