"""``kdacore verify`` and ``kdacore build``: what they pass on, what they write, when they exit 1."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kdacore.testing.verify as verification
from kdacore import config
from kdacore.cli import main as cli
from kdacore.command_types import KernelBuilder
from kdacore.errors import BackendBuildError
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.types import Backend, Requirement


def record(backend: str, problems: list[str]) -> verification.Report:
    return verification.Report(
        backend=backend,
        backend_version="1",
        device="cpu (x86_64)",
        level="quick",
        seed=0,
        started="2026-01-02T03:04:05+00:00",
        seconds=1.0,
        commit="",
        machine={},
        versions={},
        served=0,
        declined={},
        cases=[],
        worst={},
        problems=problems,
    )


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["op chunk_kda is never served"], 1)])
def test_verify(
    problems: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def fake(*args: Any, **kwargs: Any) -> verification.Report:
        asked.append((args, kwargs))
        return record(args[0], problems)

    monkeypatch.setattr(verification, "verify", fake)
    words = ["verify", "reference", "--level", "full", "--random", "7", "--seed", "3", "--kind", "numpy"]
    assert cli.main([*words, "--device", "cpu", "--jobs", "2", "--folder", str(tmp_path)]) == status
    assert asked == [(("reference", "cpu", "full", 7), {"seed": 3, "kinds": ("numpy",), "jobs": 2})]
    (written,) = verification.load_records(tmp_path)
    assert written.backend == "reference"
    out = capsys.readouterr().out
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]
    assert str(tmp_path) in out and ("never served" in out) == bool(problems)


def test_verify_takes_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            gone = Requirement("gpu", lambda: "no GPU", "buy one")
            return [Backend(name="elsewhere", version="1", kinds=("torch",), ops={}, requirements=(gone,))]

    REGISTRY.register(Plugin(), "elsewhere")
    names: list[str] = []

    def fake(name: str, *args: Any, **kwargs: Any) -> verification.Report:
        names.append(name)
        return record(name, [])

    monkeypatch.setattr(verification, "verify", fake)
    assert cli.main(["verify", "--folder", str(tmp_path)]) == 0
    assert names == ["reference"]
    capsys.readouterr()


def test_an_interrupted_run_is_written_and_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        verification, "verify", lambda name, *a, **k: dataclasses.replace(record(name, []), interrupted=True)
    )
    assert cli.main(["verify", "reference", "xla", "--folder", str(tmp_path)]) == 130
    (written,) = verification.load_records(tmp_path)
    assert written.backend == "reference" and written.interrupted
    assert "interrupted" in capsys.readouterr().out


def test_a_record_that_cannot_be_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(name: str, *args: Any, **kwargs: Any) -> verification.Report:
        (tmp_path / "records").rmdir()
        (tmp_path / "records").write_text("")  # the folder goes while the suite runs
        return record(name, ["never served"])

    monkeypatch.setattr(verification, "verify", fake)
    assert cli.main(["verify", "reference", "--folder", str(tmp_path / "records")]) == 1
    printed = capsys.readouterr()
    assert "never served" in printed.out
    assert printed.err.startswith("kdacore verify: ") and str(tmp_path / "records") in printed.err


@pytest.mark.parametrize("source", ["--folder", "KDACORE_CACHE_DIR"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verification, "verify", lambda *args, **kwargs: pytest.fail("ran"))
    file = tmp_path / "file"
    file.write_text("")
    if source == "--folder":
        words = ["--folder", str(file)]
    else:
        words = []
        monkeypatch.setenv(source, str(file))
        config.refresh()
    assert cli.main(["verify", "reference", *words]) == 2
    assert f"kdacore verify: {source}: cannot write into {file}" in capsys.readouterr().err


def test_a_traceback_is_shown_once() -> None:
    def row(n: int, message: str) -> dict[str, Any]:
        return {"id": f"case{n}", "status": "failed", "message": message}

    trace = "Traceback (most recent call last):\n  File 'x.py', line {}\nIndexError: off by one\n"
    rows = [row(0, trace.format(1)), row(1, trace.format(2)), row(2, "o: error 2"), row(3, "o: error 2")]
    found = dataclasses.replace(record("b", []), cases=rows)
    assert found.lines()[1:] == [
        f"  FAILED case0: {trace.format(1).strip()}",
        "  FAILED case1: IndexError: off by one (as above)",
        "  FAILED case2: o: error 2",
        "  FAILED case3: o: error 2",
    ]


def test_records_of_runs_side_by_side() -> None:
    one, two = (
        dataclasses.replace(record("reference", []), started=f"2026-01-02T03:04:05.00000{n}+00:00")
        for n in (1, 2)
    )
    names = [verification.default_path(r, Path("x")).name for r in (one, two)]
    assert names == [f"reference-cpu-quick-2026-01-02T030405.00000{n}.json" for n in (1, 2)]


@pytest.mark.parametrize(
    "words", [["--seed", "-1"], ["--device", "bogus"], ["--random", "-2"], ["--jobs", "0"]]
)
def test_verify_what_makes_no_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["verify", "reference", *words])
    assert done.value.code == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err


def test_verify_an_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "nonsense"]) == 2
    assert "'nonsense'" in capsys.readouterr().err


@pytest.mark.usefixtures("every_backend")
def test_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kdacore_cuda import architectures
    from kdacore_cuda.build import packaged_cubins
    from kdacore_cuda.build import packaging as package_build

    asked: list[Any] = []

    def fake(archs: Any, folder: Path, report: Any) -> list[Path]:
        asked.append((tuple(archs), folder))
        report("recurrent.sm_90a: 5 bytes")
        return [folder / "0123456789abcdef.cubin"]

    monkeypatch.setattr(package_build, "build_all", fake)
    assert cli.main(["build", "--arch", "sm_90a", "--folder", str(tmp_path)]) == 0
    assert cli.main(["build"]) == 0
    assert asked == [(("sm_90a",), tmp_path), (architectures.PACKAGED_ARCHS, packaged_cubins.FOLDER)]
    assert cli.main(["build", "--arch", "sm_90a,sm_100f", "--arch", "sm_80"]) == 0
    assert asked[-1] == (("sm_90a", "sm_100f", "sm_80"), packaged_cubins.FOLDER)
    assert f"recurrent.sm_90a: 5 bytes\n1 kernels in {tmp_path}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("given", ["bogus", "sm_90a,bogus", "sm_90a,", "compute_90", "sm_75"])
def test_build_for_an_architecture_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    from kdacore_cuda.build import packaging as package_build

    monkeypatch.setattr(package_build, "build_all", lambda *args, **kwargs: pytest.fail("built"))
    assert cli.main(["build", "--arch", given, "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"--arch: got {given.split(',')[-1]!r}" in said
    assert "sm_90a" in said


@pytest.mark.usefixtures("every_backend")
def test_what_is_built_already_takes_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kdacore_cuda.build import compiler
    from kdacore_cuda.build import packaging as package_build

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler._nvrtc.cache_clear()
    monkeypatch.setattr(package_build, "build_all", lambda *args, **kwargs: [])
    words = ["build", "--folder", str(tmp_path), "--arch"]
    assert cli.main([*words, "sm_90a,sm_100f"]) == 0
    assert cli.main([*words, "sm_80"]) == 1
    said = capsys.readouterr().err
    assert "building CUDA kernels failed:\nthe NVRTC bindings are not installed" in said
    assert "pip install '.[cuda]' in a checkout of kdacore" in said


@pytest.mark.usefixtures("every_backend")
def test_build_into_a_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cubins"
    assert cli.main(["build", "--arch", "sm_90a", "--folder", str(folder)]) == 2
    assert f"--folder: cannot write {folder}" in capsys.readouterr().err


@pytest.mark.usefixtures("every_backend")
def test_a_failed_build_shows_the_compiler_s_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kdacore_cuda.build import packaging as package_build

    def fake(*args: Any, **kwargs: Any) -> list[Path]:
        raise BackendBuildError("decode", "line 3: expected a semicolon")

    monkeypatch.setattr(package_build, "build_all", fake)
    assert cli.main(["build"]) == 1
    assert "line 3: expected a semicolon" in capsys.readouterr().err


class _BuilderPlugin:
    """A plugin with kernels to build, of a backend that is not listed."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self.built: list[tuple[tuple[str, ...], Path]] = []

    @hookimpl
    def kdacore_kernel_builders(self) -> list[KernelBuilder]:
        return [KernelBuilder(self.backend, ("sm_90",), self.folder, self.problem, self.build)]

    def problem(self, arch: str) -> str | None:
        return None if arch == "sm_100" else "no such GPU"

    def build(self, archs: tuple[str, ...], folder: Path, report: Callable[[str], None]) -> list[Path]:
        self.built.append((archs, folder))
        report(f"{self.backend}: built")
        return [folder / arch for arch in archs]


