"""flash-linear-attention's context parallel calls, computed by kdacore, forward and gradients, with ranks that are
threads or processes over gloo; and what of them is left to it."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fla_cp_calls
import pytest
import torch

import kdacore
from kdacore.compat import fla as compat
from kdacore.parallel import local_group

pytest.importorskip("fla", reason="flash-linear-attention is not installed", exc_type=ImportError)

RANK = Path(__file__).with_name("fla_cp_rank.py")
T = 8


@pytest.fixture
def integration() -> Iterator[Any]:
    module = fla_cp_calls.integration()
    module.activate()
    yield module
    module.deactivate()


@pytest.mark.parametrize("function", fla_cp_calls.MODULES)
def test_threads(integration: Any, function: str) -> None:
    (before,) = [h for h in integration.status() if h.function == function]
    for i, lengths in enumerate(fla_cp_calls.LENGTHS):

        def work(ranks: Any, lengths: tuple[int, ...] = lengths, on_host: bool = i % 2 == 0) -> Any:
            return fla_cp_calls.run_rank(function, lengths, ranks, ranks.rank, 2, on_host)

        with ThreadPoolExecutor(2) as pool:
            shares = [*pool.map(work, local_group(2, timeout=60.0))]
        fla_cp_calls.check(function, lengths, shares)
    (after,) = [h for h in integration.status() if h.function == function]
    assert (after.served, after.declined) == (before.served + 2 * len(fla_cp_calls.LENGTHS), before.declined)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("size", "lengths"), [(2, (75, 100, 85)), (4, (260,))])
def test_16_bit_rows_are_as_the_whole_row(
    integration: Any, cp: Any, dtype: torch.dtype, size: int, lengths: tuple[int, ...]
) -> None:
    """Of ``chunk_kda``, keys and queries normalised before it; far within what FLA's own tests allow (8e-3)."""
    function = importlib.import_module("fla.ops.kda").chunk_kda
    torch.manual_seed(sum(lengths) + size)
    tokens = sum(lengths)
    row = {name: torch.randn(1, tokens, 2, 32).to(dtype) for name in ("q", "k", "v", "do")}
    row["g"] = torch.nn.functional.logsigmoid(torch.randn(1, tokens, 2, 32))
    row["beta"] = torch.randn(1, tokens, 2).to(dtype).sigmoid()
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])

    def run(part: slice, **given: Any) -> dict[str, torch.Tensor]:
        x = {name: a[:, part].clone().requires_grad_(name != "do") for name, a in row.items()}
        do = x.pop("do")
        unit = {name: torch.nn.functional.normalize(x[name], dim=-1) for name in ("q", "k")}
        o, _ = function(**{**x, **unit}, **given)
        o.backward(do)
        return {"o": o.detach(), **{name: a.grad for name, a in x.items() if a.grad is not None}}

    def work(ranks: Any) -> dict[str, torch.Tensor]:
        mine = slice(ranks.rank * tokens // size, (ranks.rank + 1) * tokens // size)
        made = cp.get_cp_cu_seqlens(offsets, world_size=size, rank=ranks.rank, group=ranks)
        return run(mine, cu_seqlens=made.cu_seqlens, cp_context=made)

    whole = run(slice(None), cu_seqlens=offsets)
    with ThreadPoolExecutor(size) as pool:
        shares = [*pool.map(work, local_group(size, timeout=60.0))]
    assert set(whole) == {"o", "q", "k", "v", "g", "beta"}
    for name, want in whole.items():
        got = torch.cat([share[name] for share in shares], 1)
        assert (got - want).abs().max() <= 2e-3 * want.abs().max(), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_processes(size: int, tmp_path: Path) -> None:
    """Over gloo: see ``fla_cp_rank.py``."""
    logs = [tmp_path / f"{rank}.log" for rank in range(size)]
    started = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(RANK), str(rank), str(size), str(tmp_path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    said = "\n".join([log.read_text() for log in logs])
    assert codes == [0] * size and len(list(tmp_path.glob("*.passed"))) == size, said


@pytest.fixture
def cp(integration: Any) -> Any:
    """flash-linear-attention's module of contexts."""
    return importlib.import_module("fla.ops.cp.context")


def context(cp: Any, **given: Any) -> Any:
    """Of the first of two ranks, whose group is never used."""
    made = cp.get_cp_cu_seqlens(torch.tensor([0, 5, 2 * T]), world_size=2, rank=0, **given)
    made.group = object()
    return made


def arguments() -> dict[str, torch.Tensor]:
    x, beta = torch.rand(1, T, 1, 16), torch.rand(1, T, 1)
    return {"q": x, "k": x, "v": x, "g": -x, "beta": beta}


def without_a_group(cp: Any) -> dict[str, Any]:
    made = context(cp)
    made.group = None
    return {"cp_context": made}


def without_the_whole_row(cp: Any) -> dict[str, Any]:
    made = context(cp)
    return {"cp_context": made.copy_for_backward()}


def refilled(cp: Any) -> dict[str, Any]:
    made = context(cp)
    made.cu_seqlens.copy_(torch.tensor([0, 6, T]))
    return {"cp_context": made}


def replaced(cp: Any) -> dict[str, Any]:
    made = context(cp)
    made.cu_seqlens = made.cu_seqlens.clone()
    return {"cp_context": made}


LEFT = {
    "zigzag": (lambda cp: {"cp_context": context(cp, layout="zigzag")}, "the layout 'zigzag'"),
    "no group": (without_a_group, "without a group"),
    "no whole row": (without_the_whole_row, "without the offsets of the whole row"),
    "refilled": (refilled, "offsets that were refilled"),
    "replaced": (replaced, "offsets that were refilled"),
    "an initial state": (
        lambda cp: {"cp_context": context(cp), "initial_state": torch.zeros(2, 1, 16, 16)},
        "'initial_state'",
    ),
    "a final state": (
        lambda cp: {"cp_context": context(cp), "output_final_state": True},
        "'output_final_state'",
    ),
    "another length": (
        lambda cp: {"cp_context": context(cp), **{n: x[:, :4] for n, x in arguments().items()}},
        f"4 tokens; wanted {T} tokens",
    ),
    "no group of torch": (lambda cp: {"cp_context": context(cp)}, "'cp'"),
}


@pytest.mark.parametrize("function", ["chunk_kda", "chunk_gated_delta_rule"])
@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_fla(integration: Any, cp: Any, function: str, case: str) -> None:
    given, said = LEFT[case]
    call = {**arguments(), **given(cp)}
    if function == "chunk_gated_delta_rule":
        call["g"] = call["g"][..., 0]
    handover = integration._HANDOVERS[function]
    declined = handover.hook.declined
    taken, reason = handover.verdict((), call)
    assert not taken and said in reason, reason
    assert handover.hook.declined == declined + 1


def test_graphs_are_left_to_fla(integration: Any, cp: Any) -> None:
    call = {**arguments(), "cp_context": context(cp), "use_graph": True}
    taken, reason = integration._HANDOVERS["chunk_kda"].verdict((), call)
    assert not taken and "'use_graph'" in reason


def test_contexts_are_as_before(integration: Any, cp: Any) -> None:
    """The function that makes them still keeps the last ones, and is put back."""
    offsets = torch.tensor([0, 5, 2 * T])
    made = [cp.get_cp_cu_seqlens(offsets, world_size=2, rank=1) for _ in range(2)]
    assert made[0] is made[1] and made[0].cu_seqlens.tolist() == [0, T]
    noting = cp.get_cp_cu_seqlens
    integration.deactivate()
    assert cp.get_cp_cu_seqlens is not noting
    assert not hasattr(cp.get_cp_cu_seqlens(offsets.clone(), world_size=2, rank=1), "kdacore_whole_row")


def test_without_the_integration_the_argument_is_named(integration: Any, cp: Any) -> None:
    integration.deactivate()
    with pytest.raises(kdacore.ContractError, match="'cp_context'.*kdacore.integrations.fla active"):
        compat.chunk_kda(**arguments(), cp_context=context(cp))
