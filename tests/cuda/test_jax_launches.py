"""What calls from JAX hand to the driver, and what becomes of errors, through both handlers."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cuda_calls import MODEL, request_of
from emulated_backend import HOPPER
from jax.sharding import AbstractDevice, AbstractMesh
from jax_emulation import Device

import kdacore
from kdacore.errors import UnsupportedError
from kdacore.types import ChunkInputs, OutputGrads, RecurrentInputs, Request
from kdacore_cuda import unsupported_calls
from kdacore_cuda.build import packaged_cubins
from kdacore_cuda.forms.fused import launches as fused
from kdacore_cuda.jax import backward as jax_backward
from kdacore_cuda.jax import forward as jax_forward
from kdacore_cuda.jax import xla_handler
from kdacore_cuda.kernel_parameters import CHUNK_FORWARD
from kdacore_cuda.runtime import device_figures, executor
from kdacore_cuda.runtime import program as programs
from kdacore_cuda.runtime.program import Clear, InPlace, Launch, Program
from kdacore_cuda.runtime.python_executor import PythonExecutor

pytestmark = pytest.mark.quick
register_handler = xla_handler.register  # which the fixtures replace

B, T, H, K = 1, 40, 2, 128


def arrays(B: int = B, T: int = T, H: int = H, K: int = K) -> dict[str, Any]:
    tokens = {n: jnp.zeros((B, T, H, K), jnp.bfloat16) for n in ("q", "k", "v", "g")}
    more = {"A_log": jnp.zeros(H), "dt_bias": jnp.zeros((H, K))}
    return {**tokens, "beta": jnp.zeros((B, T, H), jnp.bfloat16), **more}


def call(x: dict[str, Any], op: str = "chunk_kda", **more: Any) -> Any:
    positional = [x[n] for n in ("q", "k", "v", "g", "beta")]
    keywords = {n: a for n, a in x.items() if n not in ("q", "k", "v", "g", "beta")}
    return getattr(kdacore, op)(*positional, **keywords, **MODEL, **{"backend": "emulated", **more})


def run(x: dict[str, Any], **more: Any) -> Any:
    return jax.block_until_ready(jax.jit(lambda x: call(x, **more))(x))


def test_parameters_are_those_of_the_plan(either_handler: Device) -> None:
    run(arrays(H=30), output_final_state=True)
    (launched,) = either_handler.launched
    specs = ChunkInputs(
        **{n: torch.zeros(a.shape, dtype=getattr(torch, a.dtype.name)) for n, a in arrays(H=30).items()}
    )
    request = request_of("chunk_kda", specs, **MODEL, output_final_state=True)
    launches = fused.launches_of(dataclasses.replace(request, kind="jax", device=HOPPER))
    (step,) = launches.program.steps
    assert isinstance(step, Launch)
    kernel, numbers = step.kernel, launches.numbers
    assert (launched.grid, launched.threads, launched.shared) == (
        *(numbers["blocks"], *kernel.block("sm_90a")),
    )
    assert launched.kernel is kernel.source and launched.overlaps
    got = dict(zip((name for name, _ in CHUNK_FORWARD.fields), launched.values, strict=True))
    want = {name: numbers[name] for name, kind in CHUNK_FORWARD.fields if kind != "ptr" and name != "launch"}
    assert {n: got[n] for n in want} == {n: pytest.approx(x) for n, x in want.items()}
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "o", "ht"):
        assert got[name]
    for name in ("h0", "cu_seqlens", "ckpt", "reads", "writes", "mark_states"):
        assert not got[name]


def test_every_call_has_a_launch_number_of_its_own(either_handler: Device) -> None:
    step = jax.jit(lambda x: call(x))
    for _ in range(3):
        jax.block_until_ready(step(arrays(H=30)))
    at = [name for name, _ in CHUNK_FORWARD.fields].index("launch")
    numbers = [x.values[at] for x in either_handler.launched]
    assert len(set(numbers)) == 3 and min(numbers) > 0


def test_kernels_are_loaded_once(either_handler: Device) -> None:
    step = jax.jit(lambda x: call(x, lower_bound=-4.0, safe_gate=True))
    jax.block_until_ready(step(arrays()))
    loads, limits = (either_handler.number(name).value for name in ("loads", "limits"))
    for _ in range(3):
        jax.block_until_ready(step(arrays()))
    assert (either_handler.number("loads").value, either_handler.number("limits").value) == (loads, limits)


def test_unused_rows_of_checkpoints_are_cleared(either_handler: Device) -> None:
    x = arrays() | {"cu_seqlens": jnp.array([0, 40], jnp.int32)}
    _, _, checkpoints = run(x, checkpoint_every=64, output_final_state=True)
    assert checkpoints.shape == (1, H, K, K) and not checkpoints.any()


def test_a_refused_launch(either_handler: Device) -> None:
    either_handler.stub.fail("cuLaunchKernelEx")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_STUB \(3\)"):
        run(arrays())


@pytest.mark.parametrize(
    ("device", "name", "value", "text"),
    [
        (5, "multiprocessors", 100, "132 multiprocessors, but GPU 5 is sm_90 with 100"),
        (6, "capability", 103, "compiled for sm_90 with 132 multiprocessors, but GPU 6 is sm_103"),
    ],
)
def test_a_device_of_another_kind(
    either_handler: Device, device: int, name: str, value: int, text: str
) -> None:
    """Of several in a process, say: grids were planned for the first."""
    either_handler.number("device").value = device
    either_handler.number(name).value = value
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(arrays())
    assert not either_handler.launched


def test_a_second_device_of_the_same_kind(either_handler: Device) -> None:
    run(arrays())
    loads, limits = (either_handler.number(name).value for name in ("loads", "limits"))
    either_handler.number("device").value = 7
    run(arrays())
    assert either_handler.number("loads").value == loads  # code is loaded for all, limits are set for each
    assert either_handler.number("limits").value == limits + 2
    assert len(either_handler.launched) == 4


def custom_call(words: Any, *given: Any) -> Any:
    result = jax.ShapeDtypeStruct((4,), jnp.float32)
    made = jax.ffi.ffi_call(xla_handler.TARGET, result, vmap_method="sequential")
    return jax.block_until_ready(made(*given, program=words))


NUMBERS = {"all": 16, "half": 8, "one": 1}


def words(*steps: Any, arguments: int = 0) -> Any:
    """The program of a call with arguments x0, x1, ... and the result y, all of 16 bytes."""
    names = [f"x{i}" for i in range(arguments)]
    program = Program(steps, [*names, "y"], tuple(NUMBERS))
    return program.words("sm_90a", 90, 132, names, ["y"], own=program.pack_numbers(NUMBERS))[0]


def test_memory_is_cleared(either_handler: Device) -> None:
    assert not custom_call(words(Clear("y", "all"))).any()


def test_an_argument_in_other_memory_than_its_result_is_copied(either_handler: Device) -> None:
    """As XLA hands over slices of larger arrays: what a launch is to change in place is in the result then, and
    later steps find it there."""
    x = jnp.arange(1.0, 5.0)
    assert (custom_call(words(InPlace("x0", "y", "all"), arguments=1), x) == x).all()
    cleared = custom_call(words(InPlace("x0", "y", "all"), Clear("x0", "half"), arguments=1), x)
    assert cleared.tolist() == [0.0, 0.0, 3.0, 4.0]
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[:3],
        lambda w: np.concatenate([w[:0], [w[0] + 1], w[1:]]),
        lambda w: np.concatenate([w[:3], [1], w[4:]]),
        lambda w: w.astype(np.int32),
        lambda w: np.concatenate([w[:6], [0], w[7:]]),
    ],
    ids=["short", "format", "arrays", "dtype", "numbers of its own"],
)
def test_programs_of_another_version_are_refused(either_handler: Device, change: Any) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="another version of kdacore, or is damaged"):
        custom_call(change(words(Clear("y", "all"))))


def test_kernels_that_were_never_added_are_read_from_the_package(either_handler: Device) -> None:
    """As those of a program that was exported elsewhere."""
    rows = packaged_cubins.CUBINS.rows()
    name, row = next((n, r) for n, r in rows.items() if n.startswith("sums") and n.endswith("sm_90a"))
    either_handler.raw.clear()
    custom_call(one_launch(int(row["file"][:16], 16), b"sums"))
    (handle,) = either_handler.raw
    assert handle.to_bytes(8, "little")[:4] == b"\x7fELF", name


def one_launch(identity: int, entry: bytes) -> Any:
    """The program that launches one block of 32 threads, with parameters of 8 bytes."""
    kernel = [programs.KERNEL, programs.KERNEL_WORDS + 1, *np.array([identity], np.uint64).view(np.int64)]
    blocks = 2  # the number of the value: behind the launch number and the result
    step = [*kernel, *np.frombuffer(entry.ljust(32, b"\0"), np.int64), blocks, 32, 0, 0, 8, 0, 0]
    header = [programs.MAGIC << 8 | programs.FORMAT, 90, 132, 0, 1, 1, 1, 1]
    return np.array([*header, 1, *step], np.int64)


def test_kernels_of_another_version_are_refused(either_handler: Device) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="no machine code 0000000000001234"):
        custom_call(one_launch(0x1234, b"sums"))


def test_the_handler_launches_by_the_executor_of_the_process(
    from_jax: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which knows the kernels of eager calls, and has warned where it is the one in Python. XLA is told once."""
    told: list[str] = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: told.append(name))
    for here in (from_jax.stub.native_executor(), PythonExecutor(from_jax.stub.driver())):
        monkeypatch.setattr(executor, "executor", lambda here=here: here)
        monkeypatch.setattr(xla_handler, "_registered", [])
        assert [register_handler() for _ in range(2)] == [here, here]
    assert told == [xla_handler.TARGET] * 2


