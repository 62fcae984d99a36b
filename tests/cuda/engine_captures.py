"""Captures of CUDA graphs as vLLM and SGLang make them, around kdacore's public functions.

Both have buffers of the largest batch, and a graph for each of some sizes, the largest first, all in one pool of memory
and on one stream of their own. A size is run before it is captured. A batch takes the graph of the next larger size;
the rows that it does not need are without a slot. Prompts are computed between the pieces of such graphs, or in one
graph over a padded pack.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch

import kdacore

DECODE = (
    "fused_recurrent_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_decode_kda",
    "fused_decode_gated_delta_rule",
)
PREFILL = ("chunk_kda", "chunk_gated_delta_rule")
ROWS = 7
"""Rows of the pools; row 0 is nobody's."""
O_BOUND = 9e-3
"""Twice the contract's, as two of its results may be apart."""


class Graphs(Protocol):
    """Captures graphs that share their memory."""

    device: str

    def warm_up(self, step: Callable[[], Any]) -> None:
        """Run what is about to be captured."""
        ...

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph with a method ``replay``, and what the step returned."""
        ...


class CudaGraphs:
    """On a GPU, as torch captures them."""

    device = "cuda"

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def warm_up(self, step: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.synchronize()

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            made = step()
        return graph, made


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class Model:
    """A layer's parameters, and random tokens for it."""

    def __init__(self, op: str, device: str, heads: tuple[int, int] = (1, 2), K: int = 128) -> None:
        self.op, self.device, self.K, (self.H, self.HV) = op, device, K, heads
        self._draws = torch.Generator().manual_seed(0)
        self.channels = (2 * self.H + self.HV) * K
        one_gate = op.endswith("gated_delta_rule")
        self._gate = () if one_gate else (K,)
        self.arguments: dict[str, Any] = {
            "A_log": torch.rand(self.HV, generator=self._draws).to(device),
            "dt_bias": torch.randn(self.HV, *self._gate, generator=self._draws).to(device),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "inplace_state": True,
            "null_index": 0,
        }
        if not one_gate:
            self.arguments |= {"safe_gate": True, "lower_bound": -5.0}
        if op.startswith("fused_decode"):
            self.arguments |= {"conv_weight": self.draw(self.channels, 4), "norm_weight": self.draw(K)}

    def tokens(self, B: int, T: int) -> dict[str, torch.Tensor]:
        H, HV, K = self.H, self.HV, self.K
        shapes: dict[str, tuple[int, ...]] = {"q": (H, K), "k": (H, K), "v": (HV, K)}
        if self.op.startswith("fused_decode"):
            shapes = {"x": (self.channels,), "z": (HV, K)}
        shapes |= {"g": (HV, *self._gate), "beta": (HV,)}
        return {name: self.draw(B, T, *tail) for name, tail in shapes.items()}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._draws).bfloat16().to(self.device)

    def states(self) -> dict[str, torch.Tensor]:
        """A pool of states, and one of those of the convolution where the op has it."""
        pool = torch.randn(ROWS, self.HV, self.K, self.K, generator=self._draws).to(self.device)
        if not self.op.startswith("fused_decode"):
            return {"initial_state": pool}
        return {"initial_state": pool, "conv_state": self.draw(ROWS, self.channels, 3)}

    def call(self, backend: str, **arrays: Any) -> torch.Tensor:
        """``o`` of a call that reads and writes its states."""
        o: torch.Tensor = getattr(kdacore, self.op)(**self.arguments, **arrays, backend=backend)[0]
        return o


States = dict[str, torch.Tensor]


def copied(states: States) -> States:
    return {name: x.clone() for name, x in states.items()}


def same(one: States, other: States) -> bool:
    return all(torch.equal(x, other[name]) for name, x in one.items())


