"""The fused chunk forward kernel, emulated on the CPU, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import emulator
import numpy as np
import pytest
import torch
from cuda_calls import (
    BOUNDED_MODEL,
    MODEL,
    O_BOUND,
    STATE_BOUND,
    Draw,
    check_outputs,
    error,
    oracle,
    request_of,
)
from form_calls import launches_of

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.build.kernel_source import EVERY_LANE
from kdacore_cuda.choice import (
    Figures,
    choose_clusters,
    cluster_size,
    own_spacing,
    portable_cluster_size,
    prepared_share,
    preparing_clusters,
    resident_clusters,
)
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.fused.workspace import prepared_steps_bytes, spaced_steps_bytes
from kdacore_cuda.kernel_parameters import LEAST_SPACING, MOST_SPACING
from kdacore_cuda.runtime import device_figures, torch_launch


def device(arch: str, multiprocessors: int) -> Figures:
    """Of which nothing else is known."""
    return Figures(arch, multiprocessors, lambda cluster: 0, lambda: 0.0)


H100 = device("sm_90a", 132)
SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors, the fused kernel for sm_90a, two blocks a cluster unless a test says otherwise."""
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    use_cluster(monkeypatch, 2)


def use_cluster(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for name in ("cluster_size", "portable_cluster_size"):
        monkeypatch.setattr(choice, name, lambda *given: size)


def draw(
    B: int, T: int, H: int = 1, HV: int = 1, K: int = 128, *, gate: str = "random", seed: int = 0, **more: Any
) -> Any:
    d = Draw(seed)
    raw = gate in ("random", "init")
    make = d.normal if raw else d.unit
    fields = {
        "q": make(B, T, H, K),
        "k": make(B, T, H, K),
        "v": d.normal(B, T, HV, K),
        "beta": d.normal(B, T, HV) if raw else d.uniform(B, T, HV),
        **d.gate(gate, B, T, HV, K),
        **more,
    }
    return ChunkInputs(**fields)


def run(inputs: ChunkInputs, **options: Any) -> Outputs:
    return chunk_forward.forward(request_of("chunk_kda", inputs, **options), inputs)


def check(inputs: ChunkInputs, loose: float = 2.0, **options: Any) -> Outputs:
    """Run, compare with the oracle, return what was computed. Short sequences: the contract's hard-case factor."""
    request = request_of("chunk_kda", inputs, **options)
    want = oracle(request, inputs)
    got = chunk_forward.forward(request, inputs)
    check_outputs(got, want, loose)
    return got


@pytest.mark.exhaustive
@pytest.mark.parametrize(("K", "cluster"), [(64, 1), (128, 2), (128, 4)])
def test_every_lane_arriving_changes_no_bit(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, K: int, cluster: int
) -> None:
    """The kernels that racecheck can follow are those that ship, but for how often barriers are told."""
    use_cluster(monkeypatch, cluster)
    inputs = draw(2, 200, K=K)
    want = run(inputs, **BOUNDED_MODEL, output_final_state=True)
    monkeypatch.setenv(EVERY_LANE, "1")
    got = run(inputs, **BOUNDED_MODEL, output_final_state=True)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.final_state, want.final_state)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("K", "cluster"), [(64, 1), (128, 2), (128, 4)])
@pytest.mark.parametrize("gate", ["random", "init", "fast", "slow"])
def test_bounded_gates(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, K: int, cluster: int, gate: str
) -> None:
    use_cluster(monkeypatch, cluster)
    options = BOUNDED_MODEL if gate in ("random", "init") else SAFE_LOG
    check(draw(1, 100, K=K, gate=gate), output_final_state=True, **options)
    assert "BOUNDED1" in emulated[0]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("K", "cluster"), [(64, 1), (128, 2), (128, 4)])