def _request(op: str = "fused_recurrent_kda", **options: Any) -> Request:
    inputs = RecurrentInputs if op != "chunk_kda" else ChunkInputs
    return request_of(op, inputs(**arrays()), **MODEL, **options)


def lowered(function: Any, *given: Any) -> str:
    return str(jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text())


def test_lowering_for_a_gpu_on_a_machine_without_one() -> None:
    """The forward is one custom call, the backward are two; a pool is its own result."""
    request = dataclasses.replace(_request("chunk_kda"), device=HOPPER, kind="jax")
    given = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays().items()}
    text = lowered(lambda x: jax_forward.forward(request, ChunkInputs(**x)).o, given)
    assert text.count(f"custom_call @{xla_handler.TARGET}(") == 1 and "output_operand_alias" not in text
    text = lowered(lambda x: jax_backward.backward(request, ChunkInputs(**x), (), OutputGrads(x["v"])), given)
    assert text.count(f"custom_call @{xla_handler.TARGET}(") == 2

    given = {
        n: jax.ShapeDtypeStruct((B, 1, *a.shape[2:]) if n in "qkvg beta" else a.shape, a.dtype)
        for n, a in given.items()
    }
    given |= {"initial_state": jax.ShapeDtypeStruct((5, H, K, K), jnp.float32)}
    given |= {"state_indices": jax.ShapeDtypeStruct((B,), jnp.int32)}
    concrete = RecurrentInputs(**{n: jnp.zeros(a.shape, a.dtype) for n, a in given.items()})
    options = MODEL | {"inplace_state": True, "output_final_state": True}
    request = dataclasses.replace(request_of("fused_recurrent_kda", concrete, **options), device=HOPPER)
    text = lowered(lambda x: jax_forward.forward(request, RecurrentInputs(**x)), given)
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 7" in text


