"""What servers ask for, against the float64 oracle: padded packs, pools in prefill, rows to write, checkpoints.

Tokens that are not read and rows that nobody named hold NaN or poison throughout.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kdacore import contract
from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, state_rows
from kdacore.ops import OPS
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import Outputs, Request
from kdacore_triton import chunk_forward, configs, recurrent
from kdacore_triton.kernels.chunk_forward_checkpoints import chunk_forward_checkpoints_kernel
from kdacore_triton.launch import BoundKernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
BOUND = 2e-5 if DEVICE == "cpu" else 5e-4
CHUNK = ("chunk_kda", "chunk_gated_delta_rule")
RECURRENT = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
BOUNDED = {"safe_gate": True, "lower_bound": -5.0}
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
BASE = {"prepare_BV": 128, "prepare_warps": 2, "scan_BV": 64, "scan_warps": 4, "scan_stages": 1, "segment": 0}


class BuildError(Exception):
    """What a kernel's build raises in these tests."""


@pytest.fixture(params=[16, 32], ids=lambda C: f"C{C}")
def rows_of_chunk(request: pytest.FixtureRequest) -> Iterator[int]:
    """Chunks as small as checkpoints are apart, and larger ones."""
    with configs.override("chunk_forward", BASE | {"C": request.param}):
        yield request.param


@pytest.fixture
def segmented() -> Iterator[None]:
    with configs.override("chunk_forward", BASE | {"C": 32, "segment": 512}):
        yield


def request_of(op: str, x: Any, **options: Any) -> Request:
    given = [options.get(o.name, o.default) for o in OPS[op].option_arguments]
    return contract.build_request(OPS[op], x, tuple(given))[0]


