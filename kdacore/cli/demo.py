"""``kdacore demo``: the main job on a real text, with NumPy alone.

A text becomes q, k, v, g and beta through a fixed projection; ``chunk_kda`` reads it, its final state is carried
into ``fused_recurrent_kda`` for the last tokens one by one, and both are compared with the oracle and with one
pass over everything.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from kdacore import api, report
from kdacore.dispatch.plan import record_selections
from kdacore.ops import OPS
from kdacore.selfcheck.check import relative_error
from kdacore.types import ChunkInputs, Selection

HEADS, WIDTH = 2, 64
BLOCK = 32768
"""Tokens of one ``chunk_kda`` call; a longer text is read block by block, the state carried along."""
TAIL = 64
"""Tokens decoded one by one."""
LIMIT = 262144
"""Bytes of the text used unless told otherwise: each is a token of about 2 KiB of inputs."""
ORACLE_TOKENS = 16384
"""The float64 recurrence is checked over at most this many tokens of the text."""
BOUND = 2e-5
"""Contract, section 4: float32 inputs against float64."""
SPLIT_BOUND = 2 * BOUND
"""Two results, each within BOUND of the truth, are within twice that of one another."""
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}

Arrays = dict[str, Any]


class DemoError(Exception):
    """The text cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One measured part of the demo."""

    what: str
    backend: str
    tokens: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="a text; the Python licence when none is named")
    parser.add_argument("--tail", type=int, default=TAIL, metavar="N", help="tokens to decode one by one")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="N", help="use at most the first N bytes")
    parser.add_argument("--backend", default=None, help="force one backend")


def run(args: argparse.Namespace) -> int:
    out = report.console()
    try:
        name, whole = read_text(args.file)
        if args.limit < 2:
            raise DemoError(f"--limit {args.limit}: wanted at least 2 bytes")
        text = whole[: args.limit]
        if not 0 < args.tail < len(text):
            raise DemoError(f"--tail {args.tail}: wanted 1 to {len(text) - 1}, fewer than the text has bytes")
    except DemoError as error:
        print(f"kdacore demo: {error}", file=sys.stderr)
        return report.USAGE
    part = "" if len(text) == len(whole) else f", the first {len(text)} of them (--limit)"
    out.print(f"text: {name}, {len(whole)} bytes{part}; one token a byte, {HEADS} heads of {WIDTH}\n")
    return _demo(out, text, args.tail, args.backend)


def _demo(out: Any, text: bytes, tail: int, backend: str | None) -> int:
    x = project(text)
    head = len(text) - tail
    whole, o, state = prefill(x, 0, len(text), None, backend, "one pass: chunk_kda")
    first, o_head, carried = prefill(x, 0, head, None, backend, "prefill: chunk_kda")
    second, o_tail, final = decode(x, head, carried, backend)
    rows = [
        (r.what, r.backend, str(r.tokens), f"{r.seconds:.3f}", f"{r.tokens / r.seconds:,.0f}")
        for r in (whole, first, second)
    ]
    out.print(report.table(("run", "backend", "tokens", "seconds", "tokens/s"), rows, out))

    checked = min(len(text), ORACLE_TOKENS)
    expected = oracle(x, checked)
    split = np.concatenate([o_head, o_tail], axis=1)
    checks = [
        ("output against the float64 oracle", relative_error(o[:, :checked], expected.o), BOUND),
        ("prefill+decode output against one pass", relative_error(split, o), SPLIT_BOUND),
        ("its decoded tokens alone", relative_error(o_tail, o[:, head:]), SPLIT_BOUND),
        ("prefill+decode state against one pass", relative_error(final, state), SPLIT_BOUND),
    ]
    if checked == len(text):
        checks.insert(
            1, ("state against the float64 oracle", relative_error(state, expected.final_state), BOUND)
        )
    failed = [error for _, error, bound in checks if not error <= bound]
    verdicts = [
        (what, f"{error:.1e}", f"{bound:.0e}", "ok" if error <= bound else "FAILED")
        for what, error, bound in checks
    ]
    out.print(report.table(("relative error", "measured", "bound", ""), verdicts, out))
    if checked < len(text):
        out.print(f"  the oracle read the first {checked} tokens\n")
    out.print("prefill + decode is NOT one pass" if failed else "prefill + decode equals one pass")
    return report.BROKEN if failed else report.OK


# --- the text -----------------------------------------------------------------------------------------------------


def read_text(path: Path | None) -> tuple[str, bytes]:
    """A file's name and bytes. Raises :class:`DemoError` when there is nothing to read."""
    chosen = licence_file() if path is None else path
    try:
        text = chosen.read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read {chosen}: {error.strerror or error}") from error
    if len(text) < 2:
        raise DemoError(f"{chosen} holds {len(text)} bytes: too short to split into a prefill and a decode")
    return str(chosen), text


