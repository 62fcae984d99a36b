"""``chunk_gated_delta_rule`` with records made beside the walks, emulated on the CPU: the bits of the launches one
after the other, flags, the order of units, which calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import count
from typing import Any

import emulator
import numpy as np
import program_launches
import pytest
import torch
from cuda_calls import MODEL, Draw, request_of
from emulated_backend import registered, run_emulated, wide_inference_cases
from form_calls import FormCall
from gated_delta_calls import OP, WAYS, all_same_bits, choose_records, draw, in_each_order, names_of, pack
from pool_checks import pool_of, same_bits
from spill_allowances import allowed

from kdacore.testing.cases import Case
from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.build.kernel_source import EVERY_LANE, gather_headers
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import kernels
from kdacore_cuda.kernel_parameters import GATED_DELTA
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.program import Launch

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.first_cases(2)]


@pytest.fixture(params=[5, 132], ids=["few multiprocessors", "many"])
def multiprocessors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With few, a block makes many units one after another."""
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: request.param)
    return int(request.param)


def run(monkeypatch: pytest.MonkeyPatch, inputs: ChunkInputs, way: str, **options: Any) -> Outputs:
    """Pools are written in copies."""
    with monkeypatch.context() as patched:
        choose_records(patched, way)
        given = inputs
        if options.get("inplace_state"):
            names = [n for n in ("initial_state", "write_pool") if getattr(inputs, n) is not None]
            given = inputs._replace(**{n: getattr(inputs, n).clone() for n in names})
        got = gated_delta.forward(request_of(OP, given, **MODEL, **options), given)
        if options.get("inplace_state"):
            written = given.initial_state if given.write_pool is None else given.write_pool
            got = got._replace(final_state=written)
        return got


def check(
    monkeypatch: pytest.MonkeyPatch, launched: list[str], inputs: ChunkInputs, **options: Any
) -> Outputs:
    """The same bits as from records that were made before, of all results."""
    want = run(monkeypatch, inputs, "before", **options)
    launched.clear()
    got = run(monkeypatch, inputs, "beside", **options)
    assert names_of(launched) == WAYS["beside"]
    for name, x, y in zip(Outputs._fields, got, want, strict=True):
        if isinstance(y, torch.Tensor):
            assert same_bits(x, y), name
    return got


