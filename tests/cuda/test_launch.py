"""Parameter packing, and the launch path through a stub driver library."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import emulator
import pytest
from emulator import STRUCTS

from kdacore.errors import BackendBuildError
from kdacore_cuda import kernel_parameters
from kdacore_cuda.build.compiler import compile_text
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel
from kdacore_cuda.kernel_parameters import GROUPS, RECURRENT, ParamStruct
from kdacore_cuda.request_encoding import division
from kdacore_cuda.runtime import launcher as launch
from kdacore_cuda.runtime import prepacked_launch
from kdacore_cuda.runtime.driver import Driver, DriverError
from kdacore_cuda.runtime.launch_sequence import LaunchSequence, PlannedLaunch

pytestmark = pytest.mark.quick

_STUB = """
#include <string.h>
unsigned char params[512]; unsigned grid, block, shared_size; void* on_stream; int limit, fail, attributes, attribute;
int loads, nowhere; void* current;
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(0x100L + device); return 0; }
int cuCtxSetCurrent(void* context) { current = context; return 0; }
int cuLibraryLoadData(void** l, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  *l = (void*)code; ++loads; return 0; }
int cuLibraryGetKernel(void** k, void* l, const char* name) { *k = (void*)0x77; return strcmp(name, "recurrent") != 0; }
int cuKernelSetAttribute(int what, int value, void* k, int device) { limit = value; return 0; }
int cuGetErrorName(int code, const char** text) { *text = "CUDA_ERROR_STUB"; return 0; }
int cuLaunchKernelEx(const unsigned* config, void* f, void** arguments, void** extra) {
  grid = config[0]; block = config[3]; shared_size = config[6]; on_stream = *(void**)(config + 8);
  attributes = config[12]; attribute = attributes ? **(int**)(config + 10) : -1;
  if (nowhere && !current) return 201;
  memcpy(params, arguments[0], SIZE); return fail; }
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the driver's names that records one launch."""
    assert shutil.which("gcc"), "the CUDA backend's tests need gcc and g++"
    folder = tmp_path_factory.mktemp("driver")
    (folder / "stub.c").write_text(_STUB)
    library = folder / "libcuda.so.1"
    size = f"-DSIZE={RECURRENT.size}"
    subprocess.run(["gcc", "-shared", "-fPIC", size, folder / "stub.c", "-o", library], check=True)
    return library


def make(stub: Path, monkeypatch: pytest.MonkeyPatch, shared: int = 1000) -> launch.Launcher:
    driver = Driver(str(stub))
    for module in (launch, prepacked_launch):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(launch, "load_or_compile", lambda kernel, arch: b"cubin")
    monkeypatch.setattr(launch, "_handles", {})
    return launch.Launcher(
        recurrent_kernel(64, False, False, RecurrentMode.GENERAL),
        RECURRENT,
        64,
        shared,
    )


def test_launch_passes_what_was_packed(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = make(stub, monkeypatch)
    values = tuple(range(1, len(RECURRENT.fields) + 1))
    launcher(7, 0, "sm_90a", 0x55, values)
    library = ctypes.CDLL(str(stub))
    seen = bytes((ctypes.c_ubyte * RECURRENT.size).in_dll(library, "params"))
    assert RECURRENT.packer.unpack(seen) == values
    assert ctypes.c_uint.in_dll(library, "grid").value == 7
    assert ctypes.c_uint.in_dll(library, "block").value == 64
    assert ctypes.c_void_p.in_dll(library, "on_stream").value == 0x55


def test_large_shared_memory_is_asked_for(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = make(stub, monkeypatch, shared=100_000)
    launcher(1, 0, "sm_90a", 0, (0,) * len(RECURRENT.fields))
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(stub)), "limit").value == 100_000


