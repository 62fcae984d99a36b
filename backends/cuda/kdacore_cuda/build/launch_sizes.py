"""What launches of a kernel must match: threads, bytes of parameters, and how much shared memory it asks for.

The kernel's source says it: ``KDA_SHARED_BYTES(sizeof(SharedMemory))`` in csrc makes a constant of the cubin, an ELF
file that is read here. The manifest of the packaged cubins also records it, for people and tests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from kdacore.errors import BackendBuildError
from kdacore_cuda.build.cubin_lookup import load_or_compile
from kdacore_cuda.build.kernel_source import KernelSource

_HEADER = struct.Struct("<4s36xQ12xHH")
"""Of the file: magic number, offset of the section headers, how many they are, and which of them is that of their
names."""
_SECTION = struct.Struct("<I20xQQ24x")
"""Of a section: where its name is among the names; where its contents are in the file, and their size."""
_SYMBOL = struct.Struct("<I2xHQQ")
"""Where its name is; its section, and where it is in there; its size."""
_ATTRIBUTE = struct.Struct("<BBH")
"""Format, number, and value or size."""
_SIZED_ATTRIBUTE = 4
"""The format of an attribute whose value is the number of bytes that follow."""
_MAX_THREADS, _PARAMETER_BYTES = 0x05, 0x19
"""EIATTR_MAX_THREADS, which holds the block size of ``__launch_bounds__``, and EIATTR_CBANK_PARAM_SIZE."""
_SHARED_BYTES = "shared_bytes"
"""The constant that ``KDA_SHARED_BYTES`` of csrc/common/ptx.cuh defines."""


class LaunchSizes(NamedTuple):
    """What every launch of a kernel must match."""

    threads: int
    """Of a block."""
    parameters: int
    """Bytes of the struct of parameters."""
    shared: tuple[int, ...]
    """Bytes of dynamic shared memory; more than one number where a kernel has several kinds of blocks."""


@cache
def launch_sizes(kernel: KernelSource, arch: str) -> LaunchSizes:
    """What launches of ``kernel`` must match; read once per process. Raises BackendBuildError where it is neither
    packaged nor cached, and NVRTC is missing or reports an error."""
    return read_launch_sizes(load_or_compile(kernel, arch), kernel.entry)


def read_launch_sizes(cubin: bytes, entry: str) -> LaunchSizes:
    """The sizes of the kernel named ``entry``. BackendBuildError when ``cubin`` is damaged or does not contain them."""
    try:
        sections = _sections(cubin)
        contents = {name: place for name, *place in sections}
        attributes = dict(_attributes(_part(cubin, *contents[f".nv.info.{entry}"])))
        texts, symbols = (_part(cubin, *contents[name]) for name in (".strtab", ".symtab"))
        variables = {_text(texts, name): rest for name, *rest in _SYMBOL.iter_unpack(symbols)}
        section, *place = variables[_SHARED_BYTES]
        shared = _part(_part(cubin, *sections[section][1:]), *place)
        return LaunchSizes(
            threads=int.from_bytes(attributes[_MAX_THREADS][:4], "little"),
            parameters=int.from_bytes(attributes[_PARAMETER_BYTES], "little"),
            shared=struct.unpack(f"<{len(shared) // 4}I", shared),
        )
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise BackendBuildError(entry, f"its cubin does not say its sizes: {error!r}") from error


def _sections(cubin: bytes) -> list[tuple[str, int, int]]:
    """Name, offset in the file, and size of each."""
    magic, at, count, names = _HEADER.unpack_from(cubin)
    if magic != b"\x7fELF":
        raise ValueError("not an ELF file")
    found = [_SECTION.unpack_from(cubin, at + i * _SECTION.size) for i in range(count)]
    texts = _part(cubin, *found[names][1:])
    return [(_text(texts, name), offset, size) for name, offset, size in found]


def _part(data: bytes, offset: int, size: int) -> bytes:
    """ValueError when it reaches beyond the end."""
    if offset + size > len(data):
        raise ValueError(f"{size} bytes at {offset} of {len(data)}")
    return data[offset : offset + size]


def _text(texts: bytes, at: int) -> str:
    return texts[at : texts.index(b"\0", at)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of each attribute of a kernel."""
    at = 0
    while at < len(info):
        form, number, value = _ATTRIBUTE.unpack_from(info, at)
        at += _ATTRIBUTE.size
        if form == _SIZED_ATTRIBUTE:
            yield number, info[at : at + value]
            at += value
        else:
            yield number, value.to_bytes(2, "little")