@pytest.fixture
def builders(tmp_path: Path) -> Iterator[tuple[_BuilderPlugin, _BuilderPlugin]]:
    plugins = _BuilderPlugin("one", tmp_path / "one"), _BuilderPlugin("two", tmp_path / "two")
    for plugin in plugins:
        REGISTRY.register(plugin, plugin.backend)
    yield plugins
    REGISTRY.reset()


def test_build_asks_every_plugin(
    builders: tuple[_BuilderPlugin, _BuilderPlugin], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = builders
    assert cli.main(["build"]) == 0
    assert one.built == [(("sm_90",), tmp_path / "one")] and two.built == [(("sm_90",), tmp_path / "two")]
    assert cli.main(["build", "--backend", "two", "--arch", "sm_100", "--folder", str(tmp_path)]) == 0
    assert len(one.built) == 1 and two.built[-1] == (("sm_100",), tmp_path)
    assert f"two: built\n1 kernels in {tmp_path}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "three"], "--backend: got 'three'; wanted one of one, two"),
        (["--folder", "here"], "--folder: is for one backend; --backend chooses it among one, two"),
        (["--arch", "sm_90,sm_80"], "--arch: got 'sm_80'; wanted one such as sm_90 (no such GPU)"),
    ],
)
def test_what_build_refuses(
    builders: tuple[_BuilderPlugin, _BuilderPlugin],
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["build", *words]) == 2
    assert said in capsys.readouterr().err
    assert not builders[0].built and not builders[1].built


def test_build_where_no_plugin_has_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build"]) == 2
    assert "no plugin has kernels to build" in capsys.readouterr().err


def test_build_names_a_plugin_with_another_answer(capsys: pytest.CaptureFixture[str]) -> None:
    class Plugin:
        @hookimpl
        def kdacore_kernel_builders(self) -> list[Any]:
            return ["sm_90"]

    REGISTRY.register(Plugin(), "strange")
    assert cli.main(["build"]) == 1
    said = capsys.readouterr().err
    assert "kdacore_kernel_builders" in said and "a str, not a kdacore.command_types.KernelBuilder" in said
    REGISTRY.reset()