def draw(
    op: str, lengths: list[int], *, padding: int = 0, batch: bool = False, H: int = 1, HV: int = 2, K: int = 16,
    V: int = 16, raw: bool = False, seed: int = 0, low: float = -1.0, dtype: torch.dtype = torch.float32, **arrays: Any,
) -> Any:  # fmt: skip
    """A pack of sequences with ``padding`` tokens of NaN behind it, or with ``batch`` sequences of equal length."""
    rng = np.random.default_rng(seed)
    B, T = (len(lengths), lengths[0]) if batch else (1, sum(lengths) + padding)
    scalar = OPS[op].scalar_gate

    def normal(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.standard_normal((B, T, *shape), np.float32))

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x if raw else torch.nn.functional.normalize(x, dim=-1)

    gate = (HV,) if scalar else (HV, K)
    x = {
        "q": unit(normal(H, K)), "k": unit(normal(H, K)), "v": normal(HV, V),
        "g": normal(*gate) if raw else low * normal(*gate).abs().clamp(max=5.0 / max(-low, 1.0)),
        "beta": normal(HV) if raw else torch.sigmoid(normal(HV)),
    }  # fmt: skip
    for name in ("q", "k", "v"):
        x[name] = x[name].to(dtype)
    if padding:
        for a in x.values():
            a[:, sum(lengths) :] = NAN
    if not batch:
        x["cu_seqlens"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    made = OPS[op].inputs(**(x | arrays))
    return type(made)(*(None if a is None else a.to(DEVICE) for a in made))


def pool(
    P: int, HV: int, a: int, b: int, *, nan: tuple[int, ...] = (), gaps: bool = True,
    dtype: torch.dtype = torch.float32, seed: int = 3,
) -> torch.Tensor:  # fmt: skip
    """A pool of states whose rows lie apart, some of them NaN."""
    rng = np.random.default_rng(seed)
    values = torch.tensor(rng.standard_normal((P, HV, a, b), np.float32)).to(dtype)
    for row in nan:
        values[row] = NAN
    if not gaps:
        return values.to(DEVICE)
    poison = 6e4 if dtype == torch.float16 else 1e30
    wide = torch.full((P, HV * a * b + 16), poison, dtype=dtype, device=DEVICE)
    rows = wide[:, : HV * a * b].unflatten(1, (HV, a, b))
    rows.copy_(values)
    return rows


def on_host(x: Any) -> Any:
    return type(x)(*(None if a is None else a.detach().cpu().clone() for a in x))


def error(got: torch.Tensor, want: np.ndarray) -> float:
    found = to_float64(got.detach().cpu())
    assert found.shape == want.shape
    return float(np.linalg.norm(found - want) / max(np.linalg.norm(want), 1e-30))


def named_rows(request: Request, x: Any) -> set[int]:
    """The rows of the written pool that the call may write."""
    ends = x.cu_seqlens.cpu().numpy() if request.packed else np.arange(request.B + 1) * request.T
    lengths = np.diff(ends)
    values = {n: getattr(x, n).cpu().numpy() for n in INDEX_VALUES if getattr(x, n, None) is not None}
    values["cu_seqlens"] = ends
    rows = state_rows(request, values, lengths)
    found = [rows.final, *(a for a in (rows.per_token, rows.checkpoints) if a is not None)]
    return {int(r) for a in found for r in np.ravel(a) if r != ZEROS}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def check(
    op: str, x: Any, *, bound: float = BOUND, state_bound: float | None = None, **options: Any
) -> Outputs:
    """Run, compare with the oracle: results, every row of the written pool, and what must not be written."""
    request = request_of(op, x, **options)
    host = on_host(x)
    want = oracle_forward(request, host)
    state_bound = state_bound or bound
    run = chunk_forward.forward if op in CHUNK else recurrent.forward
    got: Outputs = run(request, x)
    end = int(x.cu_seqlens[-1]) if request.packed else request.T
    assert torch.isfinite(got.o[:, :end]).all()
    assert error(got.o[:, :end], want.o[:, :end]) <= bound
    if x.out is not None:
        assert got.o is x.out and same_bits(x.out[:, end:], host.out.to(DEVICE)[:, end:])
    else:
        assert not got.o[:, end:].any()
    for name in ("initial_state", "write_pool"):
        before, now = getattr(host, name), getattr(x, name)
        if now is None:
            continue
        written = (
            named_rows(request, host) if request.inplace_state and request.written_pool == name else set()
        )
        for row in range(now.shape[0]):
            if row in written:
                assert error(now[row], want.final_state[row]) <= state_bound, (name, row)
            else:
                assert same_bits(now[row], before[row].to(DEVICE)), (name, row)
    if request.inplace_state:
        assert got.final_state is (getattr(x, request.written_pool) if request.output_final_state else None)
    elif request.output_final_state:
        assert error(got.final_state, want.final_state) <= state_bound
    if request.checkpoint_every:
        assert error(got.checkpoints, want.checkpoints) <= state_bound
    return got


def integers(*values: Any, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=kind)


# --- padded packs ------------------------------------------------------------------------------------------------


LENGTHS = [0, 1, 17, 15, 0, 33, 0, 0]


def few(op: str, lengths: list[int]) -> list[int]:
    """Fewer tokens for an op that takes them one by one."""
    return lengths if op in CHUNK else [min(n, 3) for n in lengths]


@pytest.mark.first_cases(5)
@pytest.mark.parametrize("op", [*CHUNK, *RECURRENT])
@pytest.mark.parametrize(("padding", "given"), [(1, False), (40, False), (20, True)])
def test_tokens_behind_a_pack(op: str, padding: int, given: bool) -> None:
    lengths = few(op, LENGTHS)
    arrays = {"out": torch.full((1, sum(lengths) + padding, 2, 16), NAN)} if given else {}
    x = draw(op, lengths, padding=padding, **arrays)
    check(op, x, output_final_state=True)


@pytest.mark.parametrize(
    ("lengths", "T"), [([17], 20), ([1], 31), ([15, 16], 31), ([0], 48), ([3, 60], 64), ([0, 0], 1)]
)
def test_every_row_behind_a_pack_is_zero(rows_of_chunk: int, lengths: list[int], T: int) -> None:
    """However many slots for chunks are left over."""
    x = draw("chunk_kda", lengths, padding=T - sum(lengths), HV=1)
    check("chunk_kda", x)


def test_an_output_that_is_not_dense_keeps_its_rows() -> None:
    for op in ("chunk_kda", "fused_recurrent_kda"):
        out = torch.full((1, 30, 16, 2), 7.0).transpose(2, 3)
        check(op, draw(op, [5, 9], padding=16, out=out))


def test_the_same_plan_serves_other_offsets() -> None:
    """As a replayed graph does: the offsets are read by the kernels alone."""
    for op in ("chunk_kda", "fused_recurrent_kda"):
        x = draw(op, [6, 2], padding=24)
        request = request_of(op, x)
        run = chunk_forward.forward if op in CHUNK else recurrent.forward
        run(request, x)
        for ends in ([0, 0, 0], [0, 3, 5], [0, 8, 8]):
            y = x._replace(cu_seqlens=integers(*ends).to(DEVICE))
            want = oracle_forward(request, on_host(y))
            assert error(run(request, y).o, want.o) <= BOUND


# --- rows of pools -----------------------------------------------------------------------------------------------


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("op", [*CHUNK, *RECURRENT])
@pytest.mark.parametrize(("v_first", "kind"), [(False, torch.int32), (True, torch.int64)])
def test_pool_in_place_with_null_slots(op: str, v_first: bool, kind: torch.dtype) -> None:
    """Slots: an ordinary one, none by ``null_index``, none by a negative index, one that starts from zeros."""
    shape = (24, 16) if v_first else (16, 24)
    x = draw(
        op, few(op, [20, 3, 18, 0, 17]), padding=5, V=24, initial_state=pool(8, 2, *shape, nan=(0, 1, 6)),
        state_indices=integers(5, 0, -1, 3, 6, kind=kind),
        has_initial_state=torch.tensor([True, True, True, True, False]),
    )  # fmt: skip
    first, end = x.cu_seqlens[[1, 3]].tolist()
    for a in x[:5]:
        a[:, first:end] = NAN  # tokens of padding sequences are not read
    for final in (True, False):
        check(op, x, inplace_state=True, null_index=0, output_final_state=final, state_v_first=v_first)


@pytest.mark.every_other
@pytest.mark.parametrize("op", [*CHUNK, *RECURRENT])
@pytest.mark.parametrize("batch", [False, True])
def test_pool_read_alone(op: str, batch: bool) -> None:
    lengths = few(op, [19, 19, 19])
    x = draw(
        op,
        lengths,
        batch=batch,
        initial_state=pool(5, 2, 16, 16, nan=(1, 2)),
        state_indices=integers(4, 2, 0),
    )
    got = check(op, x, output_final_state=True, null_index=2)
    assert not got.final_state[1].any()
    out = torch.full(x.v.shape, NAN, device=DEVICE)
    check(op, x._replace(out=out), null_index=2)


@pytest.mark.parametrize("op", [*CHUNK, *RECURRENT])
def test_sequences_that_start_from_zeros(op: str) -> None:
    filled = torch.tensor([False, True, False])
    x = draw(op, few(op, [20, 18, 1]), initial_state=pool(3, 2, 16, 16, nan=(0, 2)), has_initial_state=filled)
    check(op, x, output_final_state=True)
    check(op, x, output_final_state=True, inplace_state=True)


@pytest.mark.parametrize("op", [*CHUNK, *RECURRENT])
def test_in_place_without_indices(op: str) -> None:
    x = draw(op, few(op, [20, 18, 0]), initial_state=pool(3, 2, 16, 16))
    check(op, x, inplace_state=True)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("op", [*CHUNK, *RECURRENT])
def test_other_rows_are_written(op: str) -> None:
    """In the pool that is read, and in another of another layout in memory."""
    x = draw(
        op, few(op, [20, 3, 18, 5]), padding=3, initial_state=pool(7, 2, 16, 16, nan=(1,)),
        state_indices=integers(5, 0, -1, 3), write_indices=integers(2, 4, 6, 0),
    )  # fmt: skip
    check(op, x, inplace_state=True, output_final_state=True, null_index=4)
    x = x._replace(write_pool=pool(9, 2, 16, 16, seed=8, gaps=False))
    check(op, x, inplace_state=True, output_final_state=True, null_index=4)
    check(
        op, x._replace(write_indices=None, state_indices=integers(5, 6, -1, 3).to(DEVICE)), inplace_state=True
    )


@pytest.mark.parametrize("op", [*CHUNK, *RECURRENT])
def test_a_pool_that_is_written_alone(op: str) -> None:
    rows = integers(3, -1, 0)
    lengths = few(op, [20, 3, 18])
    x = draw(op, lengths, write_pool=pool(4, 2, 16, 16, nan=(0, 1, 2, 3)), write_indices=rows)
    check(op, x, inplace_state=True, output_final_state=True)
    x = draw(
        op,
        lengths,
        initial_state=pool(3, 2, 16, 16),
        write_pool=pool(4, 2, 16, 16, seed=8),
        write_indices=rows,
    )
    check(op, x, inplace_state=True, output_final_state=True)


@pytest.mark.parametrize("how", ["heads apart", "last dimension apart", "v first in memory"])
def test_pools_of_any_strides_in_prefill(how: str) -> None:
    states = pool(5, 2, 16, 24, gaps=False)
    if how == "heads apart":
        wide = torch.full((5, 4, 16, 24), NAN, device=DEVICE)
        wide[:, ::2] = states
        states = wide[:, ::2]
    elif how == "last dimension apart":
        wide = torch.full((5, 2, 16, 48), NAN, device=DEVICE)
        wide[..., ::2] = states
        states = wide[..., ::2]
    else:
        states = states.mT.contiguous().mT
    x = draw("chunk_kda", [20, 18], V=24, initial_state=states, state_indices=integers(4, 1))
    check("chunk_kda", x, inplace_state=True, output_final_state=True)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_16_bit_pool_in_prefill(kind: torch.dtype) -> None:
    states = pool(5, 2, 16, 16, dtype=kind)
    x = draw(
        "chunk_kda",
        [20, 18],
        initial_state=states,
        state_indices=integers(4, 1),
        out=torch.full((1, 38, 2, 16), NAN),
    )
    check("chunk_kda", x, state_bound=3.3e-3, inplace_state=True, output_final_state=True)


def test_bfloat16_inputs_into_out() -> None:
    out = torch.full((1, 25, 2, 16), NAN, dtype=torch.bfloat16)
    x = draw("chunk_kda", [20], padding=5, dtype=torch.bfloat16, out=out)
    check("chunk_kda", x, bound=4.5e-3)


def test_pools_in_segments(segmented: None) -> None:
    x = draw(
        "chunk_kda", [530, 520, 3, 1030], padding=9, low=-0.02, HV=1, initial_state=pool(7, 1, 16, 16, nan=(0, 6)),
        state_indices=integers(5, 0, -1, 6), has_initial_state=torch.tensor([True, True, True, False]),
        write_indices=integers(2, 3, 4, 1),
    )  # fmt: skip
    assert chunk_forward.plan_for(request_of("chunk_kda", x, inplace_state=True, null_index=0)).plain is None
    check("chunk_kda", x, inplace_state=True, output_final_state=True, null_index=0)


# --- decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("v_first", [False, True])
def test_one_token_each(op: str, v_first: bool) -> None:
    shape = (24, 20) if v_first else (20, 24)
    x = draw(
        op, [1] * 4, batch=True, K=20, V=24, initial_state=pool(8, 2, *shape, nan=(0, 6)),
        state_indices=integers(5, 0, -1, 6), has_initial_state=torch.tensor([True, True, True, False]),
    )  # fmt: skip
    for a in x[:5]:
        a[1:3] = NAN
    options = {"inplace_state": True, "null_index": 0, "output_final_state": True, "state_v_first": v_first}
    check(op, x, **options)
    check(op, x._replace(write_indices=integers(1, 2, 3, 4).to(DEVICE)), **options)
    check(
        op,
        x._replace(write_indices=integers(2, 1, 3, 0).to(DEVICE), write_pool=pool(5, 2, *shape)),
        **options,
    )


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ndim", [1, 2])
def test_candidates_written_to_rows_of_their_own(op: str, packed: bool, ndim: int) -> None:
    """Speculative verification: start from the last accepted token's row, write a row for each candidate."""
    table = integers([3, 1, 4], [9, -1, 6], [5, 8, 7], [0, 2, 10], [-1, 11, 12])
    goals = integers([13, 0, 14], [15, 16, 17], [18, -1, 19], [20, 21, 22], [23, 24, 25])
    x = draw(
        op, [2, 0, 3, 1, 3] if packed else [3] * 5, batch=not packed, padding=4 * packed,
        initial_state=pool(26, 2, 16, 16, nan=(0,)), state_indices=table,
        num_accepted_tokens=integers(1, 2, 0, 3, 2), write_indices=goals if ndim == 2 else goals[:, 0].contiguous(),
    )  # fmt: skip
    check(op, x, inplace_state=True, output_final_state=True, null_index=0)
    x = x._replace(write_pool=pool(30, 2, 16, 16, seed=8, nan=(2,)))
    check(op, x, inplace_state=True, null_index=0)
    check(op, x._replace(write_indices=None), inplace_state=True, null_index=0)


def test_write_indices_of_any_strides() -> None:
    goals = integers([3, 1], [0, 2]).T.contiguous().T
    x = draw(
        "fused_recurrent_kda", [2, 2], batch=True, initial_state=pool(6, 2, 16, 16), state_indices=integers(4, 5),
        write_indices=goals,
    )  # fmt: skip
    check("fused_recurrent_kda", x, inplace_state=True)
    wide = torch.full((2, 9), 5, dtype=torch.int32, device=DEVICE)
    wide[:, :2] = x.write_indices
    check("fused_recurrent_kda", x._replace(write_indices=wide[:, :2]), inplace_state=True)
    filled = torch.tensor([True, False, False, True], device=DEVICE)[::2]
    assert not filled.is_contiguous()
    check("fused_recurrent_kda", x._replace(has_initial_state=filled), inplace_state=True)
    y = draw(
        "chunk_kda", [18, 3], initial_state=pool(6, 2, 16, 16), state_indices=wide[:, 0], write_indices=wide[:, 1],
        has_initial_state=filled,
    )  # fmt: skip
    check("chunk_kda", y, inplace_state=True)


# --- checkpoints at chosen tokens --------------------------------------------------------------------------------

FAMILIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("chunk_kda", {}, {"low": -20.0}),
    ("chunk_kda", BOUNDED, {}),
    ("chunk_gated_delta_rule", {}, {}),
    ("chunk_kda", RAW | BOUNDED, {"raw": True}),
    ("chunk_kda", RAW, {"raw": True, "A_log": torch.tensor([0.3, -1.0])}),
    (
        "chunk_gated_delta_rule", RAW,
        {"raw": True, "A_log": torch.tensor([0.3, -1.0]), "dt_bias": torch.tensor([0.1, -2.0])},
    ),
]  # fmt: skip


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("C", "family"), [(16, 0), (16, 2), *((32, i) for i in range(6)), (64, 0), (64, 5)], ids=str
)
def test_checkpoints_at_chosen_tokens(C: int, family: int) -> None:
    """In any order, several in a chunk, at a sequence's start, one twice, none where the row is no slot."""
    op, options, drawn = FAMILIES[family]
    x = draw(
        op, [0, 70, 17, 5, 33], padding=6, initial_state=pool(4, 2, 16, 16, nan=(2,)),
        state_indices=integers(0, 1, 3, -1, 2), has_initial_state=torch.tensor([True, True, True, True, False]),
        write_pool=pool(14, 2, 16, 16, nan=tuple(range(14)), seed=7), write_indices=integers(4, 0, 1, 2, 5),
        checkpoint_offsets=integers(108, 48, 70, 16, 999, 87, 48, 92, 32, 64, 0, kind=torch.int64),
        checkpoint_indices=integers(13, 6, 7, 8, -1, 3, 9, 10, 11, 12, 4),
        **drawn,
    )  # fmt: skip
    x.checkpoint_indices[10] = -7
    with configs.override("chunk_forward", BASE | {"C": C}):
        check(op, x, inplace_state=True, output_final_state=True, **options)


