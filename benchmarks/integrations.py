"""What the integrations cost and save: the hook in flash-linear-attention, a layer of it, a model of transformers.

    python -m benchmarks.integrations [hook] [layer] [kimi-linear] [qwen3-next] [fla-model] [--rounds 9]
                                      [--json out.json]

Needs flash-linear-attention and transformers. ``hook`` runs anywhere, the others on a GPU.

- ``hook``: host time of a repeated call to a backend that does nothing. Four timings, interleaved: kdacore called
  directly; kdacore through flash-linear-attention's registry; an empty backend registered there (the cost of its own
  dispatch); and only the check whether kdacore takes the call.
- ``layer``: a KDA layer of flash-linear-attention (hidden 2304, 32 heads, 8192 tokens), forward and
  backward: GPU time in a captured graph and peak memory, flash-linear-attention's kernels and kdacore's in turns.
- ``kimi-linear``, ``qwen3-next``: four layers of transformers' models with the widths of Kimi-Linear-48B and
  Qwen3-Next-80B, without experts: tokens a second in training and in decoding, host time included, in turns:
  flash-linear-attention's kernels as the model finds them, and kdacore's integration, with which the convolution and
  the gated norm are flash-linear-attention's too.
- ``fla-model``: the same of flash-linear-attention's own KDA model, four KDA layers, whose convolutions, norms and
  loss are its Triton kernels on both sides.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kdacore
from kdacore import integrations, machine
from kdacore.bench.dispatch import NAME, NullPlugin
from kdacore.registry import REGISTRY

SIDES = ("fla", "kdacore")
AGREE = 2e-2
"""Largest relative difference of the two sides' results in bfloat16: of a layer's output, and of a model's loss."""
FARTHER = 1.2
"""How many times flash-linear-attention's error kdacore's may be, both against the same model in float32."""
Rows = list[dict[str, Any]]


def _switch(side: str, integration: str = "fla") -> None:
    if side == "kdacore":
        integrations.activate(integration)
    else:
        integrations.deactivate(integration)


def _row(what: str, samples: dict[str, list[float]], unit: str) -> dict[str, Any]:
    medians = {side: statistics.median(values) for side, values in samples.items()}
    print(what, {side: f"{value:.4g} {unit}" for side, value in medians.items()}, flush=True)
    return {"what": what, "unit": unit, "median": medians, "samples": samples}


# --- the hook -----------------------------------------------------------------------------------------------------


def hook(rounds: int) -> Rows:
    """Host microseconds of calls with the arguments that a layer passes."""
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    from kdacore.integrations import fla as integration

    REGISTRY.register(NullPlugin(), NAME)
    switch = _register_a_backend_that_does_nothing()
    rows: Rows = []
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    x = {name: torch.zeros(1, 64, 2, 16) for name in "qkvg"}
    x.update(beta=torch.zeros(1, 64, 2), A_log=torch.zeros(2), dt_bias=torch.zeros(32))
    given = {**x, **dict.fromkeys(flags, True)}
    asked = {"chunk_kda": given, "fused_recurrent_kda_fwd": {**given, "inplace_final_state": False}}
    for theirs, hooked in ((chunk_kda, "chunk_kda"), (fused_recurrent_kda, "fused_recurrent_kda_fwd")):
        op = theirs.__name__
        question = integration._HANDOVERS[hooked].verdict
        contenders: dict[str, Callable[[], Any]] = {
            "kdacore, direct": partial(getattr(kdacore, op), **given),
            "fla to kdacore": partial(theirs, **given),
            "fla to a backend that does nothing": partial(theirs, **given),
            "the question": partial(question, (), asked[hooked]),
        }
        with kdacore.use_backend(NAME), torch.no_grad():
            rows.append(_row(f"host time, {op}", _in_turns(contenders, rounds, switch), "us"))
    REGISTRY.unregister(NAME)
    switch("")
    return rows


def _register_a_backend_that_does_nothing() -> Callable[[str], None]:
    """What flash-linear-attention's own dispatch takes. Returns the switch: on for the contender that is named so."""
    from fla.backends import BaseBackend, register
    from fla.ops.kda.chunk import chunk_kda

    state = {"on": False}

    class Nothing(BaseBackend):  # type: ignore[misc]  # which has no types
        backend_type, priority = "nothing", 0

        def is_enabled(self) -> bool:
            return state["on"]

        def verify(self, *_: Any, **__: Any) -> tuple[bool, None]:
            return True, None

        def chunk_kda(self, *_: Any, **__: Any) -> tuple[None, None]:
            return None, None

        fused_recurrent_kda_fwd = chunk_kda

    register(chunk_kda)(Nothing)
    register("kda")(Nothing)
    return lambda contender: state.update(on="nothing" in contender)


