"""A call on the command line: sizes and switches named as in :func:`kdacore.chunk_kda`."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

from kdacore import config, feature_matrix
from kdacore.argument_types import at_least, one_of
from kdacore.arrays.specs import DEVICE
from kdacore.calls.description import CallDescription, options
from kdacore.calls.pools import Pool
from kdacore.calls.values import Shape
from kdacore.device import TYPES, problem_of
from kdacore.errors import ContractError, did_you_mean
from kdacore.ops import OPS, Option
from kdacore.registry import REGISTRY
from kdacore.types import Selection

SIZES = "B,T,H,HV,K,V"
NOT_SWITCHES = frozenset({"cp"})
"""Options that are objects of a running program: ``explain`` alone has a switch, for the number of ranks."""
OPTIONS = {o.name: o for op in OPS.values() for o in op.option_arguments if o.name not in NOT_SWITCHES}
"""Options of all ops, each a switch of the same name."""
_HELP = {
    "use_gate_in_kernel": "raw gate input, with A_log and dt_bias",
    "lower_bound": "of the gate (default -5 with --safe-gate)",
    "scale": "of q (default K ** -0.5)",
    "chunk_size": "stage ops (default 64)",
}
"""Where the first sentence of an option's description says too little here."""


def add_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The arguments that describe one call; with ``required`` the op is positional."""
    if required:
        parser.add_argument("op", type=one_of(OPS, "op"), metavar="OP", help=f"one of {', '.join(OPS)}")
    else:
        parser.add_argument(
            "--op", type=one_of(OPS, "op"), metavar="OP", help="also explain one call of this op"
        )
    add = parser.add_argument
    add("--shape", type=shape, metavar=SIZES, help=f"sizes, default 1,4096,16,16,128,128 ({SIZES})")
    add("--dtype", default="bfloat16", help="dtype of q, k, v, g and beta (default bfloat16)")
    add("--kind", default="torch", choices=("numpy", "torch", "jax"), help="array library (default torch)")
    add("--device", type=device, help="cpu, cuda, cuda:1, rocm, tpu (default cuda; of --kind numpy cpu)")
    add(
        "--arch",
        default="",
        help="architecture or GPU, such as sm_90 or H200 (default: KDACORE_ARCH, else sm_90 for cuda, v5e for tpu)",
    )
    add("--backend", default=None, help="force one backend")
    add("--requires-grad", action="store_true", help="the inputs require gradients")
    add("--initial-state", default="", metavar="DTYPE", help="give an initial state of this dtype")
    add("--cu-seqlens", type=int, default=0, metavar="N", help="pack N sequences")
    add("--state-indices", type=int, default=0, metavar="P", help="a state pool of P rows")
    add("--num-accepted-tokens", action="store_true")
    add("--has-initial-state", action="store_true", help="some sequences start from zeros")
    add(
        "--write-indices",
        type=int,
        choices=(1, 2),
        default=0,
        help="rows to write: 1 a sequence, or 2: 1 a token",
    )
    add("--write-pool", type=at_least(1), default=0, metavar="P", help="another pool of P rows to write")
    add(
        "--checkpoint-offsets",
        type=at_least(1),
        default=0,
        metavar="C",
        help="states at C tokens, to the pool",
    )
    add(
        "--conv-width",
        type=int,
        default=4,
        metavar="W",
        help="fused decode: taps, 0 for x that comes convolved (4)",
    )
    add("--conv-bias", action="store_true", help="fused decode: a bias of the convolution")
    add("--conv-indices", action="store_true", help="fused decode: rows of the convolution's states")
    add("--conv-windows", action="store_true", help="fused decode: windows of candidates apart")
    add(
        "--norm-weight",
        default="",
        choices=("", "vector", "heads"),
        help="fused decode: the norm of the output",
    )
    add("--z", action="store_true", help="fused decode: the norm is gated")
    add("--records", action="store_true", help="records of candidates")
    add("--out", action="store_true", help="a preallocated output")
    add("--cu-seqlens-cpu", action="store_true", help="give the offsets on the host too")
    for option in OPTIONS.values():
        _add_switch(parser, option)


def _add_switch(parser: argparse.ArgumentParser, option: Option) -> None:
    """The switch of an option, by its definition."""
    name = f"--{option.name.replace('_', '-')}"
    text = _HELP.get(option.name) or _first_sentence(option.doc)
    if option.kind == "flag":
        parser.add_argument(name, action="store_true", help=text)
    elif option.kind == "choice":
        parser.add_argument(name, choices=option.choices, default=None, help=text)
    elif option.kind == "number":
        parser.add_argument(name, type=float, default=None, metavar="X", help=text)
    else:
        read = at_least(1) if option.name == "chunk_size" else int
        parser.add_argument(name, type=read, default=None, metavar="N", help=text)


def _first_sentence(doc: str) -> str:
    """The first sentence of what the public function says of an option, as argparse wants it."""
    return re.split(r"[.;:](?: |$)", doc)[0].replace("``", "").replace("%", "%%")


def device(text: str) -> str:
    """A device, its index after a colon. argparse turns the error into exit status 2."""
    if DEVICE.fullmatch(text) and _is_known(text.partition(":")[0]):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no device, like cpu, cuda or cuda:1")


def _is_known(device_type: str) -> bool:
    return device_type in TYPES or any(
        device_type in r.backend.device_types for r in REGISTRY.backends().values()
    )


def shape(text: str) -> tuple[int, ...]:
    """Six sizes. argparse turns the error into exit status 2."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {SIZES}") from None
    if len(sizes) != 6:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(sizes)} sizes, wanted {SIZES}")
    return sizes


