"""Sizes that kernels say of themselves: shared memory, threads, parameters; read from cubins, recorded by the build."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import emulator
import pytest

from kdacore.errors import BackendBuildError
from kdacore_cuda.architectures import HOPPER, PACKAGED_ARCHS, SHARED_LIMITS
from kdacore_cuda.build import launch_sizes as lookup
from kdacore_cuda.build.kernel_source import KernelSource, gather_headers
from kdacore_cuda.build.launch_sizes import LaunchSizes, launch_sizes, read_launch_sizes
from kdacore_cuda.build.packaged_cubins import CUBINS, FOLDER, row_name
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.backward.kernels import sums_kernel
from kdacore_cuda.forms.packaged_kernels import packaged_kernels
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel
from kdacore_cuda.forms.stages.kernels import hopper_recompute_kernel

ROWS = CUBINS.rows()
PACKAGED = [(kernel, arch) for arch in PACKAGED_ARCHS for kernel in packaged_kernels(arch)]
KERNEL = recurrent_kernel(128, False, "float32", RecurrentMode.ONE_TOKEN).source


def sizes_of(kernel: KernelSource, arch: str) -> LaunchSizes:
    row = ROWS[row_name(kernel, arch)]
    return LaunchSizes(row["threads"], row["parameters"], tuple(row["shared"]))


def cubin_of(kernel: KernelSource, arch: str) -> bytes:
    return (FOLDER / ROWS[row_name(kernel, arch)]["file"]).read_bytes()


@pytest.mark.quick
def test_the_manifest_records_what_cubins_say() -> None:
    for kernel, arch in PACKAGED:
        assert read_launch_sizes(cubin_of(kernel, arch), kernel.entry) == sizes_of(kernel, arch), kernel.name


@pytest.mark.quick
def test_blocks_have_room_on_their_architecture() -> None:
    for kernel, arch in PACKAGED:
        sizes = sizes_of(kernel, arch)
        assert max(sizes.shared) <= SHARED_LIMITS[arch], kernel.name
        assert sizes.threads % 32 == 0 < sizes.threads <= 1024, kernel.name


@pytest.mark.quick
def test_sizes_are_the_same_on_every_architecture() -> None:
    """Callers ask for that of one architecture whichever device they have."""
    for kernel, arch in PACKAGED:
        if row_name(kernel, HOPPER) in ROWS:
            assert sizes_of(kernel, arch) == sizes_of(kernel, HOPPER), kernel.name


@pytest.mark.quick
def test_structs_of_parameters_have_the_size_that_the_host_packs() -> None:
    for kernel, arch in PACKAGED:
        assert sizes_of(kernel, arch).parameters == emulator.params_of(kernel).size, kernel.name


def by_source(every: bool) -> Iterator[object]:
    """The first packaged kernel of each source file; the others are for the exhaustive run."""
    seen: set[str] = set()
    for kernel, arch in PACKAGED:
        first = kernel.path not in seen
        seen.add(kernel.path)
        if first != every:
            marks = [pytest.mark.exhaustive] if every else []
            yield pytest.param(kernel, arch, id=row_name(kernel, arch), marks=marks)


@pytest.mark.first_cases(8)
@pytest.mark.parametrize(("kernel", "arch"), [*by_source(False), *by_source(True)])
def test_the_compiler_of_the_cpu_sees_the_same(kernel: KernelSource, arch: str, tmp_path: Path) -> None:
    """Of structures, as ``sizeof`` and ``OFFSET`` give them; nothing is run."""
    sizes = sizes_of(kernel, arch)
    wanted = {
        "sizeof shared_bytes / sizeof *shared_bytes": len(sizes.shared),
        "block_threads": sizes.threads,
        **{f"shared_bytes[{i}]": size for i, size in enumerate(sizes.shared)},
    }
    lines = [f'static_assert({name} == {value}, "{name}");\n' for name, value in wanted.items()]
    headers = {**gather_headers(kernel.read()), "checked.cuh": kernel.read() + "".join(lines)}
    flags = [f"-D{name}={value}" for name, value in (kernel.macros | {"EVERY_LANE": 0}).items()]
    emulator.write_headers(headers, tmp_path)
    assert emulator.problems_of("checked.cuh", flags, tmp_path) == ""


@pytest.mark.quick
def test_a_size_that_is_off_is_seen(tmp_path: Path) -> None:
    text = KERNEL.read() + 'static_assert(shared_bytes[0] == 1, "off");\n'
    emulator.write_headers({**gather_headers(text), "checked.cuh": text}, tmp_path)
    flags = [f"-D{name}={value}" for name, value in (KERNEL.macros | {"EVERY_LANE": 0}).items()]
    assert "off" in emulator.problems_of("checked.cuh", flags, tmp_path)


@pytest.mark.quick
def test_kernels_with_blocks_of_two_kinds() -> None:
    whole, half = (hopper_recompute_kernel(False, True, each).block(HOPPER) for each in (True, False))
    assert whole[0] == half[0] and whole[1] > half[1] > 0


@pytest.mark.quick
def test_sizes_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelSource(sums_kernel().source.path, "sums", (("THREADS", 512), ("NEVER_PACKAGED", 1)))
    compiled: list[KernelSource] = []

    def load(wanted: KernelSource, arch: str) -> bytes:
        compiled.append(wanted)
        return cubin_of(sums_kernel().source, HOPPER)

    monkeypatch.setattr(lookup, "load_or_compile", load)
    assert [launch_sizes(kernel, HOPPER).shared for _ in range(3)] == [(4 * 512,)] * 3
    assert compiled == [kernel]


@pytest.mark.quick
def test_damaged_cubins_are_refused() -> None:
    cubin = cubin_of(KERNEL, HOPPER)
    assert read_launch_sizes(cubin + b"more", KERNEL.entry) == sizes_of(KERNEL, HOPPER)
    with pytest.raises(BackendBuildError, match="nv.info.another"):
        read_launch_sizes(cubin, "another")
    sections = struct.unpack_from("<Q", cubin, 40)[0]
    for damaged in (
        b"",
        b"no ELF file" * 10,
        *(cubin[:length] for length in (60, sections // 2, sections)),
        cubin.replace(b"\0shared_bytes\0", b"\0another_name\0"),
    ):
        with pytest.raises(BackendBuildError, match="does not say its sizes"):
            read_launch_sizes(damaged, KERNEL.entry)
