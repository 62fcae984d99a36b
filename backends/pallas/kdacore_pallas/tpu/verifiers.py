"""Verifiers of the ``pallas`` backend. Sizes come from the request; nothing is compiled to find
out."""

from __future__ import annotations

from kdacore import config
from kdacore.types import Reason, Request
from kdacore.verifiers import reads_no_lengths
from kdacore_pallas.tpu import vmem
from kdacore_pallas.tpu.sizes import chunk_steps, step_words

LARGEST = 256
SMEM = 256 * 1024
"""Bytes of scalar memory the chunk table may take."""


def interpreted() -> bool:
    """Kernels run in interpret mode, on any device."""
    return config.get().pallas_interpret


@reads_no_lengths
def on_tpu(request: Request) -> Reason | None:
    """A TPU, or interpret mode."""
    if request.device.type != "tpu" and not interpreted():
        want = "a TPU, or KDACORE_PALLAS_INTERPRET=1 to interpret the kernels elsewhere"
        return Reason("platform", "these kernels are compiled for TPUs", str(request.device), want)
    return None


@reads_no_lengths
def known_generation(request: Request) -> Reason | None:
    """A TPU whose memory sizes are known."""
    if request.device.type == "tpu" and request.device.arch not in vmem.VMEM:
        return Reason("arch", "unknown TPU generation", request.device.arch, ", ".join(vmem.VMEM))
    return None


@reads_no_lengths
def tpu_dtype(request: Request) -> Reason | None:
    """TPUs have no float16."""
    used = {"inputs": request.dtype, "states": request.state_dtype}
    if request.has("g"):
        used["g"] = request.spec("g").dtype
    bad = [f"{name} {dtype}" for name, dtype in used.items() if dtype not in ("float32", "bfloat16")]
    if bad:
        return Reason(
            "dtype", "these kernels take float32 and bfloat16", ", ".join(bad), "float32 or bfloat16"
        )
    return None


@reads_no_lengths
def tile_alignment(request: Request) -> Reason | None:
    """Head dims fill whole sublanes."""
    bad = [f"{n}={d}" for n, d in (("K", request.K), ("V", request.V)) if d % 8 or d > LARGEST]
    if bad:
        return Reason(
            "head_dim", "head dims fill registers", ", ".join(bad), f"multiples of 8 up to {LARGEST}"
        )
    return None


def _too_much(request: Request, need: int, what: str) -> Reason | None:
    have = vmem.VMEM.get(request.device.arch)
    if have is None or need <= have:
        return None
    got, want = f"{need / vmem.MIB:.1f} MiB", f"at most {have // vmem.MIB} MiB on {request.device.arch}"
    return Reason("vmem", f"the {what} kernel needs more VMEM than there is", got, want)


def chunk_vmem(request: Request) -> Reason | None:
    """VMEM of the forward kernel (a backward that does not fit is done in plain JAX)."""
    if request.dtype not in ("float32", "bfloat16"):  # declined by the dtype verifier
        return None
    return _too_much(request, vmem.chunk_forward_bytes(request, vmem.heads_per_step(request)), "forward")


def chunk_smem(request: Request) -> Reason | None:
    """The table of the grid's steps, in scalar memory."""
    need = 4 * step_words(request) * request.B * chunk_steps(request)
    if need > SMEM:
        return Reason(
            "smem", "too many chunks for the table in scalar memory", f"{need} bytes", f"at most {SMEM}"
        )
    return None


def recurrent_vmem(request: Request) -> Reason | None:
    """VMEM of the recurrent kernel."""
    return _too_much(request, vmem.recurrent_bytes(request), "recurrent")


def recurrent_smem(request: Request) -> Reason | None:
    """Five numbers a token, in scalar memory."""
    need = 20 * request.B * request.T
    if not isinstance(need, int):  # jax.export's symbolic sizes
        return Reason("smem", "the table's size has to be known while tracing", f"{need} bytes", "a number")
    if need > SMEM:
        return Reason(
            "smem", "too many tokens for the table in scalar memory", f"{need} bytes", f"at most {SMEM}"
        )
    return None