def _in_turns(
    contenders: dict[str, Callable[[], Any]], rounds: int, switch: Callable[[str], None], count: int = 50
) -> dict[str, list[float]]:
    """Microseconds of a call, the least of many short runs, which others' work seldom interrupts, once a round for
    each."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, rounds):
        for name, call in contenders.items():
            switch(name)
            best = float("inf")
            for _ in range(100):
                start = time.perf_counter()
                for _ in range(count):
                    call()
                best = min(best, (time.perf_counter() - start) / count)
            if number >= 0:
                samples[name].append(best * 1e6)
    return samples


# --- a layer ------------------------------------------------------------------------------------------------------


def layer(rounds: int) -> Rows:
    """GPU milliseconds of forward and backward, from CUDA graphs of both sides replayed alternately; peak GiB."""
    from fla.layers.kda import KimiDeltaAttention

    torch.manual_seed(0)
    with torch.device("cuda"):
        module = KimiDeltaAttention(hidden_size=2304, head_dim=128, num_heads=32, layer_idx=0).bfloat16()
        module.A_log.data = module.A_log.data.float()
        module.dt_bias.data = module.dt_bias.data.float()
        x = torch.randn(1, 8192, 2304, dtype=torch.bfloat16, requires_grad=True)
    graphs, peaks, results = {}, {}, {}
    for side in SIDES:
        _switch(side)
        graphs[side], peaks[side], results[side] = _captured(module, x)
    error = float((results["kdacore"] - results["fla"]).float().norm() / results["fla"].float().norm())
    _hold("layer, output", error)
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            samples[side].append(_milliseconds(graphs[side].replay))
    row = _row("layer, hidden 2304 H32 T8192, forward and backward", samples, "ms")
    return [{**row, "peak_GiB": peaks, "difference_of_results": error}]


def _captured(module: Any, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, float, torch.Tensor]:
    def step() -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        x.grad = None
        o = module(x)[0]
        o.float().square().mean().backward()
        return o

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are tuned and built outside the graph
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    graph.replay()
    torch.cuda.synchronize()
    return graph, peak, o.detach().clone()


def _milliseconds(replay: Callable[[], None]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    for _ in range(5):
        replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 5


def _hold(what: str, apart: float) -> None:
    """Raises AssertionError where the two sides' results are apart: nothing wrong is timed."""
    print(f"{what}: {apart:.2e} apart", flush=True)
    if not apart < AGREE:
        raise AssertionError(f"{what}: {apart} apart, allowed {AGREE}")


# --- a model ------------------------------------------------------------------------------------------------------


def _errors(what: str, exact: torch.Tensor, results: dict[str, torch.Tensor]) -> dict[str, float]:
    """Each side's relative error against the float32 result.

    Raises:
        AssertionError: kdacore's is more than FARTHER times flash-linear-attention's, or one is not a number.
    """
    errors = {side: float((results[side].float() - exact).norm() / exact.norm()) for side in SIDES}
    print(what, {side: f"{error:.2e} from float32" for side, error in errors.items()}, flush=True)
    if not errors["kdacore"] <= FARTHER * errors["fla"]:
        raise AssertionError(f"{what}: errors {errors}, kdacore's may be {FARTHER} times the other")
    return errors


