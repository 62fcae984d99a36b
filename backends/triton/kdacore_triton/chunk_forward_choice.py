"""Which way the chunk forward serves a call: block sizes, and segments or none. No torch, no Triton."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_triton import configs
from kdacore_triton.configs import Config
from kdacore_triton.gate_families import gate_family
from kdacore_triton.hardware_limits import has_warp_products, shared_memory

MAX_SEGMENTED = 128
"""The widest head whose segment map fits shared memory."""
SCAN_STAGES = {99 * 1024: 3, 64 * 1024: 2}
"""Shared memory -> the most stages of the scan that fit it, with chunks of 32 rows and 128 channels of k."""
EXACT_KEYS = 32
"""Up to this many channels of k, 16-bit inputs take tf32 operands.

bfloat16 operands (the inverse, u, v' and the decayed keys) give an error of 2.9e-3 in the state on average, whatever
the head dims. Over a few hundred elements it varies beyond the contract's 3.3e-3. Many roundings contribute, none of
them most; tiles this small cost little in float32.
"""


def has_narrow_operands(r: Request, interpreting: bool) -> bool:
    """Do matrix products take bfloat16 operands? For 16-bit inputs of more than a few channels, on a GPU."""
    return r.dtype != "float32" and r.K > EXACT_KEYS and not interpreting


def keeps_float16(r: Request) -> bool:
    """Do the products of a call with 16-bit inputs take tf32 operands, which have float16's bits and float32's range?

    With one gate a head and float16. Slow gates and keys that are nearly parallel gave final states with errors of
    5e-3 to 6e-3 with bfloat16 operands, where flash-linear-attention, whose operands are float16, promises 5e-3.
    """
    return r.dtype == "float16" and r.scalar_gate


def config_of(r: Request, interpreting: bool) -> Config:
    """The block sizes of a call."""
    half = has_narrow_operands(r, interpreting) and not keeps_float16(r)
    heads, T = (configs.MANY, configs.MANY) if r.batch_invariant else (r.N * r.HV, r.T)
    config = configs.get(
        "chunk_forward", r.device.arch, gate=gate_family(r), K=r.K, V=r.V, half=half, heads=heads, T=T
    )
    return config if r.device.type == "cpu" else fitted(config, r.device.arch, r.K, half)


def fitted(config: Config, arch: str, K: int, half: bool) -> Config:
    """A configuration, measured on another architecture perhaps, as ``arch`` can run it.

    Where products are a warp's, ptxas cannot allocate registers for a scan of 64 columns with more than 128 channels
    of float32 operands, and spills all of them.
    """
    found = dict(config)
    for limit, stages in SCAN_STAGES.items():
        if shared_memory(arch) <= limit:
            found["scan_stages"] = min(found["scan_stages"], stages)
    if not half and K > MAX_SEGMENTED and has_warp_products(arch):
        found |= {"scan_BV": 16, "scan_warps": 4}
    return found


def segment_of(r: Request, config: Config) -> int:
    """Tokens of a segment, 0 where a sequence is not cut: the number of segments may depend on T, but not where they
    start."""
    return int(config["segment"]) if r.K <= MAX_SEGMENTED and config["segment"] < r.T else 0


def form(r: Request) -> str:
    """See :attr:`kdacore.types.OpImpl.form`."""
    config = config_of(r, r.device.type == "cpu")  # where kernels are interpreted
    heads = f"{r.N} sequences of {r.HV} heads" if r.N != 1 else f"{r.HV} heads"
    segment = segment_of(r, config)
    if not segment:
        return f"scan: {heads}, chunks of up to {config['C']} tokens"
    return f"segments: {heads}, {-(-r.T // segment)} segments of {segment} tokens" + " at most" * r.packed