def test_a_refused_launch_raises(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = make(stub, monkeypatch)
    flag = ctypes.c_int.in_dll(ctypes.CDLL(str(stub)), "fail")
    flag.value = 3
    try:
        with pytest.raises(DriverError, match="CUDA_ERROR_STUB"):
            launcher(1, 0, "sm_90a", 0, (0,) * len(RECURRENT.fields))
    finally:
        flag.value = 0


def make_fixed(
    stub: Path, monkeypatch: pytest.MonkeyPatch, last: tuple[float, ...]
) -> prepacked_launch.PrepackedLauncher:
    """One whose calls give the first fields."""
    plain = make(stub, monkeypatch)
    names = [name for name, _ in RECURRENT.fields]
    given, rest = tuple(names[: -len(last)]), names[-len(last) :]
    return prepacked_launch.PrepackedLauncher(plain, given, dict(zip(rest, last, strict=True)))


def run(launcher: Any, grid: int, device: int, arch: str, stream: int, values: tuple[Any, ...]) -> None:
    """A launch by either kind of launcher."""
    if isinstance(launcher, prepacked_launch.PrepackedLauncher):
        launcher.start_for(grid, device, arch)(stream, values)
    else:
        launcher(grid, device, arch, stream, values)


@pytest.mark.parametrize("kind", ["plain", "fixed"])
def test_a_thread_without_a_context_gets_torchs(
    stub: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As autograd's threads are before something in them has used CUDA."""
    values = tuple(range(1, len(RECURRENT.fields) + 1))
    given = values if kind == "plain" else values[:16]
    launcher = make(stub, monkeypatch) if kind == "plain" else make_fixed(stub, monkeypatch, values[16:])
    library = ctypes.CDLL(str(stub))
    nowhere, current = ctypes.c_int.in_dll(library, "nowhere"), ctypes.c_void_p.in_dll(library, "current")
    nowhere.value = 1
    try:
        run(launcher, 5, 2, "sm_90a", 0, given)
        assert current.value == 0x100 + 2
    finally:
        nowhere.value, current.value = 0, None
    seen = bytes((ctypes.c_ubyte * RECURRENT.size).in_dll(library, "params"))
    assert RECURRENT.packer.unpack(seen) == values


@pytest.mark.parametrize("kind", ["plain", "fixed"])
@pytest.mark.parametrize(("arch", "attributes"), [("sm_90a", 1), ("sm_100f", 1), ("sm_80", 0)])
def test_launches_may_begin_early_where_the_architecture_has_that(
    stub: Path, monkeypatch: pytest.MonkeyPatch, arch: str, attributes: int, kind: str
) -> None:
    values = tuple(range(1, len(RECURRENT.fields) + 1))
    launcher = make(stub, monkeypatch) if kind == "plain" else make_fixed(stub, monkeypatch, values[16:])
    library = ctypes.CDLL(str(stub))
    for grid, stream in ((7, 0x55), (9, 0x66)):
        run(launcher, grid, 0, arch, stream, values if kind == "plain" else values[:16])
        seen = bytes((ctypes.c_ubyte * RECURRENT.size).in_dll(library, "params"))
        assert RECURRENT.packer.unpack(seen) == values
        assert ctypes.c_uint.in_dll(library, "grid").value == grid
        assert ctypes.c_uint.in_dll(library, "block").value == 64
        assert ctypes.c_uint.in_dll(library, "shared_size").value == 1000
        assert ctypes.c_void_p.in_dll(library, "on_stream").value == stream
        assert ctypes.c_int.in_dll(library, "attributes").value == attributes
        # 6: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert ctypes.c_int.in_dll(library, "attribute").value == (6 if attributes else -1)


def test_a_call_may_give_fields_with_zeros_between(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(stub, monkeypatch)
    given, fixed_values = ("k", "g", "dt_bias"), {"T": 5, "scale": 0.5, "lower_bound": -2.0}
    launcher = prepacked_launch.PrepackedLauncher(plain, given, fixed_values)
    for values in ((11, 12, 13), (2**47 + 1, 0, 3)):
        run(launcher, 1, 0, "sm_90a", 0, values)
        seen = bytes((ctypes.c_ubyte * RECURRENT.size).in_dll(ctypes.CDLL(str(stub)), "params"))
        want = dict(zip(given, values, strict=True)) | fixed_values
        assert RECURRENT.packer.unpack(seen) == tuple(want.get(n, 0) for n, _ in RECURRENT.fields)


@pytest.mark.parametrize(
    ("given", "fixed_values"), [(("g", "k"), {}), (("q", "v"), {"k": 7})], ids=["order", "between"]
)
def test_fields_out_of_order_or_fixed_between_are_refused(
    stub: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], fixed_values: dict[str, float]
) -> None:
    plain = make(stub, monkeypatch)
    launcher = prepacked_launch.PrepackedLauncher(plain, given, fixed_values)
    with pytest.raises(ValueError, match="in order, or not with zeros between"):
        run(launcher, 1, 0, "sm_90a", 0, (1, 2))


def test_launchers_of_one_kernel_share_its_code(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tuple(range(1, len(RECURRENT.fields) + 1))
    first = make_fixed(stub, monkeypatch, values[16:])
    third = launch.Launcher(first.launcher.kernel, RECURRENT, 64, 1000)
    second = prepacked_launch.PrepackedLauncher(third, first.per_call, first.fixed)
    loads = ctypes.c_int.in_dll(ctypes.CDLL(str(stub)), "loads")
    before = loads.value
    for launcher, given in ((first, values[:16]), (second, values[:16]), (third, values)):
        run(launcher, 1, 0, "sm_90a", 0, given)
    assert loads.value == before + 1


def test_a_refused_launch_of_fixed_values_raises(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tuple(range(1, len(RECURRENT.fields) + 1))
    launcher = make_fixed(stub, monkeypatch, values[16:])
    flag = ctypes.c_int.in_dll(ctypes.CDLL(str(stub)), "fail")
    flag.value = 3
    try:
        with pytest.raises(DriverError, match="CUDA_ERROR_STUB"):
            run(launcher, 1, 0, "sm_90a", 0, values[:16])
    finally:
        flag.value = 0


def make_sequence(stub: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> LaunchSequence:
    """Two launches of 3 and 5 blocks, and one of none."""
    plain = make(stub, monkeypatch)
    first = PlannedLaunch("first", plain, 3, {"q": ("q", 0), "o": ("work", 64)}, {"T": 5, "scale": 0.5})
    second = PlannedLaunch("second", plain, 5, {"k": ("q", 16), "h0": ("work", 0)}, {"T": 6})
    none = PlannedLaunch("none", plain, 0, {"k": ("q", 0)}, {})
    return LaunchSequence((first, second._replace(**changes), none), ("q", "work"))


def test_a_sequence_makes_its_launches_in_order(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub keeps the last launch: it is refused from there on, so that each is the last once."""
    library = ctypes.CDLL(str(stub))
    fail, grid = ctypes.c_int.in_dll(library, "fail"), ctypes.c_uint.in_dll(library, "grid")
    sequence = make_sequence(stub, monkeypatch)
    assert [x.name for x in sequence.launches] == ["first", "second"]
    start = sequence.start_for(0, "sm_90a")
    q, work = 2**47 + 16, 2**46
    wanted: tuple[dict[str, float], ...] = (
        {"q": q, "o": work + 64, "T": 5, "scale": 0.5}, {"k": q + 16, "h0": work, "T": 6}
    )  # fmt: skip
    for stream in (0x55, 0x55, 0x66, 0):
        for i, code in enumerate((3, 0)):
            fail.value = code
            try:
                if code:
                    with pytest.raises(DriverError, match="CUDA_ERROR_STUB"):
                        start(stream, q, work)
                else:
                    start(stream, q, work)
            finally:
                fail.value = 0
            seen = bytes((ctypes.c_ubyte * RECURRENT.size).in_dll(library, "params"))
            values = tuple(wanted[i].get(name, 0) for name, _ in RECURRENT.fields)
            assert RECURRENT.packer.unpack(seen) == values == sequence.values(i, (q, work))
            assert grid.value == (3, 5)[i]
            assert (ctypes.c_void_p.in_dll(library, "on_stream").value or 0) == stream
            q += 32
            wanted[0]["q"], wanted[1]["k"] = q, q + 16


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({"q": ("q", 0), "o": ("o", 0)}, ("q", "o")),
        ({"q": ("q", 0), "o": ("o", 0)}, ("absent", "o", "q")),
        ({"q": ("q", 0), "k": ("q", 0)}, ("o", "q")),
        ({"o": ("o", 0)}, ("q", "o")),
    ],
    ids=["in order", "out of order", "one array twice", "one array"],
)
def test_a_sequence_of_one_launch(
    stub: Path, monkeypatch: pytest.MonkeyPatch, arrays: dict[str, tuple[str, int]], names: tuple[str, ...]
) -> None:
    """No function is written for it; the driver receives the same."""
    library = ctypes.CDLL(str(stub))
    sequence = LaunchSequence(
        (PlannedLaunch("one", make(stub, monkeypatch), 3, arrays, {"T": 5, "scale": 0.5}),), names
    )
    with monkeypatch.context() as without:
        without.setattr("builtins.exec", None)
        start = sequence.start_for(0, "sm_90a")
    for stream, q, o in ((0x55, 2**47 + 16, 2**46), (0, 16, 32)):
        at = {"q": q, "o": o, "absent": 0}
        start(stream, *(at[name] for name in names))
        wanted = {field: at[name] for field, (name, _) in arrays.items()} | {"T": 5, "scale": 0.5}
        seen = bytes((ctypes.c_ubyte * RECURRENT.size).in_dll(library, "params"))
        assert RECURRENT.packer.unpack(seen) == tuple(wanted.get(name, 0) for name, _ in RECURRENT.fields)
        assert ctypes.c_uint.in_dll(library, "grid").value == 3
        assert (ctypes.c_void_p.in_dll(library, "on_stream").value or 0) == stream
    fail = ctypes.c_int.in_dll(library, "fail")
    fail.value = 3
    try:
        with pytest.raises(DriverError, match="CUDA_ERROR_STUB"):
            start(0, *(16 for _ in names))
    finally:
        fail.value = 0


def test_a_sequence_in_a_thread_without_a_context(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(stub))
    nowhere, current = ctypes.c_int.in_dll(library, "nowhere"), ctypes.c_void_p.in_dll(library, "current")
    start = make_sequence(stub, monkeypatch).start_for(2, "sm_90a")
    nowhere.value = 1
    try:
        start(0, 16, 32)
        assert current.value == 0x100 + 2
    finally:
        nowhere.value, current.value = 0, None


def test_sequences_of_unknown_arrays_and_fields_are_refused(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no call gives: other"):
        make_sequence(stub, monkeypatch, arrays={"k": ("other", 0)})
    with pytest.raises(ValueError, match="second: no such fields: kk"):
        make_sequence(stub, monkeypatch, arrays={"kk": ("q", 0)})


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
    kernel = recurrent_kernel(64, True, False, RecurrentMode.ONE_TOKEN)
    library = emulator.build(kernel, RECURRENT)
    library.offset_of.restype = ctypes.c_size_t
    found = [library.offset_of(i) for i in range(len(RECURRENT.fields))]
    assert found == list(RECURRENT.offsets.values())


def test_holes_are_refused() -> None:
    with pytest.raises(ValueError, match="8-byte fields"):
        ParamStruct("Bad", (("a", "i32"), ("b", "ptr")))
