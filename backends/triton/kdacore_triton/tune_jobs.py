"""The jobs of ``kdacore tune configs``: one for each shipped rule, at a shape that the rule matches; and the data file
that their outcomes make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdacore.command_types import Config, ConfigTuner, TuningJob
from kdacore.types import ChunkInputs, Device, IntraInputs, RecurrentInputs, Request
from kdacore_triton import configs
from kdacore_triton.gate_families import EXAMPLE_OPTIONS

if TYPE_CHECKING:
    import torch

OPS = {"fused_recurrent_kda": "recurrent", "chunk_kda": "chunk_forward", "kda_chunk_intra": "chunk_intra"}
"""Op -> the kernel whose configurations serve it, as the data files call it."""

_IDLE = {
    "token": ("diagonal_BK", "diagonal_warps", "diagonal_stages"),
    "chunk": ("heads", "token_warps"),
}
"""Parameters of the other form of the intra-chunk stage."""

Sizes = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One rule to find a configuration for."""

    op: str
    kernel: str
    when: Mapping[str, Any]
    config: configs.Config
    """What is shipped for it: where the search starts."""
    sizes: Sizes
    """B, T, H, K and the like, of a call that falls under the rule."""

    @property
    def name(self) -> str:
        """The op and the rule in one line."""
        rule = ", ".join(f"{k} {_condition(v)}" for k, v in self.when.items())
        return f"{self.op}: {rule or 'everything else'}"

    @property
    def parameters(self) -> Iterable[str]:
        """What ``candidates.json`` lists for the kernel."""
        return configs.spaces()[self.kernel].params

    def neighbours(self, config: Config, parameter: str) -> Iterator[Config]:
        """Legal configurations that differ in this parameter."""
        if self.kernel == "chunk_intra" and parameter in _IDLE[config["form"]]:
            return
        space = configs.spaces()[self.kernel]
        for value in space.params[parameter]:
            other = {**config, parameter: value}
            if value != config[parameter] and space.allows(other):
                yield other

    def call(self, device: Device) -> tuple[Request, Any]:
        """A call of the job's sizes, its arrays filled at random on the device."""
        return make(self, self.sizes, device)

    def small_call(self, device: Device) -> tuple[Request, Any]:
        """The same kind of call, small enough for the oracle."""
        return make(self, small(self.sizes), device)

    def run(self, config: Config, request: Request, inputs: Any) -> Any:
        """The backend function that the kernel serves, with one configuration."""
        with configs.override(self.kernel, config):
            return runner(self)(request, inputs)


def jobs(arch: str, ops: tuple[str, ...] = ()) -> list[Job]:
    """A job for every rule an architecture is served by, for these ops (default: all).

    A last rule that no shape reaches is there to complete the file, and is no job.
    """
    shape = {"recurrent": _recurrent_sizes, "chunk_forward": _chunk_sizes, "chunk_intra": _intra_sizes}
    found = []
    for op in ops or tuple(OPS):
        choices = [c for c in configs.shipped_for(arch) if c.kernel == OPS[op]]
        for choice in choices:
            sizes = shape[choice.kernel](choice.when)
            if next(c for c in choices if c.matches(shape_class(choice.kernel, sizes))) is choice:
                found.append(Job(op, choice.kernel, choice.when, choice.config, sizes))
    return found


def tuner() -> ConfigTuner:
    """The launch configurations of the Triton kernels."""
    return ConfigTuner("triton", jobs, write)


def write(path: Path, arch: str, chosen: Sequence[tuple[TuningJob, Config]]) -> None:
    """Write ``<arch>.json``: the tuned rules, and what is shipped for the kernels not tuned; one rule a line.

    Raises:
        InvalidConfigError: it would not be a legal file.
    """
    kernels = []
    for kernel, choices in data_file(arch, chosen).items():
        lines = ",\n".join(f"    {json.dumps(rule)}" for rule in choices)
        kernels.append(f"  {json.dumps(kernel)}: [\n{lines}\n  ]")
    path.write_text("{\n" + ",\n".join(kernels) + "\n}\n", encoding="utf-8")


def data_file(arch: str, chosen: Sequence[tuple[TuningJob, Config]]) -> dict[str, list[dict[str, Any]]]:
    """The rules of each kernel as :func:`write` writes them."""
    rules: dict[str, list[dict[str, Any]]] = {}
    for choice in configs.shipped_for(arch):
        tuned = (c for job, c in chosen if OPS.get(job.op) == choice.kernel and job.when == choice.when)
        config = dict(next(tuned, choice.config))
        rules.setdefault(choice.kernel, []).append({"when": dict(choice.when), "config": config})
    configs.check(f"{arch}.json", arch, rules)
    return rules


def shape_class(kernel: str, s: Sizes) -> Sizes:
    """The keys that rules are chosen by, for a call of these sizes."""
    K, rows = s["K"], s["B"] * s["H"]
    if kernel == "recurrent":
        return {"K": K, "V": K, "rows": rows, "state": s["state"], "v_first": s["v_first"]}
    if kernel == "chunk_intra":
        return {"K": K, "C": s["C"], "dtype": s["dtype"]}
    half = s["dtype"] != "float32"
    return {"gate": s["gate"], "K": K, "V": K, "half": half, "heads": rows, "T": s["T"]}


def small(sizes: Sizes) -> Sizes:
    """The same class of shape, small enough for the oracle."""
    less = {**sizes, "B": min(sizes["B"], 2), "H": min(sizes["H"], 2)}
    return {**less, "T": min(sizes["T"], 100)}