def call_of(args: argparse.Namespace) -> CallDescription:
    """The call the arguments describe.

    Raises:
        ContractError: the arguments contradict each other, or the op has none for what they ask for.
    """
    op = args.op or "chunk_kda"
    where = args.device or ("cpu" if args.kind == "numpy" else "cuda")
    if wanted := problem_of(args.kind, where.partition(":")[0]):
        raise ContractError(op, "device", f"{where} with --kind {args.kind}", wanted)
    if args.arch and where in ("cpu", "meta"):
        raise ContractError(op, "arch", repr(args.arch), f"none: {where} has no architectures")
    arch = config.device_arch(args.arch)
    if arch and where.partition(":")[0] == "cuda" and not arch.startswith("sm_"):
        meant = did_you_mean(args.arch, config.GPU_ARCHITECTURES)
        known = f"an architecture such as sm_90, or a GPU such as H200{meant}"
        raise ContractError(op, "arch", repr(args.arch), known)
    shape = _sizes_of(args, op)
    asked = {name: value for name in OPTIONS if (value := getattr(args, name)) not in (None, False)}
    if args.safe_gate:
        asked.setdefault("lower_bound", -5.0)
    gated = args.use_gate_in_kernel or OPS[op].family == "gate"
    if "A_log" in OPS[op].arrays and "use_gate_in_kernel" not in OPS[op].options:
        asked.pop("use_gate_in_kernel", None)  # the parameters alone ask for the gate
    return CallDescription(
        op=op,
        kind=args.kind,
        device=where,
        arch=arch or feature_matrix.arch_of(where.partition(":")[0], args.kind, ()),
        shape=shape,
        dtype=args.dtype,
        gate_dtype=args.dtype,
        beta_dtype=args.dtype,
        state_dtype=args.initial_state or "float32",
        index_dtype="int32",
        requires_grad=args.requires_grad,
        A_log=gated,
        dt_bias="matrix" if gated else "",
        initial_state=bool(args.initial_state),
        pool=_pool_of(args, op),
        pool_rows=args.state_indices,
        write_pool_rows=args.write_pool,
        checkpoint_count=args.checkpoint_offsets,
        host_offsets=args.cu_seqlens_cpu,
        conv_width=args.conv_width,
        conv_bias=args.conv_bias,
        conv_indices=args.conv_indices,
        conv_windows=args.conv_windows,
        norm=args.norm_weight,
        z=args.z,
        out=args.out,
        options=options(**asked),
    )


def _sizes_of(args: argparse.Namespace, op: str) -> Shape:
    """The sizes, the tokens shared out evenly where they are packed."""
    usual = (32, 1, 16, 16, 128, 128) if OPS[op].family == "decode" else (1, 4096, 16, 16, 128, 128)
    B, T, H, HV, K, V = args.shape or usual
    N = args.cu_seqlens
    if N < 0:
        raise ContractError(op, "cu_seqlens", f"{N} sequences", "1 or more")
    if args.cu_seqlens_cpu and not N:
        raise ContractError(op, "cu_seqlens_cpu", "no cu_seqlens beside it", "both or neither")
    lengths = tuple(T * (n + 1) // N - T * n // N for n in range(N))
    return Shape(B, T, H, HV, K, V, lengths)


def _pool_of(args: argparse.Namespace, op: str) -> Pool | str:
    if args.num_accepted_tokens and not args.state_indices:
        raise ContractError(op, "num_accepted_tokens", "no state_indices beside it", "both or neither")
    pool = Pool(
        indices=(2 if args.num_accepted_tokens else 1) if args.state_indices else 0,
        reads=bool(args.state_indices or args.initial_state),
        has_state=args.has_initial_state,
        writes=args.write_indices,
        separate=bool(args.write_pool),
        checkpoints=bool(args.checkpoint_offsets),
        records=args.records,
    )
    if OPS[op].family == "commit":  # it is about nothing else
        pool = dataclasses.replace(pool, indices=1, reads=True, inplace=True, records=True)
    return "" if pool == Pool(indices=0, reads=pool.reads) else pool


def given(args: argparse.Namespace) -> list[str]:
    """The switches that say something of a call other than what holds without them."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, required=False)
    usual = vars(parser.parse_args([]))
    return [f"--{name.replace('_', '-')}" for name, value in usual.items() if getattr(args, name) != value]


def selection_dict(selection: Selection) -> dict[str, Any]:
    """A selection for JSON, its own text included."""
    return {
        "op": selection.op,
        "backend": selection.backend,
        "why": selection.why,
        "candidates": [dataclasses.asdict(c) for c in selection.candidates],
        "text": selection.text,
    }
