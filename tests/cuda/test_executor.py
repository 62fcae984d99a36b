"""The executor, native and in Python: the same calls of the driver for the same programs, and what becomes of wrong
programs, of errors and of threads without a context."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import shutil
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sized_kernel import SizedKernel
from stub_driver import Launched, Memory, Recorder

from kdacore.errors import PerformanceWarning
from kdacore_cuda.build import packaged_executors
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.kernel_parameters import ParamStruct
from kdacore_cuda.runtime import driver, executor
from kdacore_cuda.runtime import program as programs
from kdacore_cuda.runtime.driver import DriverError
from kdacore_cuda.runtime.executor import Executor
from kdacore_cuda.runtime.native_executor import NativeExecutor, _Failure
from kdacore_cuda.runtime.program import LAUNCH, NOTHING, Clear, InPlace, Launch, Program, Step, Value
from kdacore_cuda.runtime.python_executor import (
    STATIC_SHARED,
    DeviceMismatchError,
    ProgramError,
    PythonExecutor,
)

pytestmark = pytest.mark.quick

STREAM = 0x7F0000001230
ARRAYS = ("a", "b", "c", "result")
PARAMS = {
    "wide": ParamStruct(
        "Wide",
        (
            *(("launch", "ptr"), ("a", "ptr"), ("b", "ptr"), ("moved", "ptr"), ("none", "ptr")),
            *(("stride", "i64"), ("unset", "i64"), ("count", "i32"), ("scale", "f32"), ("negative", "i32")),
        ),
    ),
    "narrow": ParamStruct("Narrow", (("c", "ptr"), ("scale", "f32"))),
    "none": ParamStruct("None_", ()),
}
FIELDS: dict[str, Value] = {"launch": LAUNCH, "moved": ("c", "offset"), "none": NOTHING}
GIVEN: dict[str, float] = {
    "stride": -(2**40) - 3,
    "count": 2**31 - 1,
    "scale": -0.3,
    "negative": -7,
    "offset": 2**33 + 16,
    "blocks": 5,
    "no blocks": 0,
    "bytes": 48,
    "no bytes": 0,
}


def kernel(name: str, entry: str = "") -> KernelSource:
    return KernelSource(f"{name}.cu", entry or name)


def launch(name: str, grid: str = "blocks", threads: int = 96, shared: int = 1000, **fields: Value) -> Launch:
    params = PARAMS[name]
    own = {field: value for field, value in (FIELDS | fields).items() if field in params.offsets}
    return Launch(name, SizedKernel(kernel(name), params, threads=threads, shared=shared), grid, own)


def make(*steps: Step, arrays: tuple[str, ...] = ARRAYS, given: Mapping[str, float] = GIVEN) -> Program:
    return Program(steps, arrays, tuple(given))


@pytest.fixture(autouse=True)
def machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are those of :data:`PARAMS`, by their path."""

    def cubin_of(source: KernelSource, arch: str) -> tuple[int, bytes]:
        name = source.path.removesuffix(".cu")
        return 1000 + list(PARAMS).index(name), Recorder.code(PARAMS[name].size)

    monkeypatch.setattr(programs, "cubin_of", cubin_of)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def recorder(recording: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A driver that is the process's, too."""
    here = recording.stub.driver()
    monkeypatch.setattr(driver, "driver", lambda: here)
    recording.stub.reset()
    yield recording
    recording.stub.reset()
    recording.take()


@pytest.fixture(params=["native", "python"])
def either(request: pytest.FixtureRequest, recorder: Recorder) -> Executor:
    """An executor that has launched nothing yet."""
    return recorder.executor(request.param)


class Call(NamedTuple):
    """A program and its values."""

    words: np.ndarray[tuple[int], np.dtype[np.int64]]
    cubins: dict[int, bytes]
    values: bytes

    def start(self, by: Executor, stream: int = STREAM, device: int = 0) -> None:
        for identity, cubin in self.cubins.items():
            by.add_kernel(identity, cubin)
        by.start(self.words, device)(stream, self.values)


def call(
    program: Program,
    given: Mapping[str, float] = GIVEN,
    addresses: Mapping[str, int] | None = None,
    **header: int,
) -> Call:
    """``addresses``: every array has one of its own if not given."""
    if addresses is None:
        addresses = {name: 2**46 * (i + 1) + 16 * i for i, name in enumerate(program.arrays)}
    at = [addresses.get(name, 0) for name in program.arrays]
    placed = {"capability": 90, "multiprocessors": 132} | header
    words, cubins = program.words("sm_90a", **placed)
    return Call(words, cubins, program.pack_addresses(*at) + program.pack_numbers(given))


def both(recorder: Recorder, made: Call, stream: int = STREAM) -> list[Launched | Memory]:
    """What the driver is told by the executors, which have to agree, launch numbers and all."""
    events = []
    for name in ("native", "python"):
        made.start(recorder.executor(name, first_number=77), stream)
        events.append(recorder.take())
    assert events[0] == events[1]
    return events[0]


def test_parameters_are_those_that_the_struct_packs(recorder: Recorder) -> None:
    """Arrays, an array with an offset, numbers of both widths, negative ones, floats, and fields without a value."""
    made = call(make(launch("wide", shared=60_000), launch("narrow", threads=32)))
    first, second = both(recorder, made)
    a, b, c, _ = np.frombuffer(made.values[:32], np.int64).tolist()
    wide = {"launch": 77, "a": a, "b": b, "moved": c + GIVEN["offset"], "none": 0, "stride": GIVEN["stride"]}
    wide |= {"unset": 0, **{name: GIVEN[name] for name in ("count", "scale", "negative")}}
    packed = PARAMS["wide"].packer.pack(*wide.values())
    early = ((driver._PROGRAMMATIC_STREAM_SERIALIZATION, 1),)
    assert first == Launched((5, 1, 1), (96, 1, 1), 60_000, STREAM, early, packed)
    packed = PARAMS["narrow"].packer.pack(c, GIVEN["scale"])
    assert second == Launched((5, 1, 1), (32, 1, 1), 1000, STREAM, early, packed)


@pytest.mark.parametrize(("arch", "capability"), [("sm_80", 80), ("sm_90a", 90), ("sm_120", 120)])
def test_launches_overlap_from_hopper_on(recorder: Recorder, arch: str, capability: int) -> None:
    recorder.stub.number("capability").value = capability
    program = make(launch("narrow"))
    words, cubins = program.words(arch, capability, 132)
    made = call(program)._replace(words=words, cubins=cubins)
    (launched,) = both(recorder, made, stream=0)
    assert isinstance(launched, Launched)
    assert bool(launched.attributes) == (capability >= 90) and launched.stream == 0


def test_launches_of_no_blocks_are_left_out(recorder: Recorder) -> None:
    found = both(recorder, call(make(launch("wide", "no blocks"), launch("none"))))
    assert [x.parameters for x in found if isinstance(x, Launched)] == [b""]
    assert not both(recorder, call(make(launch("wide", "no blocks"))))


def test_memory_is_cleared_and_copied(recorder: Recorder) -> None:
    """An argument that is copied stands for the result afterwards. Nothing happens for no bytes, nor where both are
    the same memory."""
    steps = (InPlace("c", "result", "bytes"), Clear("c", "bytes"), Clear("a", "no bytes"), launch("narrow"))
    addresses = {"a": 0x1000, "b": 0x2000, "c": 0x3000, "result": 0x4000}
    copied, cleared, launched = both(recorder, call(make(*steps), addresses=addresses))
    assert copied == Memory(0x4000, 0x3000, 48) and cleared == Memory(0x4000, None, 48)
    assert isinstance(launched, Launched) and int.from_bytes(launched.parameters[:8], "little") == 0x4000
    same = call(make(*steps), addresses=addresses | {"result": 0x3000})
    assert both(recorder, same)[0] == Memory(0x3000, None, 48)
    nothing = both(recorder, call(make(InPlace("c", "result", "no bytes")), addresses=addresses))
    assert not nothing


def test_programs_with_numbers_of_their_own(recorder: Recorder) -> None:
    """As XLA's: a call gives addresses alone, and not of every array; fields of the others are 0."""
    program = make(launch("wide"), Clear("b", "bytes"), launch("narrow"))
    words, cubins = program.words(
        *("sm_90a", 90, 132, ("c", "array of rows"), ("result",)),
        own=program.pack_numbers(GIVEN),
        same={"a": "array of rows"},
    )
    made = Call(words, cubins, np.array([0x1000, 0x2000, 0x3000]).tobytes())
    wide, narrow = both(recorder, made)  # b is not there to be cleared
    assert isinstance(wide, Launched) and isinstance(narrow, Launched)
    names = [name for name, _ in PARAMS["wide"].fields]
    seen = dict(zip(names, PARAMS["wide"].packer.unpack(wide.parameters), strict=True))
    assert (seen["a"], seen["b"], seen["moved"]) == (0x2000, 0, 0x1000 + GIVEN["offset"])
    assert seen["stride"] == GIVEN["stride"] and wide.grid == (5, 1, 1)
    assert narrow.parameters[:8] == (0x1000).to_bytes(8, "little")


def drawn(seed: int) -> Call:
    """A random program with random values."""
    draw = random.Random(seed)
    given = {
        "bytes": draw.randrange(1, 2**40),
        "no bytes": 0,
        "no blocks": 0,
        "blocks": draw.randrange(1, 2**31),
    }
    given |= {name: draw.randrange(-(2**62), 2**62) for name in ("stride", "offset", "unset")}
    given |= {name: draw.randrange(-(2**31), 2**31) for name in ("count", "negative")}
    steps: list[Step] = []
    for i in range(draw.randrange(1, 8)):
        kind = draw.randrange(4)
        if kind == 0:
            steps.append(Clear(draw.choice(ARRAYS), draw.choice(["bytes", "no bytes"])))
        elif kind == 1:
            steps.append(InPlace(*draw.sample(ARRAYS, 2), draw.choice(["bytes", "no bytes"])))
        else:
            name, grid = draw.choice(list(PARAMS)), draw.choice(["blocks", "blocks", "no blocks"])
            shared, offset = draw.randrange(2**18), draw.choice(["offset", "stride"])
            more: dict[str, Value] = {"moved": (draw.choice(ARRAYS), offset)}
            made = launch(name, grid, draw.randrange(1, 1025), shared, **more)
            steps.append(made._replace(name=f"{name} {i}"))
    floats: dict[str, float] = {"scale": draw.choice([0.0, -0.0, 1e-40, -3.5, float("inf"), draw.random()])}
    used = make(*steps, given=given | floats)
    addresses = {name: draw.choice([0, draw.randrange(2**48)]) for name in ARRAYS}
    return call(used, given | floats, addresses)


def test_random_programs(recorder: Recorder) -> None:
    kinds = set()
    for seed in range(100):
        kinds |= {type(x) for x in both(recorder, drawn(seed), stream=seed)}
    assert kinds == {Launched, Memory}


def test_every_call_has_a_launch_number_of_its_own(either: Executor, recorder: Recorder) -> None:
    made = call(make(launch("wide")))
    for _ in range(3):
        made.start(either)
    numbers = [int.from_bytes(x.parameters[:8], "little") for x in recorder.take() if isinstance(x, Launched)]
    assert len({*numbers}) == 3 and min(numbers) > 0


def test_all_launches_of_a_call_have_one_launch_number(recorder: Recorder) -> None:
    steps = [launch("wide")._replace(name=str(i)) for i in range(3)]
    assert {x.parameters[:8] for x in both(recorder, call(make(*steps))) if isinstance(x, Launched)} == {
        (77).to_bytes(8, "little")
    }


def test_code_is_loaded_once_and_limits_are_set_for_each_device(either: Executor, recorder: Recorder) -> None:
    stub = recorder.stub
    big = call(make(launch("wide", shared=STATIC_SHARED + 1), launch("narrow", shared=STATIC_SHARED)))
    bigger = call(make(launch("wide", shared=STATIC_SHARED + 2)))

    def counted(made: Call, device: int) -> tuple[int, int]:
        before = stub.number("loads").value, stub.number("limits").value
        stub.number("device").value = device
        made.start(either, device=device)
        return stub.number("loads").value - before[0], stub.number("limits").value - before[1]

    assert counted(big, 0) == (2, 1)
    assert counted(big, 0) == (0, 0)
    assert counted(big, 3) == (0, 1)
    assert counted(bigger, 3) == (0, 1)
    assert counted(big, 3) == counted(bigger, 3) == (0, 0)
    assert counted(bigger, 0) == (0, 1)


def test_kernels_are_loaded_while_a_stream_is_captured(either: Executor, recorder: Recorder) -> None:
    """Which forbids it unless the thread says otherwise for the time, and only for that."""
    recorder.stub.number("capturing").value = 1
    made = call(make(launch("narrow", shared=60_000), launch("wide")))
    made.start(either)
    assert [type(x) for x in recorder.take()] == [Launched, Launched]
    modes = recorder.stub.number("modes").value
    with pytest.raises(DriverError, match=r"cuLibraryLoadData.*900"):
        recorder.stub.driver().load_kernel(recorder.code(8), "narrow")
    made.start(either)  # nothing is to be loaded any more
    assert recorder.stub.number("modes").value == modes and len(recorder.take()) == 2
    with pytest.raises(RuntimeError, match="while"), recorder.stub.driver().while_recording():
        raise RuntimeError("while it is relaxed")
    with pytest.raises(DriverError, match="900"):
        recorder.stub.driver().load_kernel(recorder.code(8), "narrow")


def test_handles(either: Executor, recorder: Recorder) -> None:
    """For questions to the driver about a kernel: the handle that launches use."""
    either.add_kernel(5, Recorder.code(320))
    before = recorder.stub.number("limits").value
    assert either.handle(5, "entry", STATIC_SHARED + 8, 2) == 320
    assert either.handle(5, "entry", STATIC_SHARED + 8, 2) == 320
    assert recorder.stub.number("limits").value == before + 1
    with pytest.raises(ProgramError, match="no machine code 0000000000000006"):
        either.handle(6, "entry", 0, 0)
    recorder.stub.fail("cuKernelSetAttribute", 7)
    with pytest.raises(DriverError, match=r"cuKernelSetAttribute failed: CUDA_ERROR_STUB \(7\)"):
        either.handle(5, "entry", STATIC_SHARED + 16, 2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("multiprocessors", 100, "compiled for sm_90 with 132 multiprocessors, but GPU 4 is sm_90 with 100"),
        ("capability", 103, "compiled for sm_90 with 132 multiprocessors, but GPU 4 is sm_103 with 132"),
    ],
)
def test_devices_of_another_kind_are_refused(
    either: Executor, recorder: Recorder, name: str, value: int, said: str
) -> None:
    for number, x in (("device", 4), (name, value)):
        recorder.stub.number(number).value = x
    with pytest.raises(DeviceMismatchError, match=said):
        call(make(launch("wide"))).start(either)
    assert not recorder.take()