class DecodeServer:
    """A step of decoding for each of some batch sizes, the buffers of the largest in front."""

    def __init__(self, op: str, backend: str, graphs: Graphs, largest: int = 4) -> None:
        self.backend, self.graphs, self.largest = backend, graphs, largest
        self.model = Model(op, graphs.device)
        self.states = self.model.states()
        self.buffers = self.model.tokens(largest, 1)
        self.indices = torch.zeros(largest, dtype=torch.int32, device=graphs.device)
        self.captured: dict[int, tuple[Any, torch.Tensor]] = {}

    def step(self, size: int, states: States | None = None, backend: str = "") -> torch.Tensor:
        x = {name: b[:size] for name, b in self.buffers.items()}
        states = self.states if states is None else states
        return self.model.call(backend or self.backend, **x, **states, state_indices=self.indices[:size])

    def capture(self, *sizes: int, warm_up: bool = True) -> None:
        """The largest first. Meanwhile no row has a slot, so that the states stay as they are."""
        self.indices.zero_()
        before = copied(self.states)
        for size in sorted(sizes, reverse=True):
            step = functools.partial(self.step, size)
            if warm_up:
                self.graphs.warm_up(step)
            self.captured[size] = self.graphs.capture(step)
        assert same(self.states, before)

    def serve(self, rows: list[int]) -> None:
        """A batch of the sequences in these rows of the pools, by the graph of the next larger size: the bits of an
        eager call of that size, and the numbers of the reference."""
        size = min(n for n in self.captured if n >= len(rows))
        graph, o = self.captured[size]
        for name, x in self.model.tokens(self.largest, 1).items():
            self.buffers[name].copy_(x)
        self.indices.copy_(torch.tensor([*rows, *[0] * (self.largest - len(rows))]))
        eager, exact = copied(self.states), copied(self.states)
        want = self.step(size, eager)
        reference = self.step(size, exact, "reference")
        graph.replay()
        assert torch.equal(o, want) and same(self.states, eager)
        assert error(o[: len(rows)], reference[: len(rows)]) < O_BOUND
        assert all(error(x, exact[name]) < O_BOUND for name, x in self.states.items())
        assert not o[len(rows) :].any()


class PrefillServer:
    """Prompts in packs that are padded to one of some sizes.

    ``whole``: one graph has projections and kdacore's call. Otherwise the call is made between two graphs, as both
    engines do where attention is no part of a graph; it reads what the first left and writes what the second reads.
    """

    def __init__(
        self, op: str, backend: str, graphs: Graphs, *, whole: bool, largest: int, heads: tuple[int, int]
    ) -> None:
        self.backend, self.graphs, self.whole = backend, graphs, whole
        self.model = Model(op, graphs.device, heads)
        self.states = self.model.states()
        tails = {name: x.shape[2:] for name, x in self.model.tokens(1, 1).items()}
        self.weights = {name: self.model.draw(4, *tail) for name, tail in tails.items()}
        self.x = self.model.draw(largest, 4)
        self.offsets = torch.zeros(4, dtype=torch.int32, device=graphs.device)
        self.indices = torch.zeros(3, dtype=torch.int32, device=graphs.device)
        self.captured: dict[int, tuple[list[Callable[[], Any]], torch.Tensor]] = {}

    def _project(self, size: int) -> dict[str, torch.Tensor]:
        """Without products of matrices, whose libraries may compute otherwise inside a capture."""
        found = {}
        for name, w in self.weights.items():
            x = self.x[:size].view(size, 4, *[1] * (w.dim() - 1))
            found[name] = (x * w).sum(1)[None]
        return found

    def _attend(self, x: dict[str, torch.Tensor], states: States, backend: str, **more: Any) -> torch.Tensor:
        rows = {"state_indices": self.indices, "cu_seqlens": self.offsets}
        return self.model.call(backend, **x, **states, **rows, **more)

    def _eager(self, size: int, states: States, backend: str) -> torch.Tensor:
        return self._finish(self._attend(self._project(size), states, backend))

    def _finish(self, o: torch.Tensor) -> torch.Tensor:
        return o[0] * 2

    def capture(self, *sizes: int, warm_up: bool = True) -> None:
        """The largest first. Meanwhile the pack is empty."""
        self.offsets.zero_()
        self.indices.zero_()
        before = copied(self.states)
        for size in sorted(sizes, reverse=True):
            step = functools.partial(self._eager, size, self.states, self.backend)
            # Without a warm-up, of what is around kdacore's call all the same: torch's kernels are no matter here.
            self.graphs.warm_up(step if warm_up else lambda n=size: self._finish(self._project(n)["v"]))  # type: ignore[misc]
            if self.whole:
                graph, y = self.graphs.capture(step)
                self.captured[size] = [graph.replay], y
            else:
                self.captured[size] = self._capture_pieces(size)
        assert same(self.states, before)

    def _capture_pieces(self, size: int) -> tuple[list[Callable[[], Any]], torch.Tensor]:
        first, x = self.graphs.capture(lambda: self._project(size))
        o = torch.zeros_like(x["v"])
        last, y = self.graphs.capture(lambda: self._finish(o))
        return [first.replay, lambda: self._attend(x, self.states, self.backend, out=o), last.replay], y

    def serve(self, lengths: list[int], rows: list[int]) -> None:
        """Prompts of these lengths, which continue the states in these rows."""
        used = sum(lengths)
        size = min(n for n in self.captured if n >= used)
        steps, y = self.captured[size]
        self.x.copy_(self.model.draw(*self.x.shape))
        ends = [0, *itertools.accumulate(lengths)]
        self.offsets.copy_(torch.tensor([*ends, *[used] * (4 - len(ends))]))
        self.indices.copy_(torch.tensor([*rows, *[0] * (3 - len(rows))]))
        eager, exact = copied(self.states), copied(self.states)
        want = self._eager(size, eager, self.backend)
        reference = self._eager(size, exact, "reference")
        for step in steps:
            step()
        assert torch.equal(y[:used], want[:used]) and same(self.states, eager)
        assert error(y[:used], reference[:used]) < O_BOUND
        assert all(error(x, exact[name]) < O_BOUND for name, x in self.states.items())