def test_torch_is_not_needed() -> None:
    """Neither to plan a call from JAX, nor to lower it."""
    code = "\n".join(
        [
            "import sys",
            "sys.modules['torch'] = None",
            f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
            "import jax, jax.numpy as jnp",
            "from kdacore.types import ChunkInputs, Device, OutputGrads, Request, TensorSpec",
            "from kdacore_cuda.forms.slices import functions as slices",
            "from kdacore_cuda.jax import backward as jax_backward, forward as jax_forward",
            "x = {n: jax.ShapeDtypeStruct((1, 70, 2, 128), jnp.bfloat16) for n in 'qkvg'}",
            "x['beta'] = jax.ShapeDtypeStruct((1, 70, 2), jnp.bfloat16)",
            "hopper = Device('cuda', 0, 'sm_90')",
            "r = Request('chunk_kda', 'jax', hopper, 1, 70, 2, 2, 128, 128, 1, 'bfloat16', 'float32',",
            "  tuple((n, TensorSpec(a.shape, a.dtype.name)) for n, a in x.items()))",
            "def f(x):",
            "  o = jax_forward.forward(r, ChunkInputs(**x)).o",
            "  cut, s, g = slices.slice_functions(r), jnp.zeros((1, 2, 128, 128)), OutputGrads(o)",
            "  begun = cut.begin(r, ChunkInputs(**x), None)",
            "  out = cut.finish(r, ChunkInputs(**x), begun.pending, s)",
            "  d, pending = cut.backward_begin(r, ChunkInputs(**x), (), g, s, None)",
            "  found = cut.backward_finish(r, ChunkInputs(**x), (), pending, g, s, s)",
            "  return o, jax_backward.backward(r, ChunkInputs(**x), (), g), begun.M, out.o, d, found",
            "text = jax.jit(f).trace(x).lower(lowering_platforms=('cuda',)).as_text()",
            "assert text.count('custom_call @kdacore_cuda') == 3 + 5",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_calls_are_differentiated_by_whom_has_a_backward(from_jax: Device) -> None:
    """The recurrent ops have none here. Traced only: that compiles nothing."""
    x, op = arrays(), "fused_recurrent_kda"
    with kdacore.use_backend("emulated"), kdacore.record_selections() as ran:
        jax.make_jaxpr(lambda x: call(x, op, backend=None))(x)
        jax.make_jaxpr(jax.grad(lambda x: call(x, op, backend=None)[0].astype(jnp.float32).sum()))(x)
    assert [s.backend for s in ran] == ["emulated", "emulated", "xla"]


def test_a_forced_backend_refuses_to_be_differentiated(either_handler: Device) -> None:
    x, op = arrays(K=64), "fused_recurrent_kda"
    run(x, op=op)
    with pytest.raises(UnsupportedError, match=r"\[gradients\]"):
        jax.jit(jax.grad(lambda x: call(x, op=op)[0].astype(jnp.float32).sum()))(x)


def test_an_unknown_version_of_xlas_interface_is_declined(
    either_handler: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unsupported_calls._xla_version() in unsupported_calls.XLA_VERSIONS
    monkeypatch.setattr(unsupported_calls, "_xla_version", lambda: (1, 0))
    with pytest.raises(UnsupportedError, match=r"XLA FFI 1\.0; wanted XLA FFI 0\.3"):
        run(arrays(T=41))


def test_export_for_a_gpu_that_is_not_here() -> None:
    """Within a mesh that describes a Hopper GPU automatic choice takes these kernels, with gradients, and the programs
    are those of the packaged machine code."""
    chip = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    x = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays().items()}
    allowed = [jax.export.DisabledSafetyCheck.custom_call(xla_handler.TARGET)]

    def both(x: dict[str, Any]) -> Any:
        return jax.value_and_grad(lambda x: call(x, backend=None)[0].astype(jnp.float32).sum())(x)

    def exported() -> str:
        made = jax.export.export(jax.jit(both), platforms=["cuda"], disabled_checks=allowed)(x)
        return str(made.mlir_module())

    mesh = AbstractMesh((1,), ("one",), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh), kdacore.record_selections() as chosen:
        program = exported()
    assert {(s.backend, s.request.device.arch) for s in chosen} == {("cuda", "sm_90")}
    assert program.count(f"@{xla_handler.TARGET}(") == 3  # forward, and the two of the backward
    if not any(d.platform == "gpu" for d in jax.local_devices()):
        assert xla_handler.TARGET not in exported()


def test_sizes_that_are_symbols_are_declined() -> None:
    (symbol,) = jax.export.symbolic_shape("b")
    reason = unsupported_calls.known_sizes(dataclasses.replace(_request(), B=symbol, N=symbol))
    assert reason is not None and reason.code == "traced"
    assert unsupported_calls.grid_size(dataclasses.replace(_request(), B=symbol, N=symbol)) is None


def test_devices_are_counted_as_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdacore_cuda.jax import devices as jax_devices

    class Gpu:
        id, local_hardware_id, core_count = 9, 1, 148

    monkeypatch.setattr(jax_devices, "_local_devices", lambda: [Gpu()])

    class Driver:
        def memory_rate(self, device: int) -> int:
            return 10**12 * (1 + device)

    monkeypatch.setattr(jax_devices, "driver", Driver)
    functions = (jax_devices.ordinal, jax_devices.multiprocessors, jax_devices.memory_rate)
    for function in functions:
        function.cache_clear()
    assert jax_devices.ordinal(9) == 1 and jax_devices.multiprocessors(1) == 148
    assert jax_devices.memory_rate(1) == 2 * 10**12
    assert jax_devices.memory_rate(0) == 0  # as where a program is exported: no such device
    there = dataclasses.replace(_request(), device=dataclasses.replace(HOPPER, index=9))
    assert device_figures.planned(there).device.index == 1
    for function in functions:
        function.cache_clear()


def test_the_guide_names_the_target_that_exports_allow() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "jax.md"
    assert {*re.findall(r"kdacore_cuda\.launch\.\w+", guide.read_text())} == {xla_handler.TARGET}