def test_starts_are_made_once_for_each_device(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With that device's figures, whichever is current."""
    native = recorder.executor("native")
    monkeypatch.setattr(executor, "executor", lambda: native)
    monkeypatch.setattr(executor, "_starts", {})
    program = make(launch("narrow"))
    start = executor.start_of(program, "sm_90a", 0)
    assert executor.start_of(program, "sm_90a", 0) is start
    recorder.stub.number("capability").value = 103
    other = executor.start_of(program, "sm_103f", 1)
    assert other is not start
    recorder.stub.number("device").value = 1
    made = call(program)
    other(0, made.values)
    with pytest.raises(DeviceMismatchError, match="compiled for sm_90 .* but GPU 1 is sm_103"):
        start(0, made.values)
    assert len(recorder.take()) == 1


DONE = {
    **dict.fromkeys(("cuCtxGetDevice", "cuDeviceGetAttribute", "cuMemcpyDtoDAsync"), 0),
    "cuMemsetD8Async": 1,
    **dict.fromkeys(
        ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuLaunchKernelEx"), 2
    ),
}
"""Functions of the driver, and how many of a copy, clearing memory and a launch are done if they fail."""


@pytest.mark.parametrize("name", DONE)
def test_errors_of_the_driver(either: Executor, recorder: Recorder, name: str) -> None:
    """What comes after the call that failed is not done; the next call does all."""
    steps = (InPlace("c", "result", "bytes"), Clear("a", "bytes"), launch("wide", shared=60_000))
    made = call(make(*steps))
    recorder.stub.fail(name, 42)
    with pytest.raises(DriverError, match="CUDA_ERROR_STUB") as raised:
        made.start(either)
    assert (raised.value.call, raised.value.code, raised.value.text) == (name, 42, "CUDA_ERROR_STUB")
    assert len(recorder.take()) == DONE[name]
    recorder.stub.fail(None)
    made.start(either)
    assert len(recorder.take()) == 3


def in_a_thread(function: Any) -> BaseException | None:
    """What ``function`` raises in a new thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # for the caller
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_thread_without_a_context_gets_torchs(either: Executor, recorder: Recorder) -> None:
    """As autograd's are before something in them has used CUDA: that of the device that the call is for."""
    made, found = call(make(launch("wide"), launch("narrow"))), []
    recorder.stub.number("contexts").value = 0

    def run() -> None:
        made.start(either, device=5)
        found.append(current(recorder))

    assert in_a_thread(run) is None
    assert found == [0x200 + 5] and len(recorder.take()) == 2


@pytest.mark.parametrize(("name", "code"), [("cuDevicePrimaryCtxRetain", 2), ("cuCtxSetCurrent", 3)])
def test_a_context_that_cannot_be_made_current(
    either: Executor, recorder: Recorder, name: str, code: int
) -> None:
    recorder.stub.number("contexts").value = 0
    recorder.stub.fail(name, code)
    error = in_a_thread(lambda: call(make(launch("wide"))).start(either))
    assert isinstance(error, DriverError) and (error.call, error.code) == (name, code)
    assert not recorder.take()


def test_a_context_that_is_lost_is_no_missing_one(either: Executor, recorder: Recorder) -> None:
    """The same code from a launch is an error: launches ahead of it were made."""
    recorder.stub.fail("cuLaunchKernelEx", driver.NO_CONTEXT)
    with pytest.raises(DriverError, match="cuLaunchKernelEx"):
        call(make(Clear("a", "bytes"), launch("wide"))).start(either)
    assert len(recorder.take()) == 1


def current(recorder: Recorder) -> int | None:
    """The context of this thread."""
    context = ctypes.c_void_p()
    recorder.stub.library.cuCtxGetCurrent(ctypes.byref(context))
    return context.value


def test_the_context_of_xlas_stream_is_current_meanwhile(recorder: Recorder) -> None:
    native, here = recorder.executor("native").library, recorder.stub.driver()
    entered, inner, failure = ctypes.c_void_p(), ctypes.c_void_p(), _Failure()
    stream, why = ctypes.c_void_p(STREAM), ctypes.byref(failure)
    enter = stream, ctypes.byref(entered), why
    native.kdacore_leave.argtypes = [ctypes.c_void_p]
    assert current(recorder) is None
    assert native.kdacore_enter(*enter) == 0 and current(recorder) == 0x100
    assert native.kdacore_enter(stream, ctypes.byref(inner), why) == 0
    native.kdacore_leave(inner)  # it was current already, and stays so
    assert current(recorder) == 0x100
    native.kdacore_leave(entered)
    assert current(recorder) is None
    with here.context_of(STREAM) as found:
        assert found == STREAM and current(recorder) == 0x100
    assert current(recorder) is None
    for name, said in (("cuStreamGetCtx", b"cuStreamGetCtx"), ("cuCtxPushCurrent_v2", b"cuCtxPushCurrent")):
        recorder.stub.fail(name, 9)
        assert native.kdacore_enter(*enter) == 1
        assert (failure.kind, failure.status, failure.call) == (2, 9, said) and entered.value is None
        native.kdacore_leave(entered)
        assert current(recorder) is None


WILD = (
    *(
        -1,
        0,
        1,
        2,
        3,
        8,
        13,
        64,
        511,
        512,
        513,
        2**16,
        2**31 - 1,
        2**31,
        2**32,
        2**32 + 1,
        8 << 16,
        0xFF << 16,
    ),
    *(1 << 40, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**32), -(2**63), -(2**63) + 1),
)


