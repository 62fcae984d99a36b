"""``kdacore tune configs``: what it lists, the data file it writes, and what it says where it cannot run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kdacore.bench import config_search  # noqa: E402
from kdacore.bench.clock import Budget  # noqa: E402
from kdacore.cli import main as cli  # noqa: E402
from kdacore.command_types import ConfigTuner  # noqa: E402
from kdacore.hookspecs import hookimpl  # noqa: E402
from kdacore.oracle import recurrence, stages  # noqa: E402
from kdacore.registry import REGISTRY  # noqa: E402
from kdacore.types import Backend, Device, IntraOutputs, OpImpl, Outputs, Requirement  # noqa: E402
from kdacore_triton import configs, tune_jobs  # noqa: E402

pytestmark = pytest.mark.usefixtures("every_backend")

CPU = Device("cpu", 0, "sm_90")
BUDGET = Budget(samples=1, seconds=1.0, least=1)
GPU = torch.cuda.is_available()


def test_list_names_every_shipped_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "configs", "--list", "--arch", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert all(op in out for op in tune_jobs.OPS) and "chunk_kda: everything else" in out
    assert max(map(len, out.splitlines())) <= 100
    rules = [c for c in configs.shipped_for("sm_90") if c.when]
    assert sum(line.strip().startswith(tuple(tune_jobs.OPS)) for line in out.splitlines()) > len(rules)


def test_list_of_one_op_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--list", "--arch", "sm_90", "--op", "kda_chunk_intra", "--only", "float32"]
    assert cli.main(["tune", "configs", *words]) == 0
    assert capsys.readouterr().out.count("kda_chunk_intra") == 1


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--only", "no such rule"], 2, "no rule is left"),
        (["--samples", "0"], 2, "must be positive"),
        (["--arch", "sm_90"], 2, "--arch is for --list"),
        (["--device", "cuda:99"], 1, "no NVIDIA GPU"),
        (["--fresh"], 2, "--fresh: for `kdacore tune costs`"),
    ],
)
def test_what_it_cannot_do(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "configs", *words]) == status
    assert said in capsys.readouterr().err


class _TunedElsewhere:
    """A plugin with one rule to tune, whose backend misses something."""

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        needs = Requirement("moonlib", lambda: "moonlib is not installed", "pip install moonlib")
        ops = {"chunk_kda": OpImpl(lambda request, inputs: Outputs(inputs.v))}
        return [Backend("moon", "1", ("torch",), ops, requirements=(needs,))]

    @hookimpl
    def kdacore_config_tuners(self) -> list[ConfigTuner]:
        return [ConfigTuner("moon", self.jobs, lambda path, arch, chosen: None)]

    def jobs(self, arch: str, ops: tuple[str, ...]) -> list[tune_jobs.Job]:
        job = tune_jobs.Job("chunk_kda", "moon", {}, {"tile": 3}, {"T": 7})
        return [job] if arch == "sm_90" and "chunk_kda" in (ops or ("chunk_kda",)) else []


@pytest.fixture
def tuned_elsewhere() -> Iterator[None]:
    REGISTRY.register(_TunedElsewhere(), "moon")
    yield
    REGISTRY.reset()


def test_rules_of_every_plugin_are_listed(tuned_elsewhere: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "configs", "--list", "--arch", "sm_90", "--only", "everything else"]) == 0
    out = capsys.readouterr().out
    assert "tile=3" in out and "T=7" in out and "kda_chunk_intra" in out
    assert cli.main(["tune", "configs", "--list", "--arch", "sm_80", "--op", "chunk_kda"]) == 0
    assert "tile=3" not in capsys.readouterr().out


def test_what_a_tuned_backend_misses_is_named(
    tuned_elsewhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "configs"]) == 1
    assert "moon: moonlib is not installed: pip install moonlib" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_80", "gfx942"])
def test_every_job_falls_under_its_own_rule(arch: str) -> None:
    jobs = tune_jobs.jobs(arch)
    assert {job.op for job in jobs} == set(tune_jobs.OPS)
    for job in jobs:
        shape = tune_jobs.shape_class(job.kernel, job.sizes)
        assert dict(configs.get(job.kernel, arch, **shape)) == dict(job.config), job.name
        request, _ = tune_jobs.make(job, tune_jobs.small(job.sizes), CPU)
        assert (request.K, request.dtype) == (job.sizes["K"], job.sizes["dtype"])


def job_of(op: str) -> tune_jobs.Job:
    job = tune_jobs.jobs("sm_90", (op,))[-1]
    sizes = {**job.sizes, "B": 1, "T": min(job.sizes["T"], 20), "H": 1, "K": 16, "dtype": "float32"}
    return tune_jobs.Job(job.op, job.kernel, job.when, job.config, sizes)


def right(request: Any, inputs: Any) -> Any:
    """The oracle in the place of a kernel."""
    if request.op == "kda_chunk_intra":
        return IntraOutputs(*(torch.tensor(x) for x in stages.oracle_chunk_intra(request, inputs)))
    found = recurrence.oracle_forward(request, inputs)
    if request.inplace_state:
        inputs.initial_state.copy_(torch.tensor(found.final_state))
        return Outputs(torch.tensor(found.o))
    return Outputs(torch.tensor(found.o), torch.tensor(found.final_state))


@pytest.mark.parametrize("op", list(tune_jobs.OPS))
def test_the_search_keeps_the_fastest_right_configuration(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(op)
    parameter, values = list(configs.spaces()[job.kernel].params.items())[
        -1 if op != "fused_recurrent_kda" else 1
    ]
    other = [v for v in values if v != job.config[parameter]]
    broken, wrong, quick = other[0], other[1], other[2]

    def run(request: Any, inputs: Any) -> Any:
        value = configs.get(job.kernel, "sm_90")[parameter]
        if value == broken:
            raise RuntimeError("out of shared memory\nmore")
        found = right(request, inputs)
        if value == wrong:
            found[0][:] += 1
        return found

    def clock(step: Any) -> float:
        step()
        return 0.5 if seen[-1] == quick else 1.0

    seen: list[Any] = []

    def spy(request: Any, inputs: Any) -> Any:
        seen.append(configs.get(job.kernel, "sm_90")[parameter])
        return run(request, inputs)

    monkeypatch.setattr(tune_jobs, "runner", lambda job: spy)
    told: list[str] = []
    found = config_search.tune(job, CPU, BUDGET, told.append, clock)
    assert found.best is not None and found.config == {**job.config, parameter: quick}
    assert found.gain == 2.0 and any(parameter in line for line in told)
    notes = {t.config[parameter]: t.note for t in found.trials if all(
        t.config[p] == job.config[p] for p in job.config if p != parameter)}  # fmt: skip
    assert notes[broken] == "out of shared memory" and notes[wrong].startswith("wrong") and not notes[quick]


def test_the_data_file_round_trips(tmp_path: Path) -> None:
    jobs = tune_jobs.jobs("sm_90", ("kda_chunk_intra",))
    changed = {**jobs[0].config, "heads": 16}
    tune_jobs.write(tmp_path / "sm_90.json", "sm_90", [(jobs[0], changed)])
    read = json.loads((tmp_path / "sm_90.json").read_text())
    assert set(read) == {c.kernel for c in configs.shipped_for("sm_90")}
    choices = configs.check("sm_90.json", "sm_90", read)
    shipped = configs.shipped_for("sm_90")
    by_kernel = {k: list(v) for k, v in itertools.groupby(choices, lambda c: c.kernel)}
    for choice, before in itertools.zip_longest(
        by_kernel["recurrent"], [c for c in shipped if c.kernel == "recurrent"]
    ):
        assert choice == before
    assert dict(by_kernel["chunk_intra"][0].config) == changed


def test_an_illegal_outcome_is_not_written(tmp_path: Path) -> None:
    job = tune_jobs.jobs("sm_90", ("kda_chunk_intra",))[0]
    with pytest.raises(configs.InvalidConfigError):
        tune_jobs.write(tmp_path / "sm_90.json", "sm_90", [(job, {**job.config, "heads": 3})])
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_gpu_one_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, measured = tmp_path / "data.json", tmp_path / "all.json"
    words = [
        "tune",
        "configs",
        "--op",
        "kda_chunk_intra",
        "--only",
        "K <= 64",
        "--samples",
        "3",
        "--seconds",
        "1",
    ]
    assert cli.main([*words, "--out", str(out), "--json", str(measured)]) == 0
    assert "chunk_intra" in json.loads(out.read_text())
    (rule,) = json.loads(measured.read_text())["rules"]
    assert len([t for t in rule["trials"] if t["seconds"]]) > 5
