"""One long row on several processes: a small model trained on slices of it, beside the same model on the whole row.

    torchrun --nproc-per-node 4 examples/long_context.py                    # CPU processes over gloo
    torchrun --nproc-per-node 8 examples/long_context.py --tokens 1048576 --heads 16 --dim 128 --no-check   # GPUs

Each process holds ``tokens / processes`` tokens of the row. With ``--check``, the default, every process also trains
the model on the whole row, without ``cp=``, and the program ends with an error where the losses differ.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import kdacore


class Layer(nn.Module):
    """Projections around ``chunk_kda``."""

    def __init__(self, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.shape = heads, dim
        self.qkvg = nn.Linear(width, 4 * heads * dim, bias=False)
        self.beta = nn.Linear(width, heads)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.linspace(-8.0, -1.0, heads * dim).reshape(heads, dim))
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x: torch.Tensor, cp: Any) -> torch.Tensor:
        """``x [1, T, width]``: the whole row without ``cp``, this rank's slice with it."""
        heads, dim = self.shape
        q, k, v, g = self.qkvg(x).reshape(*x.shape[:2], 4, heads, dim).unbind(2)
        o, _ = kdacore.chunk_kda(
            q, k, v, g, self.beta(x), A_log=self.A_log, dt_bias=self.dt_bias, cp=cp,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=True, lower_bound=-5.0,
        )  # fmt: skip
        return x + self.out(o.flatten(2))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int, heads: int, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList([Layer(width, heads, dim) for _ in range(layers)])
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, cp: Any = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(F.layer_norm(x, x.shape[-1:]), cp)
        return self.head(x)


def slice_of(row: torch.Tensor, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens and labels. The label of its last token is the first token of the next rank."""
    T = (row.shape[1] - 1) // ranks
    at = rank * T
    return row[:, at : at + T], row[:, at + 1 : at + T + 1]


def train(model: Model, row: torch.Tensor, steps: int, cp: Any) -> list[float]:
    """Losses of a few steps, over the whole row."""
    ranks, rank = (1, 0) if cp is None else (dist.get_world_size(cp), dist.get_rank(cp))
    tokens, labels = slice_of(row, rank, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens, cp).flatten(0, 1).float(), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        if cp is not None:  # what DDP and FSDP do over the flattened mesh of dp and cp
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=cp)
                parameter.grad /= ranks
        optimizer.step()
        total = loss.detach().clone()
        if cp is not None:
            dist.all_reduce(total, group=cp)
        losses.append(float(total) / ranks)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of the whole row")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(97, 123, (1, args.tokens + 1), generator=generator).to(device)

    def model() -> Model:
        torch.manual_seed(1)
        made = Model(args.heads * args.dim, args.heads, args.dim, args.layers).to(device, dtype)
        for layer in made.layers:
            layer.A_log.data = layer.A_log.data.float()
        return made

    begun = time.perf_counter()
    losses = train(model(), row, args.steps, dist.group.WORLD)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {args.tokens} tokens:", *[f"{x:.4f}" for x in losses])
        print(f"{(time.perf_counter() - begun) / args.steps * 1e3:.0f} ms a step")
    if args.check:
        alone = train(model(), row, args.steps, None)
        worst = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        if worst > (0.02 if on_gpu else 1e-3):
            raise SystemExit(f"one process alone: {alone}; the losses differ by {worst:.2g}")
        if dist.get_rank() == 0:
            print(f"one process alone: within {worst:.1g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