def at_the_end_of_a_page(words: Any) -> tuple[Any, mmap.mmap]:
    """A copy behind which no memory can be read, and its memory."""
    size, page = words.nbytes, mmap.PAGESIZE
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    copied = np.frombuffer(memory, np.int64, len(words), whole - size)
    copied[:] = words
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert not libc.mprotect(copied.ctypes.data + size, page, 0), ctypes.get_errno()
    return copied, memory


def damaged(words: Any) -> Iterator[Any]:
    """The program cut short, and with each word changed in turn."""
    for length in range(len(words)):
        yield words[:length]
    for i, value in itertools.product(range(len(words)), WILD):
        if words[i] != value:
            yield np.concatenate([words[:i], [value], words[i + 1 :]])


@pytest.mark.parametrize("own", [False, True], ids=["numbers of the call", "numbers of its own"])
def test_damaged_programs_do_no_harm(recorder: Recorder, own: bool) -> None:
    """The native executor says what is wrong or makes launches; it reads nothing behind the program, and stays able to
    run others."""
    program = make(InPlace("c", "result", "bytes"), launch("wide"), Clear("a", "bytes"), launch("narrow"))
    made = call(program)
    if own:
        words = program.words("sm_90a", 90, 132, own=program.pack_numbers(GIVEN))[0]
        made = made._replace(words=words, values=made.values[:32])
    native, outcomes = recorder.executor("native"), set()
    made.start(native)
    want = recorder.take()
    for words in damaged(made.words):
        copied, memory = at_the_end_of_a_page(words)
        try:
            made._replace(words=copied).start(native)
            outcomes.add("launched")
        except (ProgramError, DriverError, DeviceMismatchError) as error:
            outcomes.add(type(error).__name__)
        recorder.take()
        del copied, memory
    assert outcomes == {"launched", "ProgramError", "DeviceMismatchError"}
    made.start(native)
    got = recorder.take()
    assert [x._replace(parameters=b"") if isinstance(x, Launched) else x for x in got] == [
        x._replace(parameters=b"") if isinstance(x, Launched) else x for x in want
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w[:7], "another version"),
        (lambda w: np.concatenate([[w[0] + 1], w[1:]]), "another version"),
        (lambda w: np.concatenate([w[:3], [2], w[4:]]), "its values"),
        (lambda w: np.concatenate([w[:7], [2], w[8:]]), "length of a step"),
        (lambda w: np.concatenate([w[:8], [9], w[9:]]), "an unknown step"),
        (lambda w: np.concatenate([w[:9], [1], w[10:]]), "length of a step"),
    ],
    ids=["short", "format", "arrays", "steps", "kind", "length"],
)
def test_wrong_programs_are_refused(either: Executor, change: Any, said: str) -> None:
    made = call(make(launch("narrow")))
    with pytest.raises(ProgramError, match=said):
        made._replace(words=change(made.words)).start(either)
    with pytest.raises(ProgramError, match="its values"):
        made._replace(values=made.values + bytes(8)).start(either)