@pytest.mark.parametrize("gate", ["random", "init", "fast", "slow", "mixed"])
def test_unbounded_gates(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, K: int, cluster: int, gate: str
) -> None:
    use_cluster(monkeypatch, cluster)
    options = MODEL if gate in ("random", "init") else {}
    check(draw(1, 100, K=K, gate=gate), output_final_state=True, **options)
    assert "BOUNDED0" in emulated[0]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(
    ("arch", "K", "cluster"),
    [("sm_80", 64, 1), ("sm_80", 128, 1), ("sm_100f", 128, 2), ("sm_100f", 128, 4)],
)
def test_other_architectures(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, arch: str, K: int, cluster: int, bounded: bool
) -> None:
    monkeypatch.setattr(device_figures, "build_arch", lambda name: arch)
    use_cluster(monkeypatch, cluster)
    check(draw(1, 70, K=K), output_final_state=True, **(BOUNDED_MODEL if bounded else MODEL))
    assert "WARPGROUP0" in emulated[0]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("arch", "K", "cluster"), [("sm_80", 64, 1), ("sm_100f", 128, 2), ("sm_90a", 128, 2), ("sm_90a", 128, 4)]
)
@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "unbounded"])
def test_the_slowest_gates_decay(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, arch: str, K: int, cluster: int, bounded: bool
) -> None:
    """A token's decay rounds to 1, and a chunk's log decay of 6e-7 would vanish beside the offset that keeps factors in
    range. Without beta a state only decays; none of that may be lost over a million tokens."""
    monkeypatch.setattr(device_figures, "build_arch", lambda name: arch)
    use_cluster(monkeypatch, cluster)
    T, step = 1024, -2e-8
    state = torch.ones(1, 1, K, K)
    inputs = draw(1, T, K=K, gate="slow", initial_state=state)
    inputs = inputs._replace(g=torch.full_like(inputs.g, step), beta=torch.zeros_like(inputs.beta))
    got = run(inputs, output_final_state=True, **(SAFE_LOG if bounded else {}))
    decayed = 1 - got.final_state
    assert torch.allclose(decayed, torch.full_like(decayed, -np.expm1(T * step)), rtol=0.1, atol=0)


@pytest.mark.every_other
@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("size", [1e-4, 1e6])
def test_keys_and_queries_of_any_size(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, cluster: int, size: float
) -> None:
    """They are normalised, but their products with the decays are not."""
    use_cluster(monkeypatch, cluster)
    inputs = draw(1, 100, gate="fast")
    inputs = inputs._replace(q=inputs.q * size, k=inputs.k * size)
    check(inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, **SAFE_LOG)


@pytest.mark.parametrize(("K", "cluster"), [(64, 1), (128, 2), (128, 4)])
def test_longer_than_two_rings(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, K: int, cluster: int
) -> None:
    """A stage's barrier alternates between two phases: a warp a whole ring ahead must not mistake one for the other."""
    use_cluster(monkeypatch, cluster)
    check(draw(1, 450 if K == 128 else 700, K=K), 1.0, output_final_state=True, **BOUNDED_MODEL)


@pytest.mark.parametrize(("K", "cluster"), [(64, 1), (128, 4)])
def test_packs_of_hard_lengths(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, K: int, cluster: int
) -> None:
    use_cluster(monkeypatch, cluster)
    lengths = [0, 1, 15, 16, 17, 0, 63, 64, 65]
    for index in (torch.int32, torch.int64):
        cu = torch.tensor(np.cumsum([0, *lengths]), dtype=index)
        inputs = draw(1, sum(lengths), K=K, cu_seqlens=cu, initial_state=torch.randn(len(lengths), 1, K, K))
        got = check(inputs, output_final_state=True, checkpoint_every=64, **BOUNDED_MODEL)
        assert torch.equal(got.final_state[0], inputs.initial_state[0])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states(emulated: list[str], v_first: bool, dtype: torch.dtype) -> None:
    state = torch.randn(2, 2, 128, 128).to(dtype)
    inputs = draw(2, 100, 1, 2, initial_state=state)
    got = check(inputs, output_final_state=True, checkpoint_every=64, state_v_first=v_first, **BOUNDED_MODEL)
    assert got.final_state.dtype == dtype


