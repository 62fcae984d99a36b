"""The translations have the signatures that the published engines have. Where wheels lie in a folder that
``--engine-wheels`` names, what is committed of them is compared with them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from published_sources import FACTS, read

from kdacore.integrations import sglang, sglang_tracked_states, vllm, vllm_arguments

PUBLISHED: dict[str, Any] = json.loads(FACTS.read_text())
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
}


def signature(function: Any) -> list[list[str]]:
    """As :mod:`published_sources` writes it."""
    found = []
    for p in inspect.signature(function).parameters.values():
        default = "" if p.default is p.empty else repr(p.default)
        found.append([KINDS[p.kind], p.name, default])
    return found


def published(engine: str, function: str) -> list[list[str]]:
    """A function's parameters, without what takes any other keyword."""
    (found,) = [rows for name, rows in PUBLISHED[engine]["functions"].items() if name.endswith(function)]
    return [row for row in found if row[0] != "others"]


def names_and_kinds(rows: list[list[str]]) -> list[list[str]]:
    return [row[:2] for row in rows]


VLLM = {
    "flashkda_prefill": "kimi_k3/nvidia/kda.py::_flashkda_prefill",
    "chunk_kda_with_fused_gate": "kimi_k3/nvidia/ops/third_party/kda/chunk.py::chunk_kda_with_fused_gate",
    "fused_recurrent_kda": "kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py::fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode": "fused_recurrent_kda_packed_decode",
    "glm_chunk_kda_with_fused_gate": "glm5next/nvidia/ops/third_party/kda/kernels.py::chunk_kda_with_fused_gate",
    "glm_fused_recurrent_kda": "glm5next/nvidia/ops/third_party/kda/kernels.py::fused_recurrent_kda",
}


@pytest.mark.parametrize("name", VLLM)
def test_vllm(name: str) -> None:
    assert signature(getattr(vllm_arguments, name))[1:] == published("vllm", VLLM[name])[1:] or (
        # vLLM declares None as the default of an argument that it cannot do without.
        name == "glm_fused_recurrent_kda"
        and names_and_kinds(signature(vllm_arguments.glm_fused_recurrent_kda))
        == names_and_kinds(published("vllm", VLLM[name]))
    )


def test_every_translation_for_vllm_is_compared() -> None:
    assert {t for functions in vllm.REPLACED.values() for t in functions.values()} == set(VLLM)


@pytest.mark.parametrize("name", sglang.METHODS)
@pytest.mark.parametrize("kernel", sglang.TRANSLATIONS)
def test_sglang(kernel: str, name: str) -> None:
    """A prefix: what a method takes by ``**kwargs`` has a name in ours."""
    ours = signature(getattr(sglang.TRANSLATIONS[kernel], name))
    theirs = published("sglang", f"{kernel.rpartition('.')[2]}.{name}")
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("backend", sglang_tracked_states.OBSERVED.values())
def test_what_is_observed_of_sglang(backend: str) -> None:
    """That the metadata has its attributes is held where they are read from the wheel."""
    assert published("sglang", f"{backend}.forward_extend")[0] == ["positional", "layer", ""]
    track = names_and_kinds(published("sglang", "MambaAttnBackendBase._track_mamba_state_extend"))
    assert track[:4] == [
        ["positional", name] for name in ("forward_batch", "h", "ssm_states", "forward_metadata")
    ]


def test_constants() -> None:
    constants = {**PUBLISHED["vllm"]["constants"], **PUBLISHED["sglang"]["constants"]}
    named = {name.rpartition("::")[2]: value for name, value in constants.items()}
    assert named["NULL_BLOCK_ID"] == str(vllm_arguments.NULL_BLOCK)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for group in ("DEFAULT_PLUGINS_GROUP", "GENERAL_PLUGINS_GROUP"):
        assert f'[project.entry-points."{named[group][1:-1]}"]' in project


def test_the_published_wheels(pytestconfig: pytest.Config) -> None:
    folder = pytestconfig.getoption("--engine-wheels", default=None)
    if folder is None:
        pytest.skip("needs the wheels of the engines: --engine-wheels=FOLDER")
    wheels = list(Path(folder).glob("*.whl"))
    assert {wheel.name.split("-")[0] for wheel in wheels} == set(PUBLISHED)
    for wheel in wheels:
        assert read(wheel) == PUBLISHED[wheel.name.split("-")[0]]