@pytest.mark.parametrize("blocks", [-1, 2**31, 2**32 + 5])
def test_grids_that_no_device_has_are_refused(either: Executor, recorder: Recorder, blocks: int) -> None:
    """Rather than cut to 32 bits."""
    with pytest.raises(ProgramError, match=f"{blocks} blocks"):
        call(make(launch("narrow")), GIVEN | {"blocks": blocks}).start(either)
    assert not recorder.take()


@pytest.mark.parametrize("step", [Clear("a", "bytes"), InPlace("a", "b", "bytes")], ids=["clear", "copy"])
def test_negative_sizes_are_refused(either: Executor, recorder: Recorder, step: Step) -> None:
    with pytest.raises(ProgramError, match="-8 bytes"):
        call(make(step), GIVEN | {"bytes": -8}).start(either)
    assert not recorder.take()


def test_unknown_kernels_take_no_room(either: Executor, recorder: Recorder) -> None:
    """The native executor has room for 512."""
    made = call(make(launch("narrow")))
    at = programs.HEADER_WORDS + 2
    for identity in range(2000, 2600):
        changed = np.concatenate([made.words[:at], [identity], made.words[at + 1 :]])
        with pytest.raises(ProgramError, match=f"no machine code {identity:016x}"):
            either.start(changed, 0)(STREAM, made.values)
    made.start(either)
    assert len(recorder.take()) == 1


