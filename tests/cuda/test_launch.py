"""Parameter packing, programs, and both executors on a stub driver library."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import emulator
import pytest
import torch
from emulator import STRUCTS
from recording_driver import EXECUTORS, Seen, Stub
from sized_kernel import SizedKernel

from kdacore.errors import BackendBuildError
from kdacore_cuda import kernel_parameters
from kdacore_cuda.build.compiler import compile_text
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel
from kdacore_cuda.kernel_parameters import GROUPS, RECURRENT, ParamStruct
from kdacore_cuda.request_encoding import division
from kdacore_cuda.runtime import executor
from kdacore_cuda.runtime.driver import DriverError
from kdacore_cuda.runtime.program import LAUNCH, NOTHING, Clear, InPlace, Launch, Program, Value
from kdacore_cuda.runtime.python_executor import DeviceMismatchError, ProgramError

pytestmark = pytest.mark.quick

POINTERS = tuple(name for name, kind in RECURRENT.fields if kind == "ptr")
NUMBERS = tuple(name for name, kind in RECURRENT.fields if kind != "ptr")
VALUES: dict[str, Any] = {name: i for i, (name, _) in enumerate(RECURRENT.fields, 1)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(tmp_path_factory.mktemp("driver"), {"recurrent": RECURRENT})


@pytest.fixture(params=EXECUTORS)
def stub(request: pytest.FixtureRequest, library: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The driver, through each executor."""
    library.install(monkeypatch, request.param)
    return library


def kernel(shared: int = 1000) -> SizedKernel:
    source = recurrent_kernel(64, False, "float32", RecurrentMode.GENERAL).source
    return SizedKernel(source, RECURRENT, threads=64, shared=shared)


def one_launch(shared: int = 1000, fields: Mapping[str, Value] = {}) -> Program:
    """A launch whose fields hold values of their own names."""
    return Program((Launch("one", kernel(shared), "blocks", fields),), POINTERS, (*NUMBERS, "blocks"))


def run(
    program: Program,
    values: Mapping[str, Any],
    stream: int = 0,
    arch: str = "sm_90a",
    device: int = 0,
) -> None:
    """The launches of a program; absent arrays are 0."""
    packed = program.pack_addresses(*(values.get(name, 0) for name in program.arrays))
    executor.start_of(program, arch, device)(stream, packed + program.pack_numbers(values))


def test_a_launch_passes_every_value(stub: Stub) -> None:
    run(one_launch(), VALUES | {"blocks": 7}, stream=0x55)
    (x,) = stub()
    assert x == Seen("recurrent", 7, 64, 1000, 0, VALUES, 0x55, (6,))


def test_values_of_the_widest_fields_are_whole(stub: Stub) -> None:
    """64-bit addresses and strides, negative numbers, and float32 that integers' bits are not."""
    wide = VALUES | {"q": 2**63 - 16, "q_sb": -(2**40), "null_index": -1, "scale": -0.15625}
    run(one_launch(), wide | {"blocks": 1})
    assert stub()[0].params == wide


def test_large_shared_memory_is_asked_for(stub: Stub) -> None:
    run(one_launch(shared=48 * 1024), VALUES | {"blocks": 1})
    assert stub()[0].limit == 0
    for shared in (100_000, 200_000, 150_000):
        run(one_launch(shared), VALUES | {"blocks": 1})
    assert [x.shared for x in stub()] == [48 * 1024, 100_000, 200_000, 150_000]
    assert stub()[-1].limit == 200_000


def test_a_refused_launch_raises(stub: Stub) -> None:
    program = one_launch()
    stub.number("fail").value = 3
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_STUB \(3\)"):
        run(program, VALUES | {"blocks": 1})
    stub.number("fail").value = 0
    run(program, VALUES | {"blocks": 1})
    assert len(stub()) == 2


def test_a_kernel_that_the_machine_code_lacks(stub: Stub) -> None:
    other = SizedKernel(dataclasses.replace(kernel().source, entry="elsewhere"), RECURRENT)
    program = Program((Launch("one", other, "blocks"),), POINTERS, (*NUMBERS, "blocks"))
    with pytest.raises(DriverError, match=r"cuLibraryGetKernel failed: CUDA_ERROR_STUB \(500\)"):
        run(program, VALUES | {"blocks": 1})


def test_a_thread_without_a_context_gets_torchs(stub: Stub) -> None:
    """As autograd's threads are before something in them has used CUDA."""
    program = one_launch()
    run(program, VALUES | {"blocks": 5}, device=2)
    assert stub.context == 0
    stub.number("nowhere").value = 1
    run(program, VALUES | {"blocks": 5}, device=2)
    assert stub.context == 0x100 + 2
    assert [x.params for x in stub()] == [VALUES] * 2


