"""A serving loop on one KDA layer: continuous batching over a pool of states, as serving engines do it.

Prompts are prefilled in pieces from the pool and into it, states of their prefixes are kept for later requests, drafted
bytes are verified with one state a request, and every call has shapes that do not change.

    python examples/serving_loop.py                     # eight requests, three slots
    python examples/serving_loop.py --requests 20 --slots 4 --drafts 4

The model is small and untrained (a byte embedding, one layer of Kimi Linear, a linear head, fixed random weights): what
is shown is how a server uses the states, and every request's bytes are compared with those it gets when it is served
alone.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kdacore

HEADS, WIDTH, TAPS = 2, 32, 4
CHANNELS = 3 * HEADS * WIDTH
"""Of q, k and v together, which go through a causal convolution of ``TAPS`` tokens."""
BUDGET, BLOCK, GRID = 96, 64, 16
"""Tokens of a prefill call; tokens between the states that it leaves in the prefix cache; and the multiple at which a
prompt may be cut, so that these states lie where the op can keep them."""
NO_SLOT = 0
"""A row that nobody owns."""
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}


class Model:
    """Bytes to logits over the next byte, the states apart."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> Any:
            return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[0]))

        self.embedding = rng.standard_normal((256, WIDTH), dtype=np.float32)
        self.project = {"x": weights(WIDTH, CHANNELS), "beta": weights(WIDTH, HEADS)}
        self.project |= {name: weights(WIDTH, HEADS * WIDTH) for name in ("g", "z")}
        self.gate = {
            "A_log": np.zeros(HEADS, np.float32),
            "dt_bias": np.full((HEADS, WIDTH), -4, np.float32),
        }
        self.around = {
            "conv_weight": rng.standard_normal((CHANNELS, TAPS), dtype=np.float32),
            "norm_weight": np.ones(WIDTH, np.float32),
        }
        self.head = weights(HEADS * WIDTH, 256)

    def inputs(self, tokens: Any) -> dict[str, Any]:
        """``tokens [B, T]`` to what the layer's convolution, recurrence and norm read."""
        x = self.embedding[tokens]
        found = {name: x @ w for name, w in self.project.items()}
        return found | {n: found[n].reshape(*tokens.shape, HEADS, WIDTH) for n in ("g", "z")}

    def convolved(self, line: Any) -> Any:
        """The convolution and SiLU of the rows of ``line`` that have ``TAPS - 1`` rows before them."""
        count = len(line) - (TAPS - 1)
        y = sum(line[j : j + count] * self.around["conv_weight"][:, j] for j in range(TAPS))
        return y / (1 + np.exp(-y))

    def prefill(self, convolved: Any, x: dict[str, Any], **more: Any) -> Any:
        """``chunk_kda`` and the gated norm. Decoding has one op for all; a long prompt has time for several."""
        q, k, v = (a.reshape(*a.shape[:2], HEADS, WIDTH) for a in np.split(convolved, 3, axis=-1))
        o, state = kdacore.chunk_kda(q, k, v, x["g"], x["beta"], **self.gate, **OPTIONS, **more)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + 1e-5) * self.around["norm_weight"]
        return o / (1 + np.exp(-x["z"])), state

    def decode(self, tokens: Any, **more: Any) -> Any:
        """A step of the whole layer. ``tokens [B, T]``, a few for each sequence."""
        return kdacore.fused_decode_kda(
            **self.inputs(tokens), **self.around, **self.gate, **OPTIONS, inplace_state=True, **more
        )[0]

    def next_bytes(self, o: Any) -> Any:
        """The most likely byte after each position of ``o [B, T, HEADS, WIDTH]``."""
        return (o.reshape(*o.shape[:2], -1) @ self.head).argmax(-1)