_OWN_FUNCTIONS = ("kimi_delta_attention", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
"""How the names of a model's own functions of a delta rule end."""


@contextmanager
def _torch_path(module: Any) -> Iterator[None]:
    """The delta rule as the functions of a model's module compute it where neither library is installed, in float32."""
    found = {name: f for name, f in vars(module).items() if name.endswith(_OWN_FUNCTIONS)}
    try:
        for name, function in found.items():
            setattr(module, name, inspect.unwrap(function))
        yield
    finally:
        for name, function in found.items():
            setattr(module, name, function)


def _float32_logits(network: Any, x: torch.Tensor) -> torch.Tensor:
    """The logits of a model with the same weights, in float32, its delta rule computed by torch."""
    with _torch_path(_module(network)), torch.no_grad():
        logits: torch.Tensor = copy.deepcopy(network).float()(x).logits
    return logits


_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_VOCABULARY: dict[str, Any] = {
    "vocab_size": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _kimi_linear() -> Any:
    """Widths of Kimi-Linear-48B. Experts cost both sides the same, and are not what is compared."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    return KimiLinearForCausalLM(
        KimiLinearConfig(
            num_hidden_layers=4, layer_types=_LAYERS, mlp_layer_types=["dense"] * 4, **_VOCABULARY
        )
    )


def _qwen3_next() -> Any:
    """Widths of Qwen3-Next-80B, without experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(num_hidden_layers=4, layer_types=_LAYERS, mlp_only_layers=[0, 1, 2, 3], **_VOCABULARY)
    )


def model(name: str, build: Callable[[], Any], rounds: int, tokens: int = 4096, decoded: int = 64) -> Rows:
    """Tokens a second as a user has them: eager, with the host's time."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = build().bfloat16()
        x = torch.randint(3, 32768, (1, tokens))
    switch = partial(_switch, integration="transformers")

    losses, logits = {}, {}
    for side in SIDES:
        switch(side)
        network.train()
        found = network(x, labels=x)
        losses[side], logits[side] = float(found.loss.detach()), found.logits.detach().float()
        del found
        print(f"{name}, {side}: first forward", flush=True)
    _hold(f"{name}, loss", abs(losses["kdacore"] - losses["fla"]) / losses["fla"])
    errors = _errors(f"{name}, logits", _float32_logits(network, x), logits)
    del logits
    return [{**row, "errors": errors} for row in _speeds(name, network, x, decoded, rounds, switch)]


def fla_model(rounds: int, tokens: int = 8192, decoded: int = 64) -> Rows:
    """Like :func:`model`, of flash-linear-attention's KDA model."""
    from fla.models import KDAConfig, KDAForCausalLM

    configuration = KDAConfig(
        hidden_size=2304, num_heads=32, head_dim=128, intermediate_size=9216, num_hidden_layers=4,
        vocab_size=32768, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        network = KDAForCausalLM(configuration).bfloat16()
        x = torch.randint(3, 32768, (1, tokens))
    for name, parameter in network.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()

    losses, logits = {}, {}
    for side in SIDES:
        _switch(side)
        losses[side] = float(network.train()(x, labels=x).loss.detach())
        with torch.no_grad():
            logits[side] = network.eval()(x[:, :1024]).logits.float()
    _hold("fla-model, loss", abs(losses["kdacore"] - losses["fla"]) / losses["fla"])
    apart = float((logits["kdacore"] - logits["fla"]).norm() / logits["fla"].norm())
    print(f"fla-model, logits: {apart:.2e} apart", flush=True)
    del logits
    return [
        {**row, "difference_of_logits": apart}
        for row in _speeds("fla-model", network, x, decoded, rounds, _switch)
    ]


def _module(network: Any) -> Any:
    """The module of transformers that a model is from."""
    return sys.modules[type(network).__module__]


def _base(switch: Callable[[str], None], step: Callable[[], None]) -> tuple[str, str | None]:
    """What kdacore is compared with: flash-linear-attention's kernels, or the model's own functions and the reason,
    where those refuse the step, as their backward of the gated delta rule does on Hopper with Triton before 3.7.1."""
    switch("fla")
    try:
        step()
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # out of memory and the like
            raise
        print(f"flash-linear-attention: {error}", flush=True)
        return "torch", str(error)
    return "fla", None


def _speeds(
    model: str, network: Any, x: torch.Tensor, decoded: int, rounds: int, switch: Callable[[str], None]
) -> Rows:
    """Tokens a second of a model's training step on ``x``, and of decoding behind its first 128 tokens."""

    def train() -> None:
        network.train()
        network.zero_grad(set_to_none=True)
        network(x, labels=x).loss.backward()

    def decode() -> None:
        network.eval()
        network.generate(x[:, :128], max_new_tokens=decoded, min_new_tokens=decoded, do_sample=False)

    rows: Rows = []
    for what, step, count in (("training", train, x.shape[1]), ("decoding", decode, decoded)):
        theirs, refused = ("fla", None) if what == "decoding" else _base(switch, step)
        samples: dict[str, list[float]] = {theirs: [], "kdacore": []}
        for counted in (False, False, *[True] * rounds):
            for side in samples:
                switch(side)
                with _torch_path(_module(network)) if side == "torch" else nullcontext():
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    step()
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                if counted:
                    samples[side].append(count / seconds)
                else:
                    print(f"{model}, {what}, {side}: a first run in {seconds:.1f} s", flush=True)
        rows.append(
            {**_row(f"{model}, {what}", samples, "tokens/s"), **({"refused": refused} if refused else {})}
        )
    return rows


PARTS: dict[str, Callable[[int], Rows]] = {
    "hook": hook,
    "layer": layer,
    "kimi-linear": partial(model, "kimi-linear", _kimi_linear),
    "qwen3-next": partial(model, "qwen3-next", _qwen3_next),
    "fla-model": fla_model,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages
        integrations.activate("fla")
        rows: Rows = []
        for part in args.parts:
            rows += PARTS[part](args.rounds)
            # After each part: flash-linear-attention tunes for minutes, and a run may be cut off.
            if args.json:
                _write(args.json, rows)
    print(*_counts(), sep="\n")


def _write(path: Path, rows: Rows) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {
        "commit": machine.commit(),
        "device": device,
        "versions": _versions(),
        "rows": rows,
        "counts": _counts(),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _counts() -> list[str]:
    return [f"{h.function}: {h.served} taken, {h.declined} declined {h.reason}" for h in _fla_hooks()]


def _fla_hooks() -> tuple[Any, ...]:
    return next(status.hooks for status in integrations.status() if status.name == "fla")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "triton", "fla-core", "transformers")}


if __name__ == "__main__":
    main()