@pytest.mark.parametrize(("arch", "attributes"), [("sm_90a", (6,)), ("sm_100f", (6,)), ("sm_80", ())])
def test_launches_may_begin_early_where_the_architecture_has_that(
    stub: Stub, arch: str, attributes: tuple[int, ...]
) -> None:
    """6: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
    program = one_launch()
    for grid, stream in ((7, 0x55), (9, 0x66)):
        run(program, VALUES | {"blocks": grid}, stream, arch)
    wanted = Seen("recurrent", 7, 64, 1000, 0, VALUES, 0x55, attributes)
    assert stub() == [wanted, wanted._replace(grid=9, stream=0x66)]


def test_fields_without_a_value_are_zero(stub: Stub) -> None:
    program = Program((Launch("one", kernel(), "T"),), ("k", "dt_bias"), ("T", "scale"))
    for values in ({"k": 11, "dt_bias": 13}, {"k": 2**47 + 1, "dt_bias": 0}):
        run(program, {"T": 5, "scale": 0.5} | values)
        assert stub()[-1].params == dict.fromkeys(VALUES, 0) | values | {"T": 5, "scale": 0.5}


def test_fields_hold_other_values_than_those_of_their_name(stub: Stub) -> None:
    """Sums of a buffer and an offset, nothing, and a number that no other call has."""
    offsets = {"v": ("q", "k_at"), "g": NOTHING, "o": LAUNCH, "H": "T"}
    program = Program((Launch("one", kernel(), "T", offsets),), POINTERS, (*NUMBERS, "k_at"))
    for _ in range(2):
        run(program, VALUES | {"q": 2**46, "k_at": 2**33 + 16})
    first, second = (x.params for x in stub())
    wanted = VALUES | {"q": 2**46, "v": 2**46 + 2**33 + 16, "g": 0, "H": VALUES["T"]}
    assert {**first, "o": 0} == {**second, "o": 0} == wanted | {"o": 0}
    assert second["o"] == first["o"] + 1


def test_programs_of_one_kernel_share_its_code(stub: Stub) -> None:
    for program in (one_launch(), one_launch(2000), one_launch()):
        run(program, VALUES | {"blocks": 1})
    assert (stub.number("loads").value, len(stub())) == (1, 3)


def three_launches(**changes: Any) -> Program:
    """Of given, 5, and given numbers of blocks."""
    plain = kernel()
    first = Launch("first", plain, "some", {"o": ("work", "o_at"), "T": "five", "N": NOTHING})
    second = Launch("second", plain, "five", {"k": ("q", "k_at"), "q": NOTHING, "h0": "work"})
    third = Launch("third", plain, "more", {"k": "q", "q": NOTHING})
    names = "some", "five", "more", "o_at", "k_at", "scale", "N"
    return Program((first, second._replace(**changes), third), ("q", "work"), names)


def test_launches_are_made_in_order(stub: Stub) -> None:
    program, q, work = three_launches(), 2**47 + 16, 2**46
    numbers = {"five": 5, "o_at": 64, "k_at": 16, "scale": 0.5, "N": 3}
    for some, more, stream in ((3, 0, 0x55), (0, 2, 0), (1, 2**31 - 1, 0x66)):
        stub.reset()
        run(program, {"q": q, "work": work, "some": some, "more": more, **numbers}, stream)
        none = dict.fromkeys(VALUES, 0) | {"scale": 0.5}
        wanted = [
            (some, none | {"q": q, "o": work + 64, "T": 5}),
            (5, none | {"k": q + 16, "h0": work, "N": 3}),
            (more, none | {"k": q, "N": 3}),
        ]
        assert [(x.grid, x.params) for x in stub()] == [x for x in wanted if x[0]]
        assert {x.stream for x in stub()} == {stream}
        q += 32


def test_a_refused_launch_ends_a_call(stub: Stub) -> None:
    values = dict.fromkeys(("q", "work", "five", "some", "more", "o_at", "k_at", "scale", "N"), 1)
    stub.number("fail").value = 3
    with pytest.raises(DriverError, match="CUDA_ERROR_STUB"):
        run(three_launches(), values)
    assert len(stub()) == 1


def test_memory_is_cleared_and_copied_in_order(stub: Stub) -> None:
    a, b = torch.full((64,), 7, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    steps = InPlace("k", "work", "size"), Clear("q", "bytes"), Launch("one", kernel(), "blocks")
    program = Program(steps, ("q", "k", "work"), ("bytes", "size", "blocks"))
    values = {
        "q": a.data_ptr(),
        "k": a.data_ptr(),
        "work": b.data_ptr(),
        "bytes": 24,
        "size": 40,
        "blocks": 1,
    }
    run(program, values)
    assert a.tolist() == [0] * 24 + [7] * 40 and b.tolist() == [7] * 40 + [0] * 24
    (x,) = stub()
    assert (x.params["q"], x.params["k"]) == (values["q"], values["work"])  # the result, from here on
    run(program, values | {"bytes": 0, "size": 0})
    assert a.tolist() == [0] * 24 + [7] * 40 and b.tolist() == [7] * 40 + [0] * 24


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fields": {"k": "other"}}, "second: no call gives other"),
        ({"fields": {"k": ("q", "other")}}, "second: no call gives other"),
        ({"grid": "other"}, "other: no call gives other"),
        ({"fields": {"kk": "q"}}, "second: no such fields: kk"),
        ({"fields": {"T": "scale"}}, "scale is a float32 here and an integer elsewhere"),
    ],
    ids=["array", "offset", "blocks", "field", "kind"],
)
def test_programs_of_unknown_values_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        three_launches(**changes)


def test_a_call_gives_every_number_that_is_taken() -> None:
    program = three_launches()
    assert set(program.numbers) == {"some", "five", "more", "o_at", "k_at", "scale", "N"}
    with pytest.raises(KeyError, match="k_at"):
        program.pack_numbers(dict.fromkeys(set(program.numbers) - {"k_at"}, 0))


def damaged(words: Sequence[int], at: int, word: int) -> Any:
    return torch.tensor([*words[:at], word, *words[at + 1 :]]).numpy()


def test_programs_that_are_not_of_this_version_or_call(stub: Stub) -> None:
    program = one_launch()
    words = program.words("sm_90a", 90, 132)[0].tolist()
    given = bytes(8 * (len(program.arrays) + len(program.numbers)))
    start = executor.executor().start
    for changed in (damaged(words, 0, words[0] + 1), damaged(words, 3, words[3] + 1)):
        with pytest.raises(ProgramError):
            start(changed, 0)(0, given)
    with pytest.raises(ProgramError):
        start(damaged(words, 0, words[0]), 0)(0, given[8:])
    with pytest.raises(ProgramError, match="no machine code"):
        start(damaged(words, 10, 5), 0)(0, given[:-8] + struct.pack("<q", 1))
    assert stub() == []


@pytest.mark.parametrize(("capability", "multiprocessors"), [(100, 132), (90, 114)])
def test_programs_for_another_device(stub: Stub, capability: int, multiprocessors: int) -> None:
    program = one_launch()
    words, _ = program.words("sm_90a", capability, multiprocessors)
    given = bytes(8 * (len(program.arrays) + len(program.numbers)))
    with pytest.raises(
        DeviceMismatchError, match=f"compiled for sm_{capability} with {multiprocessors} multiprocessors"
    ):
        executor.executor().start(words, 0)(0, given)
    assert stub() == []


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 32, 48, 96, 1000, 2**16 + 1])
def test_division(divisor: int) -> None:
    factor, shift = division(divisor)
    assert shift >= 31
    assert factor < 2**32
    for n in (0, 1, divisor - 1, divisor, 2**31 - 1, 2**31 - 1 - divisor, (2**31 // divisor) * divisor - 1):
        assert n * factor >> shift == n // divisor


HEADERS = kernel_parameters.generated_headers()


def compile_offsets(params: ParamStruct, offsets: dict[str, int], arch: str) -> None:
    """NVRTC over the struct as kernels get it, with every field's place asserted. It has no ``offsetof`` of its own."""
    (header,) = [name for name, text in HEADERS.items() if re.search(rf"struct {params.name}\b[^;]*{{", text)]
    lines = [f'#include "{header}"\n']
    lines += [
        f'static_assert(__INTADDR__(&(({params.name}*)0)->{name}) == {offset}, "{name}");\n'
        for name, offset in offsets.items()
    ]
    text = "".join(lines) + f'extern "C" __global__ void take(const {params.name} p) {{}}\n'
    compile_text(text, params.name, (f"-arch={arch}", "-std=c++17"), HEADERS)


