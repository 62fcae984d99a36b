"""Packages with vLLM's names, whose functions have the published signatures and say that vLLM computed."""

from __future__ import annotations

import importlib
import json
import math
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from published_sources import FACTS

from kdacore.integrations import vllm

PUBLISHED: dict[str, Any] = json.loads(FACTS.read_text())["vllm"]
BY_VLLM = "computed by vLLM"
FORWARD_CONTEXT = "vllm.forward_context"
SUPPORT = {
    FORWARD_CONTEXT: "current = None\ndef get_forward_context():\n    assert current is not None\n    return current\n",
    "vllm.compilation.breakable_cudagraph": (
        "import functools\n"
        "def eager_break_during_capture(fn):\n"
        "    @functools.wraps(fn)\n"
        "    def wrapper(*args, **kwargs):\n"
        "        return fn(*args, **kwargs)\n"
        "    return wrapper\n"
    ),
    "vllm.model_executor.layers.mamba.ops.causal_conv1d": "from fake_vllm import causal_conv1d_fn\n",
}
"""What hooks import of vLLM, by module."""


def source(name: str, function: str) -> str:
    """A definition named ``name`` with the signature of a published function, given by its full name."""
    package, _, function = function.rpartition(".")
    files = {full: rows for full, rows in PUBLISHED["functions"].items() if full.endswith(f"::{function}")}
    (rows,) = [rows for full, rows in files.items() if full.startswith(package.replace(".", "/"))]
    return _definition(name, rows)


def _definition(name: str, rows: list[list[str]]) -> str:
    parameters = [f"**{n}" if kind == "others" else f"{n}={d}" if d else n for kind, n, d in rows]
    return f"def {name}({', '.join(parameters)}):\n    return {BY_VLLM!r}\n"


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str,
    metadata: Any,
) -> torch.Tensor:
    """vLLM's convolution with SiLU of packed sequences ``[D, T]``, whose windows ``[rows, D, L]`` it writes."""
    assert activation == "silu" and metadata is not None
    y, width = torch.zeros_like(x), weight.shape[1]
    offsets = query_start_loc.tolist()
    for n, (row, begun) in enumerate(zip(cache_indices.tolist(), has_initial_state.tolist(), strict=True)):
        here = slice(offsets[n], offsets[n + 1])
        if here.start == here.stop:
            continue
        window = conv_states[row, :, : width - 1] if begun else torch.zeros(x.shape[0], width - 1)
        line = torch.cat([window, x[:, here]], dim=1)
        y[:, here] = torch.nn.functional.silu(
            torch.nn.functional.conv1d(line[None], weight[:, None], bias, groups=x.shape[0])[0]
        )
        conv_states[row, :, : width - 1] = line[:, line.shape[1] - width + 1 :]
    return y


def layers() -> dict[str, str]:
    """The modules of layers: the functions that they import or define and that are replaced, and such methods; and what
    hooks import."""
    found = dict(SUPPORT)
    of_methods = [name.partition("::")[0] for name in PUBLISHED["attributes"]]
    for file in dict.fromkeys([*PUBLISHED["imports"], *of_methods]):
        names = PUBLISHED["imports"].get(file, {})
        text = "\n".join(source(*both) for both in names.items())
        classes: dict[str, str] = {}
        for full, rows in PUBLISHED["functions"].items():
            where, _, method = full.partition("::")
            if where == file and "." not in method:
                text += _definition(method, rows)
            elif where == file:
                owner, _, name = method.partition(".")
                body = _definition(name, [["positional", "self", ""], *rows])
                classes[owner] = classes.get(owner, "") + textwrap.indent(body, "    ")
        text += "".join(f"class {owner}:\n{body}" for owner, body in classes.items())
        found[file.removesuffix(".py").replace("/", ".")] = text
    return found


@contextmanager
def packages(folder: Path, sources: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Modules by name, imported from ``folder`` once vLLM's hooks were activated, and forgotten afterwards."""
    for module, text in sources.items():
        place = folder.joinpath(*module.split("."))
        place.mkdir(parents=True)
        (place / "__init__.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    vllm.activate()
    try:
        yield {module: importlib.import_module(module) for module in sources}
    finally:
        vllm.deactivate()
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o [T, HV, V]`` and the state ``[HV, V, K]`` after the tokens of one sequence, step by step in float64.

    q and k ``[T, H, K]``, normalised with ``norm``; log decays ``[T, HV]`` or ``[T, HV, K]``.
    """
    q, k, v, beta, S = (x.double() for x in (q, k, v, beta, state))
    if norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    decay = log_decay.double().exp().reshape(*log_decay.shape[:2], 1, -1)
    o = [torch.empty(0, *v.shape[1:])]
    for t in range(v.shape[0]):
        S = S * decay[t]
        error = v[t] - torch.einsum("hvk,hk->hv", S, k[t])
        S = S + beta[t][:, None, None] * error[:, :, None] * k[t][:, None, :]
        o.append(torch.einsum("hvk,hk->hv", S, q[t])[None])
    return torch.cat(o), S


def paged_pool(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that lie far apart, with NaN between them and in row 0."""
    size = math.prod(shape)
    pool = torch.full((rows, 3 * size), torch.nan, dtype=dtype)[:, :size].unflatten(-1, shape)
    pool[1:] = torch.randn(rows - 1, *shape).to(dtype)
    return pool


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 2e-5) -> None:
    x, y = got.double(), want.double()
    assert x.shape == y.shape and torch.isfinite(x).all()
    assert (x - y).norm() <= bound * y.norm()


class Counts:
    """Calls of one hooked function that were served and declined since this was made."""

    def __init__(self, function: str) -> None:
        self.function = function
        self._before = self._now()

    def _now(self) -> Any:
        (hook,) = [h for h in vllm.status() if h.function == self.function]
        return hook

    @property
    def served(self) -> int:
        return self._now().served - self._before.served

    @property
    def declined(self) -> int:
        return self._now().declined - self._before.declined

    @property
    def reason(self) -> str:
        return self._now().reason