@dataclass
class Request:
    """One prompt and what was written after it."""

    prompt: bytes
    wanted: int
    computed: int = 0
    """Tokens of the prompt whose state is in the slot's row."""
    written: list[int] = field(default_factory=list)

    @property
    def in_prompt(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def done(self) -> bool:
        return len(self.written) >= self.wanted


class Server:
    """Requests that share one pool of states. Every call has the same shapes whatever there is to do, as one that is
    captured into a CUDA graph must have: empty sequences, padding tokens and row 0, which is no slot, fill it up.

    A slot owns one row of the pools of states and of convolution windows. A step that tries drafted bytes leaves the
    state as it is and writes a record of what each byte would do to it; the next step is told how many were right, and
    applies their records first.
    """

    def __init__(self, model: Model, slots: int, drafts: int, cached: int = 16) -> None:
        self.model, self.slots, self.width = model, slots, drafts + 1
        rows = 1 + slots + cached
        self.row = np.arange(1, 1 + slots)
        """Of each slot, in all pools."""
        self.pool = np.zeros((rows, HEADS, WIDTH, WIDTH), np.float32)
        self.windows = np.zeros((rows, CHANNELS, TAPS - 1 + drafts), np.float32)
        """The last rows before the convolution; with room for those of drafted bytes."""
        self.records = tuple(np.zeros((1 + slots, self.width, HEADS, WIDTH), np.float32) for _ in range(3))
        self.right = np.zeros(slots, np.int64)
        """Records of each slot that belong to its text and are not in its state yet."""
        self.running: list[Request | None] = [None] * slots
        self.prefixes: dict[bytes, int] = {}
        """Row of the state after each known prefix, the oldest first."""
        self.free = list(range(1 + slots, rows))
        self.calls = self.reused = self.steps = self.kept = 0

    def serve(self, requests: list[Request]) -> None:
        """Run until every request is done; new ones enter as slots fall free."""
        waiting = deque(requests)
        while waiting or any(self.running):
            for slot, request in enumerate(self.running):
                if request is None and waiting:
                    self.running[slot] = waiting.popleft()
            if any(r is not None and r.in_prompt for r in self.running):
                self.prefill()
            if any(r is not None and not r.in_prompt for r in self.running):
                self.decode()
            self.running = [None if r is None or r.done else r for r in self.running]

    def prefill(self) -> None:
        """The next ``BUDGET`` tokens of all prompts that are not through, packed into one padded call."""
        reads, fresh = np.full(self.slots, NO_SLOT), np.zeros(self.slots, bool)
        lengths, tokens = np.zeros(self.slots, np.int64), np.zeros(BUDGET, np.int64)
        kept: list[tuple[int, bytes]] = []  # a token of the pack, and the prefix before it
        for slot, request in enumerate(self.running):
            start = int(lengths.sum())
            if request is None or not request.in_prompt:
                continue
            reads[slot] = self.row[slot]
            if request.computed == 0:
                fresh[slot] = True
                known = self.known_prefix(request.prompt)
                if known:
                    reads[slot], fresh[slot] = self.prefixes[request.prompt[:known]], False
                    request.computed = known
                    self.reused += known
            left = len(request.prompt) - request.computed
            n = left if left <= BUDGET - start else (BUDGET - start) // GRID * GRID
            piece = request.prompt[request.computed : request.computed + n]
            lengths[slot], tokens[start : start + n] = n, list(piece)
            first = max(BLOCK, -(-request.computed // BLOCK) * BLOCK)
            for at in range(first, request.computed + n, BLOCK):
                prefix = request.prompt[:at]
                if prefix not in self.prefixes and prefix not in [p for _, p in kept]:
                    kept.append((start + at - request.computed, prefix))
        offsets, to = self.place(kept, in_use=set(reads.tolist()))
        ends = np.cumsum(lengths)
        x = self.model.inputs(tokens[None])
        o, _ = self.model.prefill(
            self.convolve(x["x"][0], ends, reads, fresh, offsets, to)[None],
            x,
            cu_seqlens=np.concatenate([[0], ends]),
            initial_state=self.pool,
            state_indices=reads,
            has_initial_state=~fresh,
            write_indices=self.row,
            checkpoint_offsets=offsets,
            checkpoint_indices=to,
            inplace_state=True,
            null_index=NO_SLOT,
        )
        self.calls += 1
        following = self.model.next_bytes(o)[0]
        for slot, request in enumerate(self.running):
            if request is not None and request.in_prompt:
                request.computed += int(lengths[slot])
                self.right[slot] = 0  # the state is that of the text
                if not request.in_prompt:
                    request.written.append(int(following[ends[slot] - 1]))

    def convolve(self, x: Any, ends: Any, reads: Any, fresh: Any, offsets: Any, to: Any) -> Any:
        """The convolution of a pack, with the window before each sequence; and the windows that go with the states
        that the call writes."""
        found = np.zeros_like(x)
        for slot in np.flatnonzero(reads != NO_SLOT):
            start, end = ends[slot - 1] if slot else 0, ends[slot]
            window = self.windows[reads[slot], :, : TAPS - 1].T
            line = np.concatenate([np.zeros_like(window) if fresh[slot] else window, x[start:end]])
            found[start:end] = self.model.convolved(line)
            inside = (to != NO_SLOT) & (start <= offsets) & (offsets < end)
            for row, at in [(self.row[slot], end), *zip(to[inside], offsets[inside], strict=True)]:
                self.windows[row, :, : TAPS - 1] = line[at - start :][: TAPS - 1].T
        return found

    def known_prefix(self, prompt: bytes) -> int:
        """Tokens of the prompt whose state is in the cache; at least one is left to compute."""
        blocks = range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK)
        return next((n for n in blocks if prompt[:n] in self.prefixes), 0)

    def place(self, kept: list[tuple[int, bytes]], in_use: set[int]) -> tuple[Any, Any]:
        """Offsets and rows of the states that the call leaves in the cache, always as many: ``NO_SLOT`` fills up.

        The oldest states make room, except those that the call starts from.
        """
        most = BUDGET // BLOCK + self.slots
        offsets, rows = np.zeros(most, np.int64), np.full(most, NO_SLOT)
        for i, (offset, prefix) in enumerate(kept):
            if not self.free:
                old = next((p for p, row in self.prefixes.items() if row not in in_use), None)
                if old is None:
                    break
                self.free.append(self.prefixes.pop(old))
            offsets[i], rows[i] = offset, self.free.pop()
            self.prefixes[prefix] = int(rows[i])
            in_use.add(int(rows[i]))
        return offsets, rows

    def decode(self) -> None:
        """One step for every slot: its last byte and drafted ones, of which the right ones are kept."""
        tokens = np.zeros((self.slots, self.width), np.int64)
        rows = np.full(self.slots, NO_SLOT)
        for slot, request in enumerate(self.running):
            if request is not None and not request.in_prompt:
                tokens[slot] = [request.written[-1], *self.draft(request)]
                rows[slot] = self.row[slot]
        o = self.model.decode(
            tokens,
            initial_state=self.pool,
            conv_state=self.windows,
            state_indices=rows,
            records=self.records,
            record_indices=rows,
            num_replayed=self.right,
            null_index=NO_SLOT,
        )
        following = self.model.next_bytes(o)
        for slot in np.flatnonzero(rows != NO_SLOT):
            request = self.running[slot]
            right = tokens[slot, 1:] == following[slot, :-1]
            good = 1 + int(np.cumprod(right).sum())
            self.right[slot] = good
            request.written += following[slot, :good].tolist()
            self.kept += good
            self.steps += 1

    def draft(self, request: Request) -> list[int]:
        """A guess at the next bytes: what followed the last occurrence of the last byte."""
        text = [*request.prompt, *request.written]
        last = next((i for i in range(len(text) - 2, -1, -1) if text[i] == text[-1]), len(text) - 1)
        guess = text[last + 1 : last + self.width]
        return guess + [0] * (self.width - 1 - len(guess))


def alone(model: Model, prompt: bytes, wanted: int) -> list[int]:
    """The same bytes the plain way: one request, one token a call."""
    x = model.inputs(np.frombuffer(prompt, np.uint8)[None])
    line = np.concatenate([np.zeros((TAPS - 1, CHANNELS), np.float32), x["x"][0]])
    o, state = model.prefill(model.convolved(line)[None], x, output_final_state=True)
    window = line[None, 1 - TAPS :].swapaxes(1, 2).copy()
    written = [int(model.next_bytes(o)[0, -1])]
    while len(written) < wanted:
        o = model.decode(np.array([[written[-1]]]), initial_state=state, conv_state=window)
        written.append(int(model.next_bytes(o)[0, -1]))
    return written


def make_requests(count: int) -> list[Request]:
    """Prompts of different lengths, most of which begin alike, as those of one application do."""
    shared = (
        b"You are a careful assistant. Answer in one sentence and name the source of every number you give.\n"
    )
    return [
        Request(shared * (i % 3 > 0) + b"Question %d: why?" % i * (1 + i % 4), 12 + 5 * i % 23)
        for i in range(count)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Serve, compare, report. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3, help="requests that run at the same time")
    parser.add_argument("--drafts", type=int, default=3, help="guessed bytes a step (0 to 15)")
    options = parser.parse_args(arguments)
    if min(options.requests, options.slots) < 1 or not 0 <= options.drafts <= 15:
        parser.error("--requests and --slots are at least 1, --drafts is 0 to 15")
    model = Model()
    requests = make_requests(options.requests)
    server = Server(model, options.slots, options.drafts)
    with kdacore.record_selections() as ran:
        server.serve(requests)
    backends = ", ".join(sorted({f"{s.op} on {s.backend}" for s in ran}))
    prompts = sum(len(r.prompt) for r in requests)
    print(f"{len(requests)} requests through {options.slots} slots ({backends})")
    reused = f"{server.reused} of {prompts} prompt bytes came from the prefix cache"
    print(f"{server.calls} prefills of {BUDGET} tokens; {reused}")
    print(f"{server.kept / server.steps:.2f} bytes kept a decoding step, of {1 + options.drafts} tried")
    wrong = [i for i, r in enumerate(requests) if r.written[: r.wanted] != alone(model, r.prompt, r.wanted)]
    print("each request got the bytes it gets alone" if not wrong else f"requests {wrong} got other bytes")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
