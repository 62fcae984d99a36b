"""The gradients kernel of ``chunk_gated_delta_rule``, emulated, given what the launches before it leave, from autograd
in float64 through the recurrence."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import chunk_backward_model as images
import numpy as np
import pytest
import torch
from cuda_calls import MODEL, Draw, error, request_of
from gated_delta_calls import draw, in_each_order
from single_launches import launch_kernel

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.build.compiler import compile_kernel
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots
from kdacore_cuda.forms.gated_delta.kernels import grads_kernel
from kdacore_cuda.forms.gated_delta.workspace import RECORD_BYTES
from kdacore_cuda.kernel_parameters import FLAGS, SUM_SCALE
from kdacore_cuda.request_encoding import division, type_code

pytestmark = pytest.mark.usefixtures("emulated", "poison")
OP, BOUND, PART_BOUND = "chunk_gated_delta_rule", 8e-3, 1e-2
"""Contract section 4 for the gradients of 16-bit inputs."""
SCALARS_AT, LEAST_BETA = RECORD_BYTES - 4 * 64 * 4, 2.0**-64
GRADIENTS = ("q", "k", "v", "g", "beta")
F64 = torch.float64


class Sequence:
    """One sequence, and what autograd says of it: leaves by name, and the workspace by chunk and value head."""

    def __init__(
        self, r: Request, inputs: ChunkInputs, tokens: slice, d_o: torch.Tensor, d_ht: torch.Tensor, h0: Any
    ) -> None:
        leaf = {
            n: x[tokens].to(F64).requires_grad_()
            for n, x in zip(GRADIENTS, (y.flatten(0, 1) for y in inputs[:5]), strict=True)
        }
        self.leaf = leaf
        self.A_log, self.dt_bias = (
            None if x is None else x.to(F64).requires_grad_() for x in (inputs.A_log, inputs.dt_bias)
        )
        length, group = leaf["q"].shape[0], r.HV // r.H
        norm = {
            n: (x.square().sum(-1) + 1e-6).rsqrt() if r.qk_l2norm else torch.ones_like(x[..., 0])
            for n, x in leaf.items()
            if n in "qk"
        }
        q, k = ((leaf[n] * norm[n][..., None]).repeat_interleave(group, 1) for n in "qk")
        decay = self._log_decay(r, leaf["g"], self.A_log)
        decay.retain_grad()
        beta = torch.sigmoid(leaf["beta"]) if r.beta_sigmoid else leaf["beta"]
        beta = 2 * beta if r.neg_eigval else beta
        beta = torch.where(beta.abs() < LEAST_BETA, beta + LEAST_BETA, beta)
        S = h0.to(F64)
        self.starts, self.ends, us, outputs = [], [], [], []
        for i in range(length):
            if i % 64 == 0:
                self.starts.append(S.detach())
            S = decay[i].exp()[:, None, None] * S
            u = leaf["v"][i] - torch.einsum("hvk,hk->hv", S, k[i])
            S = S + (beta[i][:, None] * u)[:, :, None] * k[i][:, None]
            us.append(u.detach())
            outputs.append(r.scale * torch.einsum("hvk,hk->hv", S, q[i]))
            if i % 64 == 63 or i == length - 1:
                S = S * 1.0  # without what the chunk's last output gives
                S.retain_grad()
                self.ends.append(S)
        if length:
            ((torch.stack(outputs) * d_o[tokens].to(F64)).sum() + (S * d_ht).sum()).backward()
            self.u = torch.stack(us)
        sums = decay.detach().cumsum(0) / np.log(2.0)
        for c in range(1, len(self.starts)):
            sums[64 * c :] -= sums[64 * c - 1].clone()
        factors = [x.detach() for x in (norm["k"], r.scale * norm["q"])]
        self.scalars = [sums, beta.detach(), *(x.repeat_interleave(group, 1) for x in factors)]

        self.parts = {"dt_bias": leaf["g"].grad}
        """By gate parameter what each token adds to its gradient."""
        if self.A_log is not None:
            near = (self._log_decay(r, leaf["g"], self.A_log + x).detach() for x in (1e-6, -1e-6))
            above, below = near
            self.parts["A_log"] = (above - below) / 2e-6 * (decay.grad if length else 1.0)

    def _log_decay(self, r: Request, g: torch.Tensor, A_log: torch.Tensor | None) -> torch.Tensor:
        if r.gate == "log":
            return g
        x = g if self.dt_bias is None else g + self.dt_bias
        rate = 1.0 if A_log is None else A_log.exp()
        return (
            r.lower_bound * torch.sigmoid(rate * x)
            if r.gate == "sigmoid"
            else -rate * torch.nn.functional.softplus(x)
        )


def sequences(r: Request, inputs: ChunkInputs, d_o: torch.Tensor, d_ht: torch.Tensor) -> list[Sequence]:
    offsets = [r.T * i for i in range(r.B + 1)] if inputs.cu_seqlens is None else inputs.cu_seqlens.tolist()
    zeros = torch.zeros(r.N, r.HV, 128, 128)
    h0 = zeros if inputs.initial_state is None else inputs.initial_state.transpose(-1, -2)
    return [
        Sequence(r, inputs, slice(*x), d_o.flatten(0, 1), d_ht[n].to(F64), h0[n])
        for n, x in enumerate(pairwise(offsets))
    ]


def padded(x: torch.Tensor) -> torch.Tensor:
    """To 64 rows."""
    return torch.nn.functional.pad(x, (0,) * (2 * (x.ndim - 1)) + (0, 64 - x.shape[0]))


def workspace(r: Request, found: list[Sequence], offsets: list[int]) -> dict[str, torch.Tensor]:
    """Records (only their scalars), u and states, by slot and value head."""
    slots, nan = chunk_slots(r), float("nan")
    scalars = torch.full((slots, r.HV, 4, 64), nan, dtype=torch.float32)
    u = torch.full((slots, r.HV, 64, 128), nan, dtype=F64)
    states, state_grads = (torch.full((slots, r.HV, 128, 128), nan, dtype=F64) for _ in range(2))
    for n, s in enumerate(found):
        first = n * -(-r.T // 64) if not r.packed else offsets[n] // 64 + n
        for c, (start, end) in enumerate(zip(s.starts, s.ends, strict=True)):
            rows, at = slice(64 * c, 64 * c + 64), first + c
            for i, x in enumerate(s.scalars):
                scalars[at, :, i] = padded(x[rows]).T.float()
            left = s.scalars[0][rows].shape[0]
            scalars[at, :, 0, left:] = scalars[at, :, 0, left - 1 : left]
            u[at] = padded(s.u[rows]).transpose(0, 1)
            states[at], state_grads[at] = start, end.grad
    records = torch.full((slots, r.HV, RECORD_BYTES), 255, dtype=torch.uint8)
    records[..., SCALARS_AT:] = scalars.flatten(2).view(torch.uint8)
    tiles = {"u": u, "states": states, "state_grads": state_grads}
    return {"records": records} | {n: images.to_images(x.numpy()) for n, x in tiles.items()}


def check(
    inputs: ChunkInputs, size: float = 1.0, blocks: int = 2, bound: float = BOUND, **options: Any
) -> dict[str, torch.Tensor]:
    """A call against autograd; what no token or chunk fills must stay as it was. Returns what was written."""
    r = request_of(OP, inputs, **(MODEL | options))
    d_o = Draw(7).normal(*inputs.v.shape) * size
    d_ht = Draw(5).normal(r.N, r.HV, 128, 128, dtype=torch.float32) * (0.1 * size)
    offsets = [] if inputs.cu_seqlens is None else inputs.cu_seqlens.tolist()
    found = sequences(r, inputs, d_o, d_ht)
    wanted = {f"d{n}": x for n, x in zip(GRADIENTS, inputs[:5], strict=True)}
    got = {n: torch.full(x.shape, float("nan"), dtype=x.dtype) for n, x in wanted.items()}
    got["dv"].zero_()
    used = sum(len(s.leaf["q"]) for s in found)
    got["dv"].flatten(0, 1)[:used] = torch.cat([s.leaf["v"].grad for s in found if len(s.starts)])
    parts = {
        n: torch.full((chunk_slots(r), r.HV), float("nan"), dtype=torch.float32)
        for n in ("dA_part", "dbias_part")
    }
    tail = r.packed and used < r.T
    numbers = chunk_numbers(r) | {"units": chunk_slots(r) * r.H, "g_type": type_code(r, "g")}
    numbers["flags"] |= FLAGS["NONZERO_BETA"] | (FLAGS["CLEAR_TAIL"] if tail else 0)
    for name, divisor in (("h", r.H), ("group", r.HV // r.H)):
        numbers[f"{name}_factor"], numbers[f"{name}_shift"] = division(divisor)
    kernel = grads_kernel()
    fields = {n for n, _ in kernel.params.fields}
    given = {n: x for n, x in inputs._asdict().items() if x is not None and n in fields}
    strides = {
        f"{n}_{axis}": x.stride(i)
        for n, x in zip(GRADIENTS, inputs[:5], strict=True)
        for i, axis in enumerate(("sb", "st", "sh"))
    }
    arrays = given | workspace(r, found, offsets) | got | parts | {"d_o": d_o}
    pointers = {n for n, kind in kernel.params.fields if kind == "ptr"}
    arrays |= dict.fromkeys(pointers - arrays.keys())
    launch_kernel(
        kernel, blocks, inputs.q, arrays, **{n: x for n, x in (numbers | strides).items() if n in fields}
    )
    for name in GRADIENTS:
        x = got[f"d{name}"].flatten(0, 1)
        want = torch.cat([s.leaf[name].grad for s in found if len(s.starts)])
        assert error(x[:used], want) < bound, name
        assert not x[used:].any()
    for name, part in (("A_log", "dA_part"), ("dt_bias", "dbias_part")):
        if getattr(inputs, name) is not None:
            chunks = [x.sum(0) for s in found if len(s.starts) for x in s.parts[name].split(64)]
            written = parts[part][~parts[part].isnan().any(1)]
            assert error(written / SUM_SCALE, torch.stack(chunks)) < PART_BOUND, name
    return got | parts


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 129])
def test_lengths(T: int) -> None:
    check(draw(T, B=2, seed=T, initial_state=0.1 * Draw(9).normal(2, 2, 128, 128, dtype=torch.float32)))


@pytest.mark.parametrize("gate", ["random", "init", "slow", "fast", "spread", "mixed"])
def test_gates(gate: str) -> None:
    inputs = draw(150, gate=gate, initial_state=0.1 * Draw(9).normal(1, 2, 128, 128, dtype=torch.float32))
    check(inputs, use_gate_in_kernel=gate in ("random", "init"))


def test_bounded_gate_and_negative_eigenvalues() -> None:
    check(draw(140), safe_gate=True, lower_bound=-5.0, allow_neg_eigval=True, scale=0.2)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("group", [1, 3, 16])
def test_groups_of_value_heads(group: int) -> None:
    check(draw(130, 2, 2 * group), blocks=3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packs(dtype: torch.dtype) -> None:
    """Empty sequences, slots that nobody fills, and rows behind the last sequence."""
    offsets = torch.tensor([0, *accumulate([0, 1, 31, 0, 64, 65, 0, 100])], dtype=dtype)
    check(draw(int(offsets[-1]) + 9, 1, 2, cu_seqlens=offsets), blocks=3)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_gates_and_betas_of_other_types(kind: torch.dtype) -> None:
    inputs = draw(100)
    check(inputs._replace(**{n: getattr(inputs, n).to(kind) for n in ("g", "beta")}))


def test_betas_of_zero() -> None:
    """A token without effect still has a gradient of beta."""
    inputs = draw(100)
    beta = Draw(2).uniform(1, 100, 2)
    beta[:, 3::7] = 0.0
    check(inputs._replace(beta=beta), use_beta_sigmoid_in_kernel=False)


def test_without_norm() -> None:
    d = Draw(3)
    inputs = draw(130)._replace(q=d.unit(1, 130, 1, 128), k=d.unit(1, 130, 1, 128))
    check(inputs, use_qk_l2norm_in_kernel=False)


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_without_gate_parameters(absent: tuple[str, ...]) -> None:
    check(draw(100)._replace(**dict.fromkeys(absent)), safe_gate=True, lower_bound=-5.0)


def test_strided_inputs() -> None:
    fused = Draw(6).normal(2, 70, 2, 5, 128)
    q, k, v, _, _ = fused.unbind(3)
    beta = Draw(6).normal(2, 70, 2, 3)[..., 1]
    check(draw(70, 2, 2, B=2)._replace(q=q, k=k, v=v, beta=beta))


@pytest.mark.parametrize("size", [1e-6, 1e5])
def test_small_and_large_gradients(size: float) -> None:
    check(draw(130), size)


def test_nearly_equal_keys() -> None:
    inputs = draw(130, gate="fast")
    k = inputs.k[:, :1] + 0.05 * inputs.k
    check(inputs._replace(k=k), bound=2 * BOUND, use_gate_in_kernel=False)


@pytest.mark.exhaustive
def test_same_bits_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads and copies; and where one warp falls behind all others."""
    inputs, found = draw(200, 2, 4), []
    for _ in in_each_order(monkeypatch, (0, 3, 5, 8, 12)):
        found.append(check(inputs))
    assert all(torch.equal(x[n], found[0][n]) for x in found for n in x)


def test_products_overlap() -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    log = compile_kernel(grads_kernel().source, "sm_90a").log
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log