def test_kernels_for_which_there_is_no_room(recorder: Recorder) -> None:
    native = recorder.executor("native")
    for identity in range(1, 513):
        native.add_kernel(identity, b"12345678")
    with pytest.raises(MemoryError, match="no room for another kernel"):
        native.add_kernel(513, b"12345678")
    assert native.handle(512, "entry", 0, 0)
    with pytest.raises(ProgramError, match="too many kernels"):
        native.handle(513, "entry", 0, 0)


def test_more_devices_than_the_native_executor_counts(recorder: Recorder) -> None:
    native = recorder.executor("native")
    recorder.stub.number("device").value = 64
    with pytest.raises(DeviceMismatchError, match="more than 64 GPUs"):
        call(make(launch("narrow"))).start(native)
    with pytest.raises(DeviceMismatchError, match="more than 64 GPUs"):
        native.handle(1000, "narrow", 0, 64)


def test_steps_that_name_what_no_call_gives() -> None:
    with pytest.raises(ValueError, match="wide: no such fields: nothing"):
        make(launch("wide")._replace(fields={"nothing": "a"}))
    for fields in ({"a": "other"}, {"a": ("b", "other")}):
        with pytest.raises(ValueError, match="wide: no call gives other"):
            make(launch("wide")._replace(fields=fields))
    with pytest.raises(ValueError, match="no call gives rows"):
        make(launch("wide", grid="rows"))
    with pytest.raises(ValueError, match="no call gives rows"):
        make(Clear("a", "rows"))
    with pytest.raises(ValueError, match="count is a float32 here and an integer elsewhere"):
        make(launch("wide", scale="count"))
    for value in ("a", ("count", "offset")):
        with pytest.raises(ValueError, match="wide: negative has 32 bits, an address has 64"):
            make(launch("wide", negative=value))
    with pytest.raises(KeyError, match="blocks"):
        make(launch("narrow")).pack_numbers({"scale": 1.0})