def make(job: Job, sizes: Sizes, device: Device) -> tuple[Request, Any]:
    """A call of these sizes, its arrays filled at random on the device."""
    return {"recurrent": _decode_call, "chunk_forward": _chunk_call, "chunk_intra": _intra_call}[job.kernel](
        job, sizes, device
    )


def runner(job: Job) -> Callable[[Request, Any], Any]:
    """The backend function that the kernel serves."""
    from kdacore_triton import chunk_forward, recurrent, stages

    functions: dict[str, Callable[[Request, Any], Any]] = {
        "recurrent": recurrent.forward, "chunk_forward": chunk_forward.forward, "chunk_intra": stages.chunk_intra
    }  # fmt: skip
    return functions[job.kernel]


def _condition(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    low, high = value
    return f"<= {high}" if low is None else f">= {low}" if high is None else f"{low}..{high}"


def _inside(condition: Any, preferred: int) -> int:
    """A number a condition holds for: the preferred one, or the nearest power of two within."""
    low, high = condition if isinstance(condition, list) else (None, None)
    if high is not None and preferred > high:
        return 1 << (int(high).bit_length() - 1)
    if low is not None and preferred < low:
        return 1 << int(low - 1).bit_length()
    return preferred


def _recurrent_sizes(when: Mapping[str, Any]) -> Sizes:
    K = _inside(when.get("K"), 128)
    rows = _inside(when.get("rows"), 4096)
    return {
        "B": max(rows // 32, 1), "T": 1, "H": min(rows, 32), "K": K, "dtype": "bfloat16",
        "state": when.get("state", "float32"), "v_first": when.get("v_first", False),
    }  # fmt: skip


def _chunk_sizes(when: Mapping[str, Any]) -> Sizes:
    return {
        "B": 1, "T": _inside(when.get("T"), 4096), "H": _inside(when.get("heads"), 64),
        "K": _inside(when.get("K"), 128),
        "dtype": "bfloat16" if when.get("half", True) else "float32", "gate": when.get("gate", "unbounded"),
    }  # fmt: skip


def _intra_sizes(when: Mapping[str, Any]) -> Sizes:
    return {
        "B": 4, "T": 4096, "H": 16, "K": _inside(when.get("K"), 128), "C": when.get("C", 64),
        "dtype": when.get("dtype", "float16"),
    }  # fmt: skip


def _request(job: Job, s: Sizes, device: Device, **options: Any) -> Request:
    given = {"state_dtype": "float32", "scale": s["K"] ** -0.5, **options}
    return Request(
        op=job.op, kind="torch", device=device, B=s["B"], T=s["T"], H=s["H"], HV=s["H"], K=s["K"], V=s["K"], N=s["B"],
        dtype=s["dtype"], **given,
    )  # fmt: skip


def _normal(device: Device, *shape: int, dtype: str = "float32") -> torch.Tensor:
    import torch

    where = f"{device.type}:{device.index}" if device.type == "cuda" else device.type
    return torch.randn(shape, device=where).to(getattr(torch, dtype))


def _tokens(s: Sizes, device: Device, scalar: bool = False) -> dict[str, torch.Tensor]:
    B, T, H, K, dtype = s["B"], s["T"], s["H"], s["K"], s["dtype"]
    x = {name: _normal(device, B, T, H, K, dtype=dtype) for name in ("q", "k", "v")}
    x["g"] = _normal(device, B, T, H, dtype=dtype) if scalar else _normal(device, B, T, H, K, dtype=dtype)
    x["beta"] = _normal(device, B, T, H, dtype=dtype)
    x["A_log"] = _normal(device, H)
    x["dt_bias"] = _normal(device, H) if scalar else _normal(device, H, K)
    return x


def _decode_call(job: Job, s: Sizes, device: Device) -> tuple[Request, Any]:
    """One token a sequence, states in place in a pool."""
    import torch

    N, H, K = s["B"], s["H"], s["K"]
    x = _tokens(s, device)
    pool = _normal(device, N, H, K, K, dtype=s["state"])
    index = torch.arange(N, dtype=torch.int32, device=pool.device)
    request = _request(
        job, s, device, state_dtype=s["state"], qk_l2norm=True, beta_sigmoid=True, state_v_first=s["v_first"],
        pool_size=N, state_indices_ndim=1, inplace_state=True, **EXAMPLE_OPTIONS["bounded"],
    )  # fmt: skip
    return request, RecurrentInputs(**x, initial_state=pool, state_indices=index)


def _chunk_call(job: Job, s: Sizes, device: Device) -> tuple[Request, Any]:
    scalar = s["gate"] == "scalar"
    options = {
        "qk_l2norm": True,
        "beta_sigmoid": True,
        "output_final_state": True,
        **EXAMPLE_OPTIONS[s["gate"]],
    }
    return _request(job, s, device, **options), ChunkInputs(**_tokens(s, device, scalar))


def _intra_call(job: Job, s: Sizes, device: Device) -> tuple[Request, Any]:
    import torch

    B, T, H, K, C = (s[name] for name in ("B", "T", "H", "K", "C"))
    q, k = (torch.nn.functional.normalize(_normal(device, B, T, H, K), dim=-1) for _ in range(2))
    steps = -torch.nn.functional.softplus(_normal(device, B, T, H, K))
    pad = -T % C
    steps = torch.nn.functional.pad(steps, (0, 0, 0, 0, 0, pad)).view(B, -1, C, H, K)
    gc = steps.cumsum(2).view(B, T + pad, H, K)[:, :T].contiguous()
    dtype = getattr(torch, s["dtype"])
    beta = torch.sigmoid(_normal(device, B, T, H))
    return _request(job, s, device, chunk_size=C), IntraInputs(q.to(dtype), k.to(dtype), gc, beta)
