"""Other projects' kernels, timed in the same process as ours where they are installed: one module each."""

from kdacore.bench.peers import cudnn_frontend, fla, flash_kda, flash_qla, flashinfer
from kdacore.bench.peers.peer import Peer

__all__ = ["PEERS", "Peer"]

PEERS: tuple[Peer, ...] = (
    fla.PEER,
    flash_kda.PEER,
    cudnn_frontend.PEER,
    flash_qla.PEER,
    flashinfer.PEER,
)