def test_numbers_too_large_for_their_fields() -> None:
    """Those that a 32-bit field holds have that limit, whatever else they are used for."""
    program = make(launch("wide"))
    for name, value in (
        ("count", 2**31),
        ("negative", -(2**31) - 1),
        ("stride", 2**63),
        ("blocks", -(2**63) - 1),
    ):
        with pytest.raises(struct.error):
            program.pack_numbers(GIVEN | {name: value})
    assert program.pack_numbers(GIVEN | {"stride": 2**31})
    mixed = make(launch("wide", negative="stride"))
    for value in (2**31, -(2**31) - 1, GIVEN["stride"]):
        with pytest.raises(struct.error, match=f"stride: {value} is too large for a field of 32 bits"):
            mixed.pack_numbers(GIVEN | {"stride": value})
    for value in (2**31 - 1, -(2**31)):
        assert mixed.pack_numbers(GIVEN | {"stride": value})


def test_a_number_in_fields_of_both_widths(recorder: Recorder) -> None:
    (launched,) = both(recorder, call(make(launch("wide", stride="negative", unset="count"))))
    assert isinstance(launched, Launched)
    seen = dict(
        zip(
            [x for x, _ in PARAMS["wide"].fields],
            PARAMS["wide"].packer.unpack(launched.parameters),
            strict=True,
        )
    )
    assert seen["stride"] == seen["negative"] == -7 and seen["unset"] == seen["count"] == 2**31 - 1


