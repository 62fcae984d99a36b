"""The xla backend behind the front end, under JAX's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, build, error

import kdacore
from kdacore import device
from kdacore.oracle.recurrence import oracle_backward, oracle_forward
from kdacore.types import Device, OutputGrads

CASE = Case(B=2, T=70, K=16, V=16, H=1, HV=2, gate="softplus", initial=False)
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


def arrays() -> dict[str, Any]:
    inputs = build(CASE)[1]
    return {n: jnp.asarray(getattr(inputs, n)) for n in NAMES}


def call(x: dict[str, Any], **options: Any) -> Any:
    return kdacore.chunk_kda(
        **x,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        backend="xla",
        output_final_state=True,
        **options,
    )


def loss(x: dict[str, Any]) -> Any:
    o, state = call(x)
    return jnp.sum(o * jnp.cos(jnp.arange(o.size).reshape(o.shape))) + jnp.sum(state)


@pytest.fixture(scope="module")
def want() -> dict[str, Any]:
    """Oracle outputs and gradients of :func:`loss`."""
    request, inputs = build(CASE)
    out = oracle_forward(request, inputs)
    do = np.cos(np.arange(out.o.size).reshape(out.o.shape))
    return {
        "out": out,
        "grads": oracle_backward(request, inputs, OutputGrads(do, np.ones(out.final_state.shape))),
    }


def check_grads(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name in NAMES:
        assert error(got[name], getattr(want["grads"], name)) < 5e-5, name


def test_jit_and_grad(want: dict[str, Any]) -> None:
    o, state = jax.jit(call)(arrays())
    assert error(o, want["out"].o) < 2e-5
    assert error(state, want["out"].final_state) < 2e-5
    check_grads(jax.jit(jax.grad(loss))(arrays()), want)


def test_eager_grad_and_checkpoint(want: dict[str, Any]) -> None:
    check_grads(jax.grad(jax.checkpoint(loss))(arrays()), want)


def test_vmap_of_grad(want: dict[str, Any]) -> None:
    x = arrays()
    shared = {n: x.pop(n) for n in ("A_log", "dt_bias")}
    each = jax.vmap(lambda row: call({**{n: a[None] for n, a in row.items()}, **shared})[0][0])(x)
    assert error(each, want["out"].o) < 2e-5


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_shard_map_over_the_batch(want: dict[str, Any], check_vma: bool) -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))
    row = P("data", None, None)
    specs = dict.fromkeys(("q", "k", "v", "g", "beta"), row) | {"A_log": P(), "dt_bias": P()}

    def local(x: dict[str, Any]) -> Any:
        return jax.lax.psum(loss_rows(x), "data")

    def loss_rows(x: dict[str, Any]) -> Any:
        o, state = call(x)
        first = jax.lax.axis_index("data") * o.size
        return jnp.sum(o * jnp.cos(first + jnp.arange(o.size).reshape(o.shape))) + jnp.sum(state)

    total = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma)
    check_grads(jax.jit(jax.grad(total))(arrays()), want)


@pytest.mark.exhaustive
def test_second_derivatives() -> None:
    """What works and what does not, as docs/guide/jax.md says; where it fails, it does so while tracing."""
    x = {n: a[:, :3] if n in NAMES[:5] else a for n, a in arrays().items()}
    q, v = x.pop("q"), x["v"]

    def chunk(q: Any) -> Any:
        return loss({**x, "q": q})

    def recurrent(q: Any) -> Any:
        return jnp.sum(kdacore.fused_recurrent_kda(**x, q=q, use_gate_in_kernel=True)[0])

    def packed_pool(pool: Any) -> Any:
        row = {n: a[:1] if n in NAMES[:5] else a for n, a in {**x, "q": q}.items()}
        options = {"inplace_state": True, "output_final_state": True, "use_gate_in_kernel": True}
        rows = {"state_indices": jnp.array([1]), "cu_seqlens": jnp.array([0, 3])}
        return jnp.sum(kdacore.fused_recurrent_kda(**row, initial_state=pool, **rows, **options)[1])

    def twice(f: Any) -> Any:
        return jax.grad(lambda q: jnp.sum(jax.grad(f)(q) ** 2))

    for f in (chunk, recurrent):
        jax.eval_shape(lambda q, f=f: jax.jvp(jax.grad(f), (q,), (q,)), q)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(recurrent, (q,), (q,))
    jax.eval_shape(twice(recurrent), q)
    with pytest.raises(ValueError, match="while_loop"):
        jax.eval_shape(twice(chunk), q)
    with pytest.raises(ValueError, match="while_loop"):
        jax.eval_shape(jax.grad(packed_pool), jnp.zeros((2, v.shape[2], q.shape[-1], v.shape[-1])))


def test_traced_cu_seqlens() -> None:
    request, inputs = build(Case(lengths=(3, 0, 70, 20), K=16, V=16))

    @jax.jit
    def run(cu: Any) -> Any:
        x = {n: jnp.asarray(getattr(inputs, n)) for n in ("q", "k", "v", "g", "beta", "initial_state")}
        return kdacore.chunk_kda(**x, cu_seqlens=cu, use_qk_l2norm_in_kernel=True, output_final_state=True)

    o, state = run(jnp.asarray(inputs.cu_seqlens))
    want = oracle_forward(request, inputs)
    assert error(o, want.o) < 2e-5
    assert error(state, want.final_state) < 2e-5


def test_x64_mode(want: dict[str, Any]) -> None:
    """Where Python's integers have 64 bits, and those that count segments 32."""
    inputs = build(Case(lengths=(3, 0, 70), K=16, V=16, gate="softplus", initial=False))[1]
    pack = {n: jnp.asarray(getattr(inputs, n)) for n in (*NAMES, "cu_seqlens")}
    with jax.enable_x64(True):
        o, state = call(arrays())
        assert error(o, want["out"].o) < 2e-5 and state.dtype == "float32"
        pack["cu_seqlens"] = pack["cu_seqlens"].astype("int64")
        for x in (arrays(), pack):
            grads = jax.eval_shape(jax.grad(loss, allow_int=True), x)  # what went wrong did so while tracing
            assert all(grads[n].dtype == "float32" for n in NAMES)