# --- what the tests on a CPU and on a GPU have in common ------------------------------------------------------------


def decode_by_graphs(op: str, backend: str, graphs: Graphs) -> None:
    """Sizes captured one after another, batches of any size, and sizes captured once more while others are served; in
    inference mode, as engines run."""
    with torch.inference_mode():
        _decode_by_graphs(op, backend, graphs)


def _decode_by_graphs(op: str, backend: str, graphs: Graphs) -> None:
    server = DecodeServer(op, backend, graphs)
    server.capture(1, 2, 4)
    for rows in ([3, 1, 5, 2], [4], [6, 2, 1], [2, 5], [4, 6, 3, 1], [4]):
        server.serve(rows)
    before = server.captured[2][1]
    server.capture(3)  # beside the others
    server.serve([1, 6, 2])
    server.indices.zero_()
    for size in (4, 3, 2, 1):  # all sizes run before the first is captured
        graphs.warm_up(functools.partial(server.step, size))
    server.capture(2, 4)  # in the place of others, whose memory is given back
    assert server.captured[2][1] is not before
    for rows in ([3, 5], [1, 2, 3, 4], [6]):
        server.serve(rows)


def decode_without_a_warm_up(op: str, backend: str, graphs: Graphs) -> None:
    """The first launch of a kernel is inside the capture."""
    server = DecodeServer(op, backend, graphs)
    server.capture(2, warm_up=False)
    server.serve([3, 1])
    server.serve([2])


def prompts_by_graphs(
    op: str,
    backend: str,
    graphs: Graphs,
    *,
    whole: bool,
    sizes: tuple[int, int] = (40, 20),
    heads: tuple[int, int] = (1, 2),
    warm_up: bool = True,
) -> None:
    """Packs of other lengths at every replay, some of them empty."""
    large, small = sizes
    server = PrefillServer(op, backend, graphs, whole=whole, largest=large, heads=heads)
    server.capture(*sizes, warm_up=warm_up)
    server.serve([large - 8, 3, 5], [2, 5, 1])
    server.serve([small - 3], [5])
    server.serve([4, 0, large - 16], [1, 3, 6])


def prompts_and_decoding(op: str, decode: str, backend: str, graphs: Graphs) -> None:
    """A server does both: eager prompts between the steps of a captured decode, on the same pool."""
    server = DecodeServer(decode, backend, graphs)
    server.capture(2, 4)
    prompts = PrefillServer(op, backend, graphs, whole=False, largest=40, heads=(1, 2))
    prompts.states = server.states
    prompts.capture(20, 40)
    for lengths, rows in (([20, 7], [2, 5]), ([4, 9, 13], [1, 3, 6])):
        prompts.serve(lengths, rows)
        server.serve(rows)
        server.serve(rows[:1])