# --- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 17, 63, 64, 65, 129, 257])
def test_lengths(emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    check(monkeypatch, emulated, draw(T, B=1 + T % 2, seed=T), output_final_state=True)


@pytest.mark.first_cases(1)
def test_longer_than_two_rings(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int
) -> None:
    """Of stages, and of units by turns."""
    check(monkeypatch, emulated, draw(64 * 8 + 3, 2, 4, B=2), output_final_state=True)


@pytest.mark.parametrize("group", [1, 3, 5])
def test_groups_of_value_heads(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int, group: int
) -> None:
    """Also more than a block makes factors of at a time."""
    check(monkeypatch, emulated, draw(200, 2, 2 * group), output_final_state=True)


@pytest.mark.parametrize("v_first", [False, True])
def test_states_and_checkpoints(emulated: list[str], monkeypatch: pytest.MonkeyPatch, v_first: bool) -> None:
    dtype = torch.bfloat16 if v_first else torch.float32
    inputs = draw(200, B=2, initial_state=Draw(17).normal(2, 2, 128, 128, dtype=dtype))
    options = {"checkpoint_every": 64, "state_v_first": v_first, "output_final_state": True}
    check(monkeypatch, emulated, inputs, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "lengths", [(130, 0, 40, 3), (0, 0), (64,), (1, 63, 64, 200, 129), (15,) * 32, (70, 0) * 16]
)
def test_packs(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    lengths: tuple[int, ...],
) -> None:
    """With rows behind the last sequence."""
    inputs = pack(lengths, 70, H=2 if len(lengths) < 6 else 1)
    check(monkeypatch, emulated, inputs, output_final_state=True)


def test_checkpoints_of_packs(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, emulated, pack((0, 65, 1, 127, 57)), checkpoint_every=64)


def test_pools(emulated: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    """Two pools of strided rows, sequences without slots, new ones, and rows behind the pack."""
    inputs = pack(
        (70, 0, 17, 65, 1, 133, 0),
        padding=21,
        initial_state=pool_of(8, 128),
        state_indices=torch.tensor([4, 0, 0, 2, 6, 7, -1]),
        has_initial_state=torch.tensor([True, True, True, True, False, False, False]),
        write_indices=torch.tensor([8, 1, 2, 3, 4, 0, 5], dtype=torch.int32),
        write_pool=pool_of(9, 128, seed=2),
    )
    check(monkeypatch, emulated, inputs, inplace_state=True, null_index=0)


def test_batches_with_padding(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int
) -> None:
    inputs = draw(150, B=3, initial_state=pool_of(4, 128), state_indices=torch.tensor([2, -1, 0]))
    check(monkeypatch, emulated, inputs, inplace_state=True)


def test_same_bits_in_any_order(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int
) -> None:
    """Of threads, copies and blocks; and where one warp falls behind all others."""
    inputs = pack((270, 100))
    want = run(monkeypatch, inputs, "before", output_final_state=True)
    for given in in_each_order(monkeypatch, (0, 3, 4, 8, 12), (emulator.BACKWARDS, emulator.SHUFFLED)):
        got = run(monkeypatch, inputs, "beside", output_final_state=True)
        assert all_same_bits(got, want), given


@pytest.mark.exhaustive
def test_with_an_arrival_for_each_lane(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As racecheck is given the kernels: the same bits."""
    monkeypatch.setenv(EVERY_LANE, "1")
    check(monkeypatch, emulated, draw(270), output_final_state=True)


# --- conformance ---------------------------------------------------------------------------------------------------

QUICK = (f"{OP}-causality_append-base", f"{OP}-accuracy-collinear")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Case]]:
    """Those of the suite whose packs are served side by side."""
    choose_records(monkeypatch, "beside")
    rule = "use_records_beside"
    monkeypatch.setattr(choice, rule, lambda r, multiprocessors: not r.packed or r.N <= 32)
    with registered(OP):
        yield [c for c in wide_inference_cases(OP) if len(c.shape.lengths or ()) <= 32]


def test_some_conformance_cases(emulated: list[str], cases: list[Case]) -> None:
    some = [c for c in cases if c.id.startswith(QUICK)]
    assert len(some) >= len(QUICK)
    run_emulated(some, emulated, WAYS["beside"][-1])


@pytest.mark.exhaustive
def test_every_conformance_case(emulated: list[str], cases: list[Case]) -> None:
    assert len(cases) > 60
    run_emulated(cases, emulated, WAYS["beside"][-1])


# --- flags, and the order of units ---------------------------------------------------------------------------------


def records_call(monkeypatch: pytest.MonkeyPatch, inputs: ChunkInputs, **options: Any) -> FormCall:
    choose_records(monkeypatch, "beside")
    call = FormCall("gated_delta", request_of(OP, inputs, **MODEL, **options), inputs)
    assert call.workspace is not None
    call.workspace.zero_()
    return call


def flags_of(call: FormCall) -> torch.Tensor:
    """One row a record."""
    at, units = int(call.numbers["flags_at"]), int(call.made.buffers["workspace"])
    return call.workspace[at:units].view(torch.int64)


def test_every_flag_that_is_raised_is_read(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, multiprocessors: int
) -> None:
    """And no other one is raised: slots of a pack without a chunk, sequences without a slot in the pool."""
    inputs = pack(
        (130, 70, 64, 0, 1),
        padding=100,
        initial_state=pool_of(6, 128),
        state_indices=torch.tensor([1, -1, 2, 3, 4]),
    )
    call = records_call(monkeypatch, inputs, output_final_state=True)
    monkeypatch.setattr(program_launches, "numbers", count(77))
    call.launch("records")
    slots = 365 // 64 + 5
    flags = flags_of(call)[: slots * 4].view(slots, 2, -1)
    raised = torch.zeros(slots, dtype=torch.bool)
    for n, (first, length) in enumerate([(0, 130), (130, 0), (200, 64), (264, 0), (264, 1)]):
        raised[first // 64 + n : first // 64 + n + -(-length // 64)] = True
    assert (flags == torch.where(raised, 77, 0)[:, None, None]).all()
    monkeypatch.setattr(program_launches, "numbers", count(77))
    call.launch("walk")
    assert not flags_of(call).any()


def test_flags_of_another_call_are_not_taken(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = records_call(monkeypatch, draw(130))
    monkeypatch.setattr(program_launches, "numbers", count(77))
    call.launch("records")
    monkeypatch.setattr(program_launches, "numbers", count(78))
    with pytest.raises(RuntimeError, match="flag"):
        call.launch("walk")


_ORDER = """
#include "sm90/gated_delta/unit_order.cuh"
static void order(const GatedDeltaParams& p, int together, int* out, int count) {
  KDA_SHARED(memory);
  const u32 table = shared_address(memory);
  if (p.cu_seqlens) make_order(p, table, together, thread_index());
  sync_block();
  if (thread_index()) return;
  for (int i = 0; i < count; ++i) {
    const OrderedUnit x = find_ordered_unit(p, table, together, i);
    *out++ = x.past ? -1 : (int)x.unit.slot, *out++ = x.unit.h, *out++ = x.unit.rows;
  }
  *out = ordered_units(p, table, together);
}
#pragma GCC visibility push(default)
extern "C" const char* run(GatedDeltaParams p, int together, int* out, int count) {
  return emu::run([&] { order(p, together, out, count); }, 1, 1, 32, sizeof(OrderTable), 0);
}
"""


@pytest.fixture(scope="module")
def order_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("order")
    return ctypes.CDLL(str(emulator.compile_library(_ORDER, gather_headers(_ORDER), [], folder, "order")))


@pytest.mark.parametrize(
    "inputs",
    [
        draw(200, 2, 2, B=3),
        pack((130, 0, 300, 64, 70, 130), 200, H=2),
        pack((15, 70, 0, 1) * 8),
        pack((0, 0), padding=9),
    ],
    ids=["dense", "pack", "32 sequences", "empty"],
)
@pytest.mark.parametrize("together", [1, 2, 100])
def test_first_chunks_come_first(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    order_library: ctypes.CDLL,
    inputs: ChunkInputs,
    together: int,
) -> None:
    """Every unit that has tokens is given out once, in the order of groups of sequences, and of chunks in a group."""
    call = records_call(monkeypatch, inputs)
    together = min(together, len(inputs.cu_seqlens) - 1 if inputs.cu_seqlens is not None else len(inputs.q))
    (step,) = (x for x in call.made.program.steps if isinstance(x, Launch) and x.name == "records")
    offsets = inputs.cu_seqlens
    given = call.numbers | {"cu_seqlens": 0 if offsets is None else offsets.data_ptr()}
    values = [given.get(name, 0) for name, _ in GATED_DELTA.fields]
    assert step.kernel.params.parts[1] is GATED_DELTA
    struct = type(
        "Params", (ctypes.Structure,), {"_fields_": [("data", ctypes.c_uint64 * (GATED_DELTA.size // 8))]}
    )
    starts = [0, 200, 400, 600] if offsets is None else offsets.tolist()
    H = inputs.q.shape[2]
    lengths = np.diff(starts).tolist()
    units = H * sum(-(-x // 64) for x in lengths)
    out = torch.zeros(units + 6, 3, dtype=torch.int32)
    function = order_library.run
    function.argtypes, function.restype = (
        [struct, ctypes.c_int, ctypes.c_void_p, ctypes.c_int],
        ctypes.c_char_p,
    )
    packed = struct.from_buffer_copy(GATED_DELTA.packer.pack(*values))
    assert function(packed, together, out.data_ptr(), len(out) - 1) is None
    assert (out[units:-1, 0] == -1).all() and out[-1, 0] == units
    slot_of, at = {}, 0
    for n, length in enumerate(lengths):
        first = at if offsets is None else starts[n] // 64 + n
        slot_of |= {first + c: (n, c) for c in range(-(-length // 64))}
        at += -(-length // 64)
    found = [(*slot_of[slot], h, rows) for slot, h, rows in out[:units].tolist()]
    assert len({x[:3] for x in found}) == units
    by_length = sorted(range(len(lengths)), key=lambda n: (-((lengths[n] + 63) // 64), n))
    group = {n: row // together for row, n in enumerate(by_length)}
    assert [(group[n], c) for n, c, _, _ in found] == sorted((group[n], c) for n, c, _, _ in found)
    assert all(rows == min(64, lengths[n] - 64 * c) for n, c, _, rows in found)


# --- which calls ---------------------------------------------------------------------------------------------------


def test_every_block_finds_a_multiprocessor() -> None:
    blocks = kernels.records_blocks_beside
    for items in range(1, 37):
        assert blocks(10**6, 2 * items, 132) + 2 * items == 132
    assert blocks(5, 34, 132) == 3
    assert blocks(10**6, 8, 5) == 1


@pytest.mark.parametrize("kernel", [kernels.records_beside_kernel(), kernels.walk_beside_kernel()])
def test_products_overlap(kernel: Any) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    built = compile_kernel(kernel.source, "sm_90a")
    assert "serialized" not in built.log
    assert "setmaxnreg ignored" not in built.log
    assert built.usage().spills <= allowed(kernel.source, "sm_90a")
