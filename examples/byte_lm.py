"""A byte-level language model with KDA layers: trained through chunk_kda, sampled through fused_recurrent_kda.

    python examples/byte_lm.py                    # trains for two minutes on the standard library's sources
    python examples/byte_lm.py --seconds 20       # a shorter look
    python examples/byte_lm.py --goal 3.2         # exit 1 unless held-out bits per byte end below 3.2

The text is the Python that runs this file, so nothing is downloaded. Bits per byte start near 8 (a uniform guess)
and are measured on files the model never saw.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import kdacore

LOWER_BOUND = -5.0
CONV = 4
"""Taps of the short causal convolution before q, k and v."""


class KDALayer(nn.Module):
    """Kimi Delta Attention with a short convolution, a bounded gate and a gated output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * width, 1, CONV) / CONV)
        self.gate = nn.Linear(width, width)
        self.beta = nn.Linear(width, heads)
        self.A_log = nn.Parameter(torch.zeros(heads))
        # Half-lives from a few tokens to a few thousand, spread over the channels.
        self.dt_bias = nn.Parameter(torch.linspace(-8.0, -1.0, width).reshape(heads, self.dim))
        self.norm = nn.RMSNorm(self.dim)
        self.out_gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cache: dict[str, Any] | None = None) -> torch.Tensor:
        """``x [B, T, width]``. With a cache, continues from it (one or a few tokens) and updates it."""
        B, T, _ = x.shape
        heads = (B, T, self.heads, self.dim)
        qkv = self.qkv(x)
        before = qkv.new_zeros(B, CONV - 1, qkv.shape[-1]) if cache is None else cache["conv"]
        joined = torch.cat([before, qkv], dim=1)
        mixed = F.silu(F.conv1d(joined.transpose(1, 2), self.taps, groups=qkv.shape[-1])).transpose(1, 2)
        q, k, v = (part.reshape(heads) for part in mixed.chunk(3, dim=-1))
        arguments = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_gate_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "safe_gate": True,
            "lower_bound": LOWER_BOUND,
        }
        g, beta = self.gate(x).reshape(heads), self.beta(x)
        if cache is None:
            o, _ = kdacore.chunk_kda(q, k, v, g, beta, **arguments)
        else:
            o, cache["state"] = kdacore.fused_recurrent_kda(
                q, k, v, g, beta, initial_state=cache["state"], output_final_state=True, **arguments
            )
            cache["conv"] = joined[:, -(CONV - 1) :]
        o = self.norm(o).reshape(B, T, -1) * F.silu(self.out_gate(x))
        return self.out(o)

    def empty_cache(self) -> dict[str, Any]:
        """What a fresh sequence starts from."""
        width = self.heads * self.dim
        return {
            "conv": torch.zeros(1, CONV - 1, 3 * width),
            "state": torch.zeros(1, self.heads, self.dim, self.dim),
        }


class ByteLM(nn.Module):
    """Bytes in, logits over the next byte out."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mixers = nn.ModuleList(KDALayer(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.zeros_(self.head.weight)  # training starts from the uniform guess, 8 bits

    def forward(self, tokens: torch.Tensor, caches: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """``tokens [B, T]`` to logits ``[B, T, 256]``."""
        x = self.embed(tokens)
        for i, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * i](x), caches[i] if caches is not None else None)
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def read_sources(limit: int = 6_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes: standard-library files in a fixed shuffled order, whole files held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    texts = [f.read_bytes() for f in files]
    held, train = b"\n".join(texts[:8]), b"\n".join(texts[8:])[:limit]
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(
        bytearray(held), dtype=torch.uint8
    )


def batches(data: torch.Tensor, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Random windows of ``length + 1`` bytes, forever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - length - 1, (batch,), generator=generator)
        yield torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long()


def bits_per_byte(model: ByteLM, window: torch.Tensor) -> torch.Tensor:
    """Mean bits the model needs for each byte of a batch of windows."""
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()) / math.log(2)


def train(model: ByteLM, data: torch.Tensor, seconds: float, batch: int, length: int) -> list[float]:
    """Train for a fixed wall-clock time, printing progress. Returns the bits per byte of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    history: list[float] = []
    start = shown = time.perf_counter()
    for window in batches(data, batch, length, seed=0):
        now = time.perf_counter()
        if now - start > seconds:
            break
        done = (now - start) / seconds
        for group in optimizer.param_groups:  # warm up, then decay to a tenth
            group["lr"] = 3e-3 * min(1.0, (len(history) + 1) / 20) * (1.0 - 0.9 * done)
        loss = bits_per_byte(model, window)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        if len(history) == 1 or now - shown > 5:
            shown = now
            print(
                f"  {now - start:5.0f} s  step {len(history):4d}  {history[-1]:.3f} bits per byte", flush=True
            )
    return history


@torch.no_grad()
def evaluate(model: ByteLM, data: torch.Tensor, length: int, windows: int = 32) -> float:
    """Bits per byte on held-out text."""
    source = batches(data, 8, length, seed=1)
    return sum(bits_per_byte(model, next(source)).item() for _ in range(windows // 8)) / (windows // 8)


@torch.no_grad()
def sample(model: ByteLM, prompt: bytes, count: int, temperature: float = 0.7) -> bytes:
    """Continue a prompt, one fused_recurrent_kda call a layer and byte."""
    generator = torch.Generator().manual_seed(0)
    caches = [mixer.empty_cache() for mixer in model.mixers]
    logits = model(torch.tensor([list(prompt)]), caches)[0, -1]
    out = bytearray()
    for _ in range(count):
        byte = int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator))
        out.append(byte)
        logits = model(torch.tensor([[byte]]), caches)[0, -1]
    return bytes(out)


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate, sample. Returns the held-out bits per byte."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="training time (default 120)")
    parser.add_argument("--batch", type=int, default=16, help="windows a step (default 16)")
    parser.add_argument("--length", type=int, default=128, help="bytes a window (default 128)")
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end (default 200)")
    parser.add_argument("--goal", type=float, help="fail unless held-out bits per byte end below this")
    options = parser.parse_args(arguments)
    # Its operations are small: two threads gain a quarter, and beside a busy neighbour they wait for each other in
    # every one of them (28 steps instead of 956 in two minutes).
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteLM()
    data, held = read_sources()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data):,} training bytes")
    with kdacore.record_selections() as ran:
        before = evaluate(model, held, options.length)
        print(f"held-out before training: {before:.3f} bits per byte")
        history = train(model, data, options.seconds, options.batch, options.length)
        after = evaluate(model, held, options.length)
        text = sample(model, b"def ", options.sample)
    backends = sorted({f"{s.op} on {s.backend}" for s in ran})
    print(f"held-out after {len(history)} steps: {after:.3f} bits per byte ({', '.join(backends)})")
    print("sample:\ndef " + text.decode("utf-8", "replace"))
    if options.goal is not None and not after < options.goal:
        raise SystemExit(f"{after:.3f} bits per byte; wanted less than {options.goal}")
    return after


if __name__ == "__main__":
    main()