def licence_file() -> Path:
    """The Python licence of this interpreter; where a distribution left it out, a module of the library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # The interactive ``license()`` knows where the licence may lie; its list is not public, so it may be absent.
    known = getattr(getattr(builtins, "license", None), "_Printer__filenames", ())
    candidates = [Path(name) for name in known if os.path.isabs(name)]
    for folder in (library, library.parent, Path(sys.base_prefix)):
        candidates += [folder / "LICENSE.txt", folder / "LICENSE"]
    doc = Path("/usr/share/doc") / f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates.append(doc / "copyright")
    found = (path for path in candidates if path.is_file() and os.access(path, os.R_OK))
    return next(found, Path(argparse.__file__))


def project(text: bytes) -> Arrays:
    """q, k, v, raw gate and beta logits of a text: a fixed embedding of each byte and its predecessor, projected."""
    rng = np.random.default_rng(2510)
    embedding = rng.standard_normal((2, 256, WIDTH), dtype=np.float32) / np.float32(np.sqrt(2))
    codes = np.frombuffer(text, np.uint8).astype(np.int64)
    x = embedding[0, codes] + embedding[1, np.concatenate([[32], codes[:-1]])]
    sizes = {"q": HEADS * WIDTH, "k": HEADS * WIDTH, "v": HEADS * WIDTH, "g": HEADS * WIDTH, "beta": HEADS}
    out: Arrays = {}
    for name, columns in sizes.items():
        weight = rng.standard_normal((WIDTH, columns), dtype=np.float32) / np.float32(np.sqrt(WIDTH))
        shape = (1, len(text), HEADS) if name == "beta" else (1, len(text), HEADS, WIDTH)
        out[name] = (x @ weight).reshape(shape)
    # Initialised as models are: time steps log-uniform in [0.001, 0.1], so that the memory is long.
    step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (HEADS, WIDTH)))
    out["A_log"] = np.log(rng.uniform(1, 16, HEADS)).astype(np.float32)
    out["dt_bias"] = (step + np.log(-np.expm1(-step))).astype(np.float32)
    return out


# --- the calls ----------------------------------------------------------------------------------------------------


def prefill(
    x: Arrays, start: int, stop: int, state: Any, backend: str | None, what: str
) -> tuple[Run, Any, Any]:
    """``chunk_kda`` over tokens ``start`` to ``stop``: the run, the output and the final state."""
    outputs = []
    begun = time.perf_counter()
    with record_selections() as ran:
        for low in range(start, stop, BLOCK):
            part = _tokens(x, low, min(low + BLOCK, stop))
            o, state = api.chunk_kda(
                **part, initial_state=state, output_final_state=True, backend=backend, **OPTIONS
            )
            outputs.append(o)
    seconds = time.perf_counter() - begun
    return Run(what, names(ran), stop - start, seconds), np.concatenate(outputs, axis=1), state


def decode(x: Arrays, start: int, state: Any, backend: str | None) -> tuple[Run, Any, Any]:
    """``fused_recurrent_kda`` token by token from ``start`` to the end, the state updated in place."""
    state = state.copy()
    outputs = []
    stop = x["q"].shape[1]
    begun = time.perf_counter()
    with record_selections() as ran:
        for t in range(start, stop):
            o, _ = api.fused_recurrent_kda(
                **_tokens(x, t, t + 1), initial_state=state, inplace_state=True, backend=backend, **OPTIONS
            )
            outputs.append(o)
    seconds = time.perf_counter() - begun
    run = Run("decode: fused_recurrent_kda", names(ran), stop - start, seconds)
    return run, np.concatenate(outputs, axis=1), state


def oracle(x: Arrays, tokens: int) -> Any:
    """The float64 recurrence over the first tokens."""
    from kdacore.contract import build_request
    from kdacore.oracle.recurrence import oracle_forward

    opdef = OPS["chunk_kda"]
    inputs = ChunkInputs(**_tokens(x, 0, tokens))
    options = {**opdef.defaults, **OPTIONS, "output_final_state": True}
    request, _ = build_request(opdef, inputs, tuple(options[name] for name in opdef.options))
    return oracle_forward(request, inputs)


def names(ran: list[Selection]) -> str:
    """The backends that really ran, in order of first use."""
    return ", ".join(dict.fromkeys(selection.backend for selection in ran))


def _tokens(x: Arrays, start: int, stop: int) -> Arrays:
    return {
        name: array[:, start:stop] if array.ndim > 2 or name == "beta" else array for name, array in x.items()
    }
