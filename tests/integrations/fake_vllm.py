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


def source(name: str, function: str) -> str:
    """A definition named ``name`` with the signature of a published function, given by its full name."""
    package, _, function = function.rpartition(".")
    files = {full: rows for full, rows in PUBLISHED["functions"].items() if full.endswith(f"::{function}")}
    (rows,) = [rows for full, rows in files.items() if full.startswith(package.replace(".", "/"))]
    return _definition(name, rows)


def _definition(name: str, rows: list[list[str]]) -> str:
    parameters = [f"**{n}" if kind == "others" else f"{n}={d}" if d else n for kind, n, d in rows]
    return f"def {name}({', '.join(parameters)}):\n    return {BY_VLLM!r}\n"


def layers() -> dict[str, str]:
    """The modules of layers: the functions that they import and that are replaced, and such methods."""
    found = {}
    for file, names in PUBLISHED["imports"].items():
        text = "\n".join(source(*both) for both in names.items())
        for full, rows in PUBLISHED["functions"].items():
            where, _, method = full.partition("::")
            if where == file and "." in method:
                owner, _, name = method.partition(".")
                body = _definition(name, [["positional", "self", ""], *rows])
                text += f"class {owner}:\n{textwrap.indent(body, '    ')}"
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