def test_the_order_of_numbers_is_that_of_the_steps() -> None:
    """The same in every process: names in a set come in an order that differs between processes."""
    steps = Clear("a", "bytes"), launch("narrow"), launch("none", "no blocks"), Clear("b", "no bytes")
    assert make(*steps).numbers == ("scale", "bytes", "blocks", "no blocks", "no bytes")


def test_entries_have_a_longest_name() -> None:
    wrong = SizedKernel(kernel("narrow", "x" * 33), PARAMS["narrow"])
    with pytest.raises(ValueError, match="longer than 32 bytes"):
        make(Launch("narrow", wrong, "blocks")).words("sm_90a", 90, 132)


@pytest.fixture
def no_executor_yet(recorder: Recorder) -> Iterator[Recorder]:
    executor.executor.cache_clear()
    yield recorder
    executor.executor.cache_clear()


def lacking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The packaged executor, in a process whose driver lacks a function."""
    found = packaged_executors.find_executor()
    assert isinstance(found, Path)
    copied = Path(shutil.copy(found, folder / "executor.so"))
    monkeypatch.setattr(packaged_executors, "find_executor", lambda: copied)
    monkeypatch.setattr(NativeExecutor.__init__, "__defaults__", ("libm.so.6",))
    return "libm.so.6 has no cuCtxGetCurrent"


def no_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "executor.so").write_text("no library")
    monkeypatch.setattr(packaged_executors, "find_executor", lambda: folder / "executor.so")
    return "executor.so"


def not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(packaged_executors, "find_executor", lambda: "none for this test")
    return r"\(none for this test\)"


@pytest.mark.parametrize("why", [not_found, no_library, lacking])
def test_the_one_in_python_serves_with_a_warning(
    no_executor_yet: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: Any
) -> None:
    said = why(tmp_path, monkeypatch)
    with pytest.warns(PerformanceWarning, match=said):
        here = executor.executor()
    assert isinstance(here, PythonExecutor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert executor.executor() is here
    monkeypatch.setattr(executor, "_starts", {})
    made = call(make(launch("narrow")))
    executor.start_of(make(launch("narrow")), "sm_90a", 0)(STREAM, made.values)
    assert len(no_executor_yet.take()) == 1


def test_the_native_one_serves_without_a_warning(
    no_executor_yet: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = packaged_executors.find_executor()
    assert isinstance(found, Path)
    copied = Path(shutil.copy(found, tmp_path / "executor.so"))
    monkeypatch.setattr(packaged_executors, "find_executor", lambda: copied)
    monkeypatch.setattr(NativeExecutor.__init__, "__defaults__", (str(no_executor_yet.stub.path),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(executor.executor(), NativeExecutor)


def test_a_machine_without_a_driver_has_none(
    no_executor_yet: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No warning either: nothing is slow there. A driver that is installed later is found."""

    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    not_found(tmp_path, monkeypatch)
    with monkeypatch.context() as without, warnings.catch_warnings():
        without.setattr(driver, "driver", missing)
        warnings.simplefilter("error")
        with pytest.raises(OSError, match=r"libcuda\.so\.1"):
            executor.executor()
    with pytest.warns(PerformanceWarning):
        assert isinstance(executor.executor(), PythonExecutor)


def test_a_native_executor_that_was_not_opened_refuses(recorder: Recorder, tmp_path: Path) -> None:
    """As where the driver lacked a function."""
    native = recorder.executor("native")
    assert native.library.kdacore_open(b"libm.so.6", b"", 1) == b"libm.so.6 has no cuCtxGetCurrent"
    for wrong in (
        lambda: call(make(launch("narrow"))).start(native),
        lambda: native.handle(1000, "narrow", 0, 0),
    ):
        with pytest.raises(DeviceMismatchError, match="the driver was not opened"):
            wrong()