def test_every_header_is_of_a_struct_here() -> None:
    found = {
        word for text in HEADERS.values() for word in re.findall(r"^struct (\w+)[^;{]*{", text, re.MULTILINE)
    }
    assert found == STRUCTS.keys()
    assert len(STRUCTS) >= 7


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("params", STRUCTS.values(), ids=STRUCTS)
def test_offsets_agree_with_the_compiler(params: ParamStruct, arch: str) -> None:
    assert list(params.offsets) == [name for name, _ in params.fields]
    compile_offsets(params, params.offsets, arch)


def test_an_offset_that_is_off_is_seen() -> None:
    name = GROUPS.fields[-1][0]
    with pytest.raises(BackendBuildError, match=f"static assertion failed.*{name}"):
        compile_offsets(GROUPS, {**GROUPS.offsets, name: 4}, "sm_90a")


@pytest.mark.parametrize("params", STRUCTS.values(), ids=STRUCTS)
def test_values_are_packed_at_their_offsets(params: ParamStruct) -> None:
    packed = params.packer.pack(*range(1, len(params.fields) + 1))
    formats = {"ptr": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
    for i, (name, kind) in enumerate(params.fields, 1):
        assert struct.unpack_from(formats[kind], packed, params.offsets[name]) == (i,)
    assert len(packed) == params.size


def test_the_emulator_lays_structs_out_alike() -> None:
    kernel = recurrent_kernel(64, True, "float32", RecurrentMode.ONE_TOKEN).source
    library = emulator.build(kernel, RECURRENT)
    library.offset_of.restype = ctypes.c_size_t
    found = [library.offset_of(i) for i in range(len(RECURRENT.fields))]
    assert found == list(RECURRENT.offsets.values())


def test_holes_are_refused() -> None:
    with pytest.raises(ValueError, match="8-byte fields"):
        ParamStruct("Bad", (("a", "i32"), ("b", "ptr")))