def _failing(usual: Any) -> Any:
    """A method of a kernel that fails for the one which writes checkpoints."""

    def method(kernel: Any, *args: Any) -> Any:
        if kernel._launcher.kernel is chunk_forward_checkpoints_kernel:
            raise BuildError
        return usual(kernel, *args)

    return method


def test_a_kernel_that_cannot_be_built_leaves_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan writes rows and the output; the kernel behind it, which writes checkpoints, is built before."""

    for name in ("build", "prepare"):  # the launch as well, which builds what has not been built
        monkeypatch.setattr(BoundKernel, name, _failing(getattr(BoundKernel, name)))

    x = draw(
        "chunk_kda", [40, 33], initial_state=pool(4, 2, 16, 16), state_indices=integers(0, 1),
        checkpoint_offsets=integers(16, 48), checkpoint_indices=integers(2, 3),
    )  # fmt: skip
    x = x._replace(out=torch.full_like(x.v, 7.0))
    before = on_host(x)
    with configs.override("chunk_forward", BASE | {"C": 32}):
        with pytest.raises(BuildError):
            chunk_forward.forward(request_of("chunk_kda", x, inplace_state=True), x)
        for name, a, b in zip(x._fields, before, on_host(x), strict=True):
            assert a is None or torch.equal(a, b), name
        monkeypatch.undo()
        chunk_forward.forward(request_of("chunk_kda", x, inplace_state=True), x)
    assert not torch.equal(before.out, x.out.cpu())


def test_checkpoints_beside_regular_ones(rows_of_chunk: int) -> None:
    states = pool(6, 2, 20, 24, dtype=torch.float32)
    x = draw(
        "chunk_kda", [150], K=20, V=24, initial_state=states, state_indices=integers(3),
        checkpoint_offsets=integers(144, 16), checkpoint_indices=integers(0, 5),
    )  # fmt: skip
    check("chunk_kda", x, inplace_state=True, checkpoint_every=64)
    y = x._replace(cu_seqlens=None, initial_state=states.mT.contiguous())
    check("chunk_kda", y, inplace_state=True, state_v_first=True, null_index=5)


def test_checkpoints_in_segments(segmented: None) -> None:
    x = draw(
        "chunk_kda", [1200, 530], HV=1, low=-0.02, write_pool=pool(9, 1, 16, 16), write_indices=integers(0, 1),
        checkpoint_offsets=integers(512, 0, 1024 + 16, 1200 + 512, 496, 1184, 1200),
        checkpoint_indices=integers(2, 3, 4, 5, 6, 7, 8),
    )  # fmt: skip
    check("chunk_kda", x, inplace_state=True, output_final_state=True)


def test_more_checkpoints_than_are_looked_at_together() -> None:
    """300 of them, most of which are not kept."""
    rows = np.full(300, -1)
    offsets = np.full(300, 12345)
    places = np.random.default_rng(0).permutation(300)[:8]
    rows[places], offsets[places] = np.arange(8), [64, 16, 0, 48, 32, 80, 112, 96]
    x = draw(
        "chunk_kda", [64, 61], HV=1, write_pool=pool(9, 1, 16, 16), write_indices=integers(8, -1),
        checkpoint_offsets=torch.tensor(offsets), checkpoint_indices=torch.tensor(rows),
    )  # fmt: skip
    check("chunk_kda", x, inplace_state=True)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("op", "options", "drawn"), FAMILIES[:3], ids=["unbounded", "bounded", "scalar"])
def test_checkpoints_change_no_other_bit_and_mind_no_later_token(
    rows_of_chunk: int, op: str, options: dict[str, Any], drawn: dict[str, Any]
) -> None:
    x = draw(op, [90], **drawn)
    plain = chunk_forward.forward(request_of(op, x, output_final_state=True, **options), x)

    def kept(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = x._replace(
            write_pool=torch.zeros(3, 2, 16, 16, device=DEVICE), write_indices=integers(0).to(DEVICE),
            checkpoint_offsets=integers(48, 64).to(DEVICE), checkpoint_indices=integers(1, 2).to(DEVICE),
        )  # fmt: skip
        got = chunk_forward.forward(request_of(op, x, inplace_state=True, **options), x)
        return got.o, x.write_pool

    o, states = kept(x)
    assert torch.equal(o, plain.o) and torch.equal(states[0], plain.final_state[0])
    late = draw(op, [90], seed=1, **drawn)
    other = type(x)(*(
        a if a is None or a.ndim == 1 else torch.cat([a[:, :64], b[:, 64:]], 1) for a, b in zip(x, late, strict=True)
    ))  # fmt: skip
    _, again = kept(other)
    assert torch.equal(again[1:], states[1:])
    short = type(x)(*(a if a is None or a.ndim == 1 else a[:, :65].contiguous() for a in x))
    _, again = kept(short._replace(cu_seqlens=integers(0, 65).to(DEVICE)))
    assert torch.equal(again[1:], states[1:])