def test_grouped_values_and_strides(emulated: list[str]) -> None:
    wide = torch.randn(1, 40, 2, 3 * 128).to(torch.bfloat16)
    inputs = draw(1, 40, 2, 4)._replace(q=wide[..., :128], k=wide[..., 256:])
    check(inputs, **BOUNDED_MODEL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gate_and_beta_dtypes(emulated: list[str], dtype: torch.dtype) -> None:
    inputs = draw(1, 40)
    inputs = inputs._replace(
        g=inputs.g.to(dtype), beta=inputs.beta.to(dtype), dt_bias=inputs.dt_bias.to(dtype)
    )
    check(inputs, allow_neg_eigval=True, scale=0.2, **BOUNDED_MODEL)


def test_near_collinear_keys(emulated: list[str]) -> None:
    """Beta near 1 and keys almost alike: an inverse by powers in half precision is infinite here."""
    d = Draw(3)
    inputs = draw(1, 100, gate="slow", initial_state=d.normal(1, 1, 128, 128, dtype=torch.float32))
    keys = d.normal(1, 1, 1, 128, dtype=torch.float32) + 1e-2 * d.normal(1, 100, 1, 128, dtype=torch.float32)
    unit = torch.nn.functional.normalize(keys, dim=-1).to(torch.bfloat16)
    beta = torch.full((1, 100, 1), 0.9975)
    check(inputs._replace(k=unit, beta=beta), output_final_state=True, **SAFE_LOG)


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_later_tokens_change_no_bit(emulated: list[str], options: dict[str, Any]) -> None:
    """Changed or appended: the outputs before them stay as they were."""
    inputs = draw(1, 90)
    whole = run(inputs, **options).o
    noise = draw(1, 90, seed=7)
    arrays = {n: torch.cat([getattr(inputs, n)[:, :40], getattr(noise, n)[:, 40:]], 1) for n in "qkvg"}
    beta = torch.cat([inputs.beta[:, :40], noise.beta[:, 40:]], 1)
    assert torch.equal(run(inputs._replace(**arrays, beta=beta), **options).o[:, :40], whole[:, :40])
    cut = {n: getattr(inputs, n)[:, :40].contiguous() for n in ("q", "k", "v", "g", "beta")}
    assert torch.equal(run(inputs._replace(**cut), **options).o, whole[:, :40])


def test_neighbours_do_not_leak(emulated: list[str]) -> None:
    """NaN in the other sequence of a pack reaches nothing."""
    cu = torch.tensor([0, 21, 50])
    inputs = draw(1, 50, cu_seqlens=cu)
    clean = run(inputs, **BOUNDED_MODEL).o
    for array in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        array[:, 21:] = float("nan")
    assert torch.equal(run(inputs, **BOUNDED_MODEL).o[:, :21], clean[:, :21])


def test_split_equals_whole(emulated: list[str]) -> None:
    inputs = draw(1, 100)
    whole = run(inputs, output_final_state=True, **BOUNDED_MODEL)
    first, second = (
        {n: getattr(inputs, n)[:, part].contiguous() for n in ("q", "k", "v", "g", "beta")}
        for part in (slice(0, 37), slice(37, 100))
    )
    a = run(inputs._replace(**first), output_final_state=True, **BOUNDED_MODEL)
    b = run(inputs._replace(**second, initial_state=a.final_state), output_final_state=True, **BOUNDED_MODEL)
    joined = torch.cat([a.o, b.o], 1)
    assert error(joined, whole.o.double().numpy()) < O_BOUND
    assert error(b.final_state, whole.final_state.double().numpy()) < STATE_BOUND


def whole_fraction(monkeypatch: pytest.MonkeyPatch, clusters: int) -> None:
    """As many clusters share all work, however little there is; 0: a cluster for each sequence and head."""
    monkeypatch.setattr(choice, "resident_clusters", lambda *given: clusters)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("lengths", [None, (0, 1, 15, 130, 17, 64, 33, 0)], ids=["dense", "pack"])
def test_clusters_of_four_have_the_bits_of_two(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...] | None,
    options: dict[str, Any],
) -> None:
    """So tokens may decide between them, and calls where bits must not depend on the batch may use both."""
    pack = {} if lengths is None else {"cu_seqlens": torch.tensor(np.cumsum([0, *lengths]))}
    T, N = (260, 2) if lengths is None else (sum(lengths), len(lengths))
    inputs = draw(2 if lengths is None else 1, T, 1, 2, initial_state=torch.randn(N, 2, 128, 128), **pack)
    found = []
    for size in (2, 4):
        use_cluster(monkeypatch, size)
        found.append(run(inputs, output_final_state=True, checkpoint_every=64, **options))
    for name in ("o", "final_state", "checkpoints"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
    assert [f"-CLUSTER{n}-" in name for name, n in zip(emulated[-2:], (2, 4), strict=True)] == [True, True]


def use_helpers(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """In clusters of four, whatever the number of heads and tokens, or never."""
    monkeypatch.setattr(choice, "preparing_clusters", lambda items, *rest: -(-items // 4) if used else 0)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("T", [1, 64, 65, 96, 97, 300])
def test_helpers_change_no_bits(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int, options: dict[str, Any]
) -> None:
    """Six clusters have two clusters of helpers, of which two blocks have nothing to do. Seven steps need a stage of
    each block twice."""
    use_cluster(monkeypatch, 4)
    inputs = draw(2, T, 1, 3, initial_state=torch.randn(2, 3, 128, 128))
    found = []
    for used in (False, True):
        use_helpers(monkeypatch, used)
        found.append(run(inputs, output_final_state=True, checkpoint_every=64, **options))
    for name in ("o", "final_state", "checkpoints"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
    assert ["-HELPERS1" in name for name in emulated[-2:]] == [False, True]


def use_helpers_of_two(monkeypatch: pytest.MonkeyPatch, clusters: int, share: float = 0.5) -> None:
    """Blocks of so many more clusters of two prepare this part of the steps, as far as the kernel can; 0: of none."""
    use_cluster(monkeypatch, 2)
    monkeypatch.setattr(choice, "preparing_clusters", lambda *given: clusters)
    monkeypatch.setattr(choice, "prepared_share", lambda *given: share)


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize(
    ("B", "T", "HV", "clusters", "share"),
    [
        pytest.param(2, 500, 3, 1, 0.5, id="fewer helpers than items"),
        pytest.param(1, 700, 2, 3, 2 / 3, id="more, as many steps as they can"),
        pytest.param(1, 700, 1, 1, 0, id="two for one item, as few steps as they can"),
        pytest.param(1, 96, 3, 1, 0.5, id="no step left for helpers"),
        pytest.param(1, 160, 3, 1, 2 / 3, id="one step"),
        pytest.param(1, 1, 2, 1, 0.5, id="one token"),
        pytest.param(3, 330, 1, 5, 0.27, id="sequences of one head, more helpers than items"),
        pytest.param(1, 805, 3, 2, 0.41, id="any share"),
    ],
)
def test_helpers_of_clusters_of_two_change_no_bits(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    B: int,
    T: int,
    HV: int,
    clusters: int,
    share: float,
    options: dict[str, Any],
) -> None:
    inputs = draw(B, T, 1, HV, initial_state=torch.randn(B, HV, 128, 128))
    found = []
    for used in (0, clusters):
        use_helpers_of_two(monkeypatch, used, share)
        found.append(run(inputs, output_final_state=True, checkpoint_every=64, **options))
    for name in ("o", "final_state", "checkpoints"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
    assert ["-HELPERS1" in name for name in emulated[-2:]] == [False, True]


@pytest.mark.parametrize("gate", ["random", "fast", "slow"])
def test_helpers_of_clusters_of_two_against_the_oracle(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    """With two key heads for four value heads, and gates that are given as they are."""
    use_helpers_of_two(monkeypatch, 1)
    options = BOUNDED_MODEL if gate == "random" else SAFE_LOG
    check(draw(1, 300, 2, 4, gate=gate), output_final_state=True, **options)
    assert "-CLUSTER2-" in emulated[-1]
    assert "-HELPERS1" in emulated[-1]


def test_a_float32_gate_of_clusters_that_are_helped(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without A_log and dt_bias."""
    inputs = draw(1, 300, 1, 3, gate="mixed")
    inputs = inputs._replace(g=inputs.g.float())
    found = []
    for clusters in (0, 1):
        use_helpers_of_two(monkeypatch, clusters)
        found.append(run(inputs, output_final_state=True))
    assert torch.equal(found[0].o, found[1].o)
    assert torch.equal(found[0].final_state, found[1].final_state)
    assert "G_FLOAT1" in emulated[-1]


@pytest.mark.exhaustive
def test_every_lane_arriving_changes_no_bit_with_helpers(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_helpers_of_two(monkeypatch, 1)
    inputs = draw(1, 400, 1, 3)
    want = run(inputs, **MODEL, output_final_state=True)
    monkeypatch.setenv(EVERY_LANE, "1")
    got = run(inputs, **MODEL, output_final_state=True)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.final_state, want.final_state)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize(("length", "row"), [(230, 2), (97, 1), (300, -1), (0, 0), (1, 3)])
def test_helpers_of_a_pack_of_one_sequence(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, length: int, row: int, options: dict[str, Any]
) -> None:
    """As engines call it: padded behind the sequence, whose state is a row of a pool, or has none."""
    use_cluster(monkeypatch, 4)
    pool = torch.randn(4, 5, 128, 128)
    found = []
    for used in (False, True):
        use_helpers(monkeypatch, used)
        states = pool.clone()
        offsets, rows = torch.tensor([0, length]), torch.tensor([row])
        own = {"initial_state": states, "state_indices": rows, "cu_seqlens": offsets}
        o = run(draw(1, 300, 1, 5, **own), inplace_state=True, output_final_state=True, **options).o
        found.append((o[:, :length], states))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert ["-HELPERS1" in name for name in emulated[-2:]] == [False, True]
    assert row < 0 or length == 0 or not torch.equal(found[1][1][row], pool[row])


def test_helpers_against_the_oracle(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_cluster(monkeypatch, 4)
    use_helpers(monkeypatch, True)
    check(draw(1, 200, 2, 2), output_final_state=True, **BOUNDED_MODEL)
    assert "-HELPERS1" in emulated[-1]


def remember_workspaces(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Collects what later calls allocate."""
    made: list[torch.Tensor] = []
    plain = torch_launch.allocator

    def remembering(device_type: str) -> Any:
        empty = plain(device_type)

        def remembered(*form: Any) -> torch.Tensor:
            made.append(empty(*form))
            return made[-1]

        return remembered

    monkeypatch.setattr(torch_launch, "allocator", remembering)
    return made


def test_helpers_clear_the_flags_that_they_raise(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is replayed with the number of the launch that it was captured with."""
    use_cluster(monkeypatch, 4)
    use_helpers(monkeypatch, True)
    made = remember_workspaces(monkeypatch)
    T, H = 200, 3
    run(draw(1, T, H, H), **BOUNDED_MODEL)
    (workspace,) = (x for x in made if x.shape == (prepared_steps_bytes(T, H),))
    steps = H * (-(-T // 32) // 3)
    assert steps == 6
    assert not workspace[-8 * 2 * steps :].any()  # 64 bits for each of two blocks


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_helpers_of_clusters_of_two_clear_their_flags(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Behind each of the steps that the host counts, and the counter of tickets."""
    use_helpers_of_two(monkeypatch, 1, share)
    made = remember_workspaces(monkeypatch)
    T, H, image = 600, 3, 28544
    run(draw(1, T, H, H), **BOUNDED_MODEL)
    size = spaced_steps_bytes(T, H, own_spacing(share))
    (workspace,) = (x for x in made if x.shape == (size,))
    helped = {0.0: 2, 0.5: 8, 0.9: 10}[share]  # of 19 steps, of which the first three are the cluster's own
    assert size == 128 + H * helped * (image + 128)
    assert not workspace[:8].any()
    flags = workspace[128:].view(H * helped, -1)[:, image : image + 16]
    assert not flags.any()


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("block", [0, 2], ids=["helper", "preparing block"])
@pytest.mark.parametrize("warp", [12, 13], ids=["first", "second"])
def test_a_solver_warp_that_falls_behind(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, warp: int, block: int, options: dict[str, Any]
) -> None:
    """Slices of later chunks wait for it, also those whose pair has left out a chunk (READS of shared_memory.cuh)."""
    use_cluster(monkeypatch, 4)
    use_helpers(monkeypatch, True)
    inputs, plain = draw(1, 690), emulator.run
    want = run(inputs, **options)
    starved = 16 * block + warp
    monkeypatch.setattr(emulator, "run", lambda *a, **k: plain(*a, **{**k, "starved": starved}))
    got = run(inputs, **options)
    assert torch.equal(got.o, want.o)


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(
    "starved",
    [
        *(pytest.param(16 * block + 12, id=f"block {block}, the warp that fetches") for block in (0, 1)),
        *(pytest.param(16 + 13 + i, id=f"another solver warp, {i}") for i in range(3)),
        pytest.param(0, id="a warp that scans, or a helper's slice"),
        pytest.param(20, id="a slice warp"),
    ],
)
def test_a_warp_that_falls_behind_in_helped_clusters_of_two(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, starved: int, share: float, options: dict[str, Any]
) -> None:
    """Who waits for a stage takes the phase of its barrier for the one before or after, if it has not kept up: the same
    warps of helpers and of the clusters that they help."""
    inputs, plain = draw(1, 700), emulator.run
    use_helpers_of_two(monkeypatch, 0)
    want = run(inputs, **options)
    use_helpers_of_two(monkeypatch, 1, share)
    monkeypatch.setattr(emulator, "run", lambda *a, **k: plain(*a, **{**k, "starved": starved}))
    got = run(inputs, **options)
    assert torch.equal(got.o, want.o)
    assert "-HELPERS1" in emulated[-1]


@pytest.mark.parametrize("rows", [(-1, 2, 0), (1, 3, -1)])
@pytest.mark.parametrize("cluster", [2, 4])
def test_several_sequences_that_may_be_padding_have_no_helpers(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, cluster: int, rows: tuple[int, ...]
) -> None:
    """Sequences without a slot have no steps, so a helper would leave a scanning block waiting for ever."""
    use_cluster(monkeypatch, cluster)
    inputs = draw(3, 100, 1, 2, initial_state=torch.randn(4, 2, 128, 128), state_indices=torch.tensor(rows))
    found = []
    for used in (False, True):
        use_helpers(monkeypatch, used)
        found.append(run(inputs, output_final_state=True, **BOUNDED_MODEL))
    assert torch.equal(found[0].o, found[1].o)
    assert torch.equal(found[0].final_state, found[1].final_state)
    assert "-HELPERS1" not in emulated[-1]


def test_where_clusters_have_helpers() -> None:
    """24 heads of an H200 or H100, with unbounded gates 23 as well: fewer gain nothing, and with more, their helpers
    could not all run at once."""
    items = range(22, 26)
    assert [preparing_clusters(n, 1024, 4, True, H100) for n in items] == [0, 0, 6, 0]
    assert [preparing_clusters(n, 1024, 4, False, H100) for n in items] == [0, 6, 6, 0]
    assert preparing_clusters(24, 1023, 4, True, H100) == 0
    assert preparing_clusters(24, 1024, 2, True, H100) == 0


def test_where_clusters_of_two_have_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 37 heads on, where clusters of four would share them, as long as so much is left for helpers that they take
    a part of the steps that pays."""
    monkeypatch.setattr(choice, "HELP_CLUSTERS_OF_TWO", True)
    items = (36, 37, 40, 41, 48, 59, 60, 61, 66, 67)
    assert [preparing_clusters(n, 1024, 2, True, H100) for n in items] == [0, 29, 26, 25, 18, 7, 6, 0, 0, 0]
    assert [preparing_clusters(n, 1024, 2, False, H100) for n in items] == [0, 29, 26, 25, 18, 7, 0, 0, 0, 0]
    assert [preparing_clusters(48, T, 2, True, H100) for T in (1023, 1024)] == [0, 18]
    few = Figures("sm_90a", 132, lambda cluster: 50, lambda: 0.0)  # as many run at once
    assert [preparing_clusters(n, 1024, 2, True, few) for n in (40, 46, 49, 50, 51)] == [10, 0, 0, 0, 0]
    sizes = [[cluster_size(n, 1024, H100, helped) for n in (30, 36, 37, 40, 41)] for helped in (False, True)]
    assert sizes == [[4, 4, 4, 4, 2], [4, 4, 2, 2, 2]]


@pytest.mark.parametrize("bounded", [True, False])
def test_the_share_of_helpers(bounded: bool) -> None:
    """The more heads, the smaller; spacings within what the kernel takes."""
    shares = [prepared_share(n, 66 - n, bounded) for n in range(30, 66)]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0] < 1
    spacings = [own_spacing(x) for x in (*shares, 0.0, 0.5, 0.999)]
    assert all(LEAST_SPACING <= x <= MOST_SPACING for x in spacings)
    assert spacings[-3:] == [LEAST_SPACING, (2 << 16) + 1, MOST_SPACING]


def same_in_shares(
    monkeypatch: pytest.MonkeyPatch, inputs: ChunkInputs, clusters: int, **options: Any
) -> Outputs:
    """Run in shares: within the bounds, and bit for bit what a cluster for each sequence and head gives."""
    whole_fraction(monkeypatch, 0)
    alone = run(inputs, **options)
    whole_fraction(monkeypatch, clusters)
    got = check(inputs, **options)
    assert torch.equal(got.o, alone.o)
    assert torch.equal(got.final_state, alone.final_state)
    assert got.checkpoints is None or torch.equal(got.checkpoints, alone.checkpoints)
    return got


@pytest.mark.first_cases(6)
@pytest.mark.parametrize(
    ("B", "T", "H", "clusters"),
    [(1, 100, 3, 2), (1, 130, 5, 3), (2, 30, 3, 4), (2, 30, 3, 3), (2, 60, 3, 3), (1, 70, 7, 5)],
)
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("cluster", [2, 4])
def test_clusters_share_sequences(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    cluster: int,
    options: dict[str, Any],
    B: int,
    T: int,
    H: int,
    clusters: int,
) -> None:
    use_cluster(monkeypatch, cluster)
    same_in_shares(monkeypatch, draw(B, T, H, H), clusters, output_final_state=True, **options)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("clusters", [2, 3, 7])
@pytest.mark.parametrize(("v_first", "cluster"), [(False, 2), (True, 2), (True, 4)])
def test_clusters_share_packs(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, clusters: int, v_first: bool, cluster: int
) -> None:
    """Cut sequences, empty ones at every place, states in and out and between."""
    use_cluster(monkeypatch, cluster)
    lengths = [0, 1, 15, 0, 130, 17, 0, 64, 33, 0]
    cu = torch.tensor(np.cumsum([0, *lengths]))
    state = torch.randn(len(lengths), 2, 128, 128)
    state[3, 0, 0, 0] = float("inf")  # of an empty sequence: comes out as it went in
    inputs = draw(1, sum(lengths), 1, 2, cu_seqlens=cu, initial_state=state)
    options = BOUNDED_MODEL | {"checkpoint_every": 64, "state_v_first": v_first, "output_final_state": True}
    whole_fraction(monkeypatch, clusters)
    got = run(inputs, **options)
    for n in (0, 3, 6, 9):
        assert torch.equal(got.final_state[n], state[n])
    state[3] = 0.0
    same_in_shares(monkeypatch, inputs, clusters, **options)


@pytest.mark.parametrize("lengths", [[0, 200, 1, 1], [1, 300, 2, 150, 40, 1]])
def test_long_sequences_have_clusters_of_their_own(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    inputs = draw(1, sum(lengths), 2, 2, cu_seqlens=torch.tensor(np.cumsum([0, *lengths])))
    same_in_shares(monkeypatch, inputs, 5, output_final_state=True, checkpoint_every=64, **BOUNDED_MODEL)


def test_clusters_share_more_sequences_than_lanes(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, 70) * rng.integers(0, 2, 70)
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    inputs = draw(1, int(lengths.sum()), cu_seqlens=cu)
    same_in_shares(monkeypatch, inputs, 5, output_final_state=True, **MODEL)


# Of the kernel's own way for many short sequences: at most 128 tokens, 8 sequences and heads a cluster or more.
@pytest.mark.first_cases(2)
@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 32, 33, 49, 64, 97, 128])
def test_many_short_sequences(emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    same_in_shares(monkeypatch, draw(6, T, 3, 3, seed=T), 2, output_final_state=True, **BOUNDED_MODEL)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("T", [16, 40])
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_short_sequences_with_states(
    emulated: list[str],
    monkeypatch: pytest.MonkeyPatch,
    T: int,
    options: dict[str, Any],
    v_first: bool,
    dtype: torch.dtype,
) -> None:
    """Grouped value heads, states read and written, some of them only masked out."""
    state = torch.randn(5, 4, 128, 128).to(dtype)
    inputs = draw(
        5, T, 2, 4, initial_state=state, has_initial_state=torch.tensor([True, False, True, True, False])
    )
    same_in_shares(monkeypatch, inputs, 2, output_final_state=True, state_v_first=v_first, **options)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("T", [16, 40])
@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
def test_many_short_sequences_with_float32_gates(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch, T: int, options: dict[str, Any]
) -> None:
    """A kernel of its own: the bits of the same gates in bfloat16."""
    inputs = draw(6, T, 3, 3, seed=T)
    got = same_in_shares(
        monkeypatch, inputs._replace(g=inputs.g.float()), 2, output_final_state=True, **options
    )
    want = run(inputs, output_final_state=True, **options)
    assert torch.equal(got.o, want.o) and torch.equal(got.final_state, want.final_state)


def test_many_short_sequences_have_a_kernel_of_their_own(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_fraction(monkeypatch, 2)

    def many_short(inputs: ChunkInputs, **options: Any) -> int:
        made = launches_of("fused", request_of("chunk_kda", inputs, **BOUNDED_MODEL, **options))
        (step,) = made.program.steps
        return dict(step.kernel.source.defines)["MANY_SHORT"]

    assert many_short(draw(16, 128)) == 1
    assert many_short(draw(16, 129)) == 0
    assert many_short(draw(7, 128)) == 0
    assert many_short(draw(16, 128), checkpoint_every=64) == 0
    assert many_short(draw(1, 128, cu_seqlens=torch.arange(17) * 8)) == 0
    pool = torch.zeros(16, 1, 128, 128)
    assert (
        many_short(draw(16, 16, initial_state=pool, state_indices=torch.arange(16)), inplace_state=True) == 0
    )


def test_many_short_sequences_are_as_long_ones_begin(
    emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """129 tokens do not go that way: their first 128, 40 and 16 are the same bits."""
    whole_fraction(monkeypatch, 2)
    long = draw(16, 129)
    want = run(long, **BOUNDED_MODEL).o
    for T in (128, 40, 16, 1):
        cut = {n: getattr(long, n)[:, :T].contiguous() for n in ("q", "k", "v", "g", "beta")}
        assert torch.equal(run(long._replace(**cut), **BOUNDED_MODEL).o, want[:, :T])


def test_clusters_share_nothing(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More clusters than steps: some have nothing to do."""
    inputs = draw(1, 40, cu_seqlens=torch.tensor([0, 40]))
    same_in_shares(monkeypatch, inputs, 4, output_final_state=True, **BOUNDED_MODEL)


def test_sharing_depends_on_shapes_alone() -> None:
    assert resident_clusters(66, 2, H100) == 0
    assert resident_clusters(67, 2, H100) == 66
    assert resident_clusters(30, 4, H100) == 0
    assert resident_clusters(31, 4, H100) == 30
    wide, narrow = (request_of("chunk_kda", draw(512, 1, K=K), **BOUNDED_MODEL) for K in (128, 64))
    assert choose_clusters(narrow, H100).resident == 0
    assert choose_clusters(wide, device("sm_100f", 148)).resident == 0


def test_cluster_size_depends_on_shapes_alone() -> None:
    assert [cluster_size(n, 8192, H100) for n in (8, 30, 31, 40, 41, 64, 512)] == [4, 4, 4, 4, 2, 2, 2]
    assert [cluster_size(n, 512, H100) for n in (8, 30, 31, 40)] == [4, 4, 2, 2]
    assert portable_cluster_size(128, 8, device("sm_100f", 148)) == 4
    assert portable_cluster_size(128, 512, device("sm_100f", 148)) == 1
    assert portable_cluster_size(128, 1, device("sm_120", 132)) == 1
    assert portable_cluster_size(64, 1, H100) == 1
