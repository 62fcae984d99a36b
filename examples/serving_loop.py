"""A serving loop on one KDA layer: continuous batching over a state pool, a prefix cache, speculative decoding.

    python examples/serving_loop.py                     # eight requests, three slots
    python examples/serving_loop.py --requests 20 --slots 4 --drafts 4

The model is small and untrained (a byte embedding, one KDA layer, a linear head, fixed random weights): what is shown
is how a server uses the states, and every request's bytes are compared with those it gets when it is served alone.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kdacore

HEADS, WIDTH, BLOCK = 2, 32, 64
"""``BLOCK``: tokens between the states that a prefill leaves in the prefix cache."""
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}


class Model:
    """Bytes to logits over the next byte, the KDA state apart."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> Any:
            return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[0]))

        self.embedding = rng.standard_normal((256, WIDTH), dtype=np.float32)
        self.project = {name: weights(WIDTH, HEADS * WIDTH) for name in ("q", "k", "v", "g")}
        self.project["beta"] = weights(WIDTH, HEADS)
        self.gate = {
            "A_log": np.zeros(HEADS, np.float32),
            "dt_bias": np.full((HEADS, WIDTH), -4, np.float32),
        }
        self.head = weights(HEADS * WIDTH, 256)

    def inputs(self, tokens: Any) -> dict[str, Any]:
        """``tokens [B, T]`` to the arguments of the KDA ops."""
        x = self.embedding[tokens]
        heads = {n: (x @ w).reshape(*tokens.shape, HEADS, -1) for n, w in self.project.items()}
        heads["beta"] = heads["beta"][..., 0]
        return {**heads, **self.gate, **OPTIONS}

    def next_bytes(self, o: Any) -> Any:
        """The most likely byte after each position of ``o [B, T, HEADS, WIDTH]``."""
        return (o.reshape(*o.shape[:2], -1) @ self.head).argmax(-1)


@dataclass
class Request:
    """One prompt and what was written after it."""

    prompt: bytes
    wanted: int
    written: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.written) >= self.wanted


class Server:
    """Slots of a state pool, each holding the rows of one running request.

    A slot owns ``drafts + 1`` rows: one verification step leaves the state after each of its tokens in a row of its
    own, and the next step starts from the row of the last token that was accepted. Rejecting costs nothing.
    """

    def __init__(self, model: Model, slots: int, drafts: int) -> None:
        self.model, self.width = model, drafts + 1
        self.pool = np.zeros((slots * self.width, HEADS, WIDTH, WIDTH), np.float32)
        self.rows = np.arange(slots * self.width).reshape(slots, self.width)
        self.running: list[Request | None] = [None] * slots
        self.accepted = np.zeros(slots, np.int64)
        self.prefixes: dict[bytes, Any] = {}
        self.calls = self.reused = self.steps = self.kept = 0

    def serve(self, requests: list[Request]) -> None:
        """Run until every request is done; new ones enter as slots fall free."""
        waiting = deque(requests)
        while waiting or any(self.running):
            free = [i for i, r in enumerate(self.running) if r is None]
            admitted = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
            if admitted:
                self.prefill(admitted)
            self.decode()
            self.running = [None if r is None or r.done else r for r in self.running]

    def prefill(self, admitted: list[tuple[int, Request]]) -> None:
        """All new prompts in one packed call, each from the longest prefix whose state is known."""
        starts = [self.known_prefix(r.prompt) for _, r in admitted]
        rest = [np.frombuffer(r.prompt, np.uint8)[n:] for (_, r), n in zip(admitted, starts, strict=True)]
        offsets = np.concatenate([[0], np.cumsum([len(x) for x in rest])])
        zeros = np.zeros(self.pool.shape[1:], np.float32)
        begin = [self.prefixes.get(r.prompt[:n], zeros) for (_, r), n in zip(admitted, starts, strict=True)]
        o, states, blocks = kdacore.chunk_kda(
            **self.model.inputs(np.concatenate(rest)[None]),
            initial_state=np.stack(begin),
            output_final_state=True,
            cu_seqlens=offsets,
            checkpoint_every=BLOCK,
        )
        following = self.model.next_bytes(o)[0, offsets[1:] - 1]
        at = 0
        for i, (slot, request) in enumerate(admitted):
            self.running[slot] = request
            self.pool[self.rows[slot, 0]] = states[i]
            self.accepted[slot] = 1
            request.written.append(int(following[i]))
            for n in range(starts[i], len(request.prompt), BLOCK):
                self.prefixes[request.prompt[:n]] = blocks[at]
                at += 1
            self.reused += starts[i]
        self.calls += 1

    def known_prefix(self, prompt: bytes) -> int:
        """Tokens of the prompt whose state is in the cache; at least one is left to compute."""
        blocks = range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK)
        return next((n for n in blocks if prompt[:n] in self.prefixes), 0)

    def decode(self) -> None:
        """One step for every slot: its last byte and drafted ones, of which the right ones are kept."""
        tokens = np.zeros((len(self.running), self.width), np.int64)
        indices = np.full(self.rows.shape, -1)  # a slot without a request reads zeros and writes nothing
        for slot, request in enumerate(self.running):
            if request is not None:
                tokens[slot] = [request.written[-1], *self.draft(request)]
                indices[slot] = self.rows[slot]
        o, _ = kdacore.fused_recurrent_kda(
            **self.model.inputs(tokens),
            initial_state=self.pool,
            state_indices=indices,
            num_accepted_tokens=self.accepted,
            inplace_state=True,
        )
        following = self.model.next_bytes(o)
        for slot, request in enumerate(self.running):
            if request is None:
                continue
            right = tokens[slot, 1:] == following[slot, :-1]
            good = 1 + int(np.cumprod(right).sum())
            request.written += following[slot, :good].tolist()
            self.accepted[slot] = good
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
    tokens = np.frombuffer(prompt, np.uint8)[None]
    o, state = kdacore.chunk_kda(**model.inputs(tokens), output_final_state=True)
    written = [int(model.next_bytes(o)[0, -1])]
    while len(written) < wanted:
        token = model.inputs(np.array([[written[-1]]]))
        o, state = kdacore.fused_recurrent_kda(**token, initial_state=state, output_final_state=True)
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
    print(
        f"{server.calls} packed prefills; {server.reused} of {prompts} prompt bytes came from the prefix cache"
    )
    print(f"{server.kept / server.steps:.2f} bytes kept a decoding step, of {1 + options.drafts} tried")
    wrong = [i for i, r in enumerate(requests) if r.written[: r.wanted] != alone(model, r.prompt, r.wanted)]
    print("each request got the bytes it gets alone" if not wrong else f"requests {wrong} got other bytes")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