def test_contract_errors_under_jit_name_the_argument() -> None:
    x = arrays()
    with pytest.raises(kdacore.ContractError, match="'beta'"):
        jax.jit(call)({**x, "beta": x["beta"][:, 1:]})


def test_the_device_of_a_traced_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a traced call is that of its concrete arrays; without any, the caller's
    default."""
    monkeypatch.setattr(device, "jax_device", lambda d: Device("tpu", d.id, "v5e"))
    x = jax.device_put(arrays(), jax.devices()[1])
    traced = {n: x.pop(n) for n in ("q", "A_log")}
    other = jax.device_put(x["v"], jax.devices()[2])
    with kdacore.record_selections() as ran:
        jax.eval_shape(jax.grad(lambda y: loss({**x, **y})), traced)
        jax.eval_shape(lambda y: call({**x, **y}), traced)
        with jax.default_device(jax.devices()[3]):
            jax.eval_shape(lambda y: call(y), {**x, **traced})  # a function JAX has not traced before
        monkeypatch.setattr(jax, "local_devices", lambda backend=None: [jax.devices()[2]])
        jax.eval_shape(lambda y: call(y), {**x, **traced})
        with pytest.raises(kdacore.ContractError, match="'v'.*on tpu:2.*on tpu:1.*as k is"):
            jax.eval_shape(lambda y: call({**x, **y, "v": other}), traced)
    assert [s.request.device.index for s in ran] == [1, 1, 3, 2]


def test_the_device_of_a_call_on_a_mesh_of_others() -> None:
    """Of a mesh that describes its devices, wherever the program is traced."""
    found = []
    for kind, platform in (
        ("TPU v6 lite", "tpu"),
        ("cpu", "cpu"),
        ("NVIDIA H200", "cuda"),
        ("NVIDIA H100 80GB HBM3", "gpu"),
        ("NVIDIA of the future", "cuda"),
        ("of the future", ""),
    ):
        described = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
        mesh = AbstractMesh((2,), ("data",), abstract_device=described)

        def local(x: Any) -> Any:
            found.append(kdacore.explain("kda_gate", x, lower_bound=-5.0).request.device)
            return x

        run = jax.shard_map(local, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
        jax.eval_shape(run, jax.ShapeDtypeStruct((2, 8, 1, 8), jnp.float32))
    cpu = Device("cpu")  # what is not known is taken for the default device
    hopper = Device("cuda", 0, "sm_90")
    assert found == [Device("tpu", 0, "v6e"), cpu, hopper, hopper, cpu, cpu]


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_explicit_meshes_are_refused_by_name(backend: str) -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    assert mesh.axis_types == (AxisType.Explicit,)
    x = {n: a for n, a in arrays().items() if n in NAMES[:5]}

    def run(x: dict[str, Any]) -> Any:
        return kdacore.fused_recurrent_kda(**x, backend=backend)[0]

    for spec, what in ((P("data"), "split over"), (P(), "outside jax.set_mesh")):
        split = jax.device_put(x, NamedSharding(mesh, spec))
        for function in (run, jax.jit(run), jax.grad(lambda x: run(x).sum())):
            with pytest.raises(kdacore.ContractError, match=f"'q'.*{what}.*shard_map.*AxisType.Auto"):
                function(split)
    with jax.set_mesh(mesh):
        kdacore.explain("fused_recurrent_kda", **split)
    with pytest.raises(kdacore.ContractError, match="outside jax.set_mesh"):
        run(split)
    gate = kdacore.kda_gate(jax.device_put(x["g"], NamedSharding(mesh, P("data"))), A_log=jnp.zeros(2))
    assert gate.sharding.spec[0] == "data"


def test_remedies_for_explicit_meshes() -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows = P("data")
    x = {n: a for n, a in arrays().items() if n in NAMES[:5]} | {"beta": jnp.full((2, 70, 2), 0.5)}
    split = jax.device_put(x, NamedSharding(mesh, rows))

    def run(x: dict[str, Any]) -> Any:
        return kdacore.fused_recurrent_kda(
            **x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0
        )[0]

    want = run(x)
    with jax.set_mesh(mesh):
        assert error(jax.jit(run)(x), want) < 1e-6
        assert error(jax.jit(jax.sharding.auto_axes(run, out_sharding=rows))(split), want) < 1e-6
    manual = jax.shard_map(run, mesh=mesh, in_specs=(rows,), out_specs=rows)
    assert error(jax.jit(manual)(split), want) < 1e-6
    auto = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    assert error(run(jax.device_put(x, NamedSharding(auto, rows))), want) < 1e-6


def test_auto_chooses_xla_for_traced_jax() -> None:
    with kdacore.record_selections() as chosen:
        jax.jit(lambda x: kdacore.kda_gate(x["g"], A_log=x["A_log"]))(arrays())
    assert chosen[-1].backend == "xla"
