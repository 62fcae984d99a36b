"""Launch configurations: the shipped files are sound, and a lookup always has an answer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdacore_triton import configs

pytestmark = pytest.mark.quick

SHAPE = {"K": 128, "V": 128, "rows": 32, "state": "float32", "v_first": False}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Configuration files of the test's own."""

    def write(**contents: Any) -> None:
        for name, data in contents.items():
            text = data if isinstance(data, str) else json.dumps(data)
            (tmp_path / f"{name}.json").write_text(text)
        forget()

    def forget() -> None:
        for cached in (configs._get, configs.spaces, configs.archs, configs._choices):
            cached.cache_clear()

    monkeypatch.setattr(configs, "_folder", lambda: tmp_path)
    write(candidates={"scan": {"class": ["T", "H"], "params": {"BV": [16, 32], "num_warps": [1, 2]}}})
    yield SimpleNamespace(write=write)
    monkeypatch.undo()
    forget()


def config(BV: int = 16, num_warps: int = 1) -> dict[str, int]:
    return {"BV": BV, "num_warps": num_warps}


def test_shipped_files_are_valid() -> None:
    assert configs.archs() and "sm_90" in configs.archs()
    for choice in configs.shipped():
        assert configs.spaces()[choice.kernel].allows(choice.config)
        assert choice.config in configs.candidates(choice.kernel)


def test_every_kernel_is_served_everywhere() -> None:
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert {c.kernel for c in configs.shipped_for(arch)} == set(configs.kernels())


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", ""])
def test_any_architecture_has_an_answer(arch: str) -> None:
    assert set(configs.get("recurrent", arch, **SHAPE)) == {"BV", "num_warps", "num_stages"}


def test_unknown_kernel_is_an_error() -> None:
    with pytest.raises(KeyError):
        configs.get("no such kernel", "sm_90")


def test_first_matching_rule_wins(files: Any) -> None:
    rules = [
        {"when": {"T": [None, 64]}, "config": config(16, 1)},
        {"when": {"T": [65, None], "H": 8}, "config": config(32, 1)},
        {"when": {}, "config": config(32, 2)},
    ]
    files.write(sm_90={"scan": rules})
    assert configs.get("scan", "sm_90", T=64, H=8) == config(16, 1)
    assert configs.get("scan", "sm_90", T=65, H=8) == config(32, 1)
    assert configs.get("scan", "sm_90", T=65, H=9) == config(32, 2)
    with pytest.raises(KeyError):
        configs.get("scan", "sm_90", H=8)


def test_nearest_architecture(files: Any) -> None:
    def only(BV: int, num_warps: int) -> dict[str, Any]:
        return {"scan": [{"when": {}, "config": config(BV, num_warps)}]}

    files.write(sm_80=only(16, 1), sm_90=only(16, 2), sm_100=only(32, 1), gfx942=only(32, 2))
    expected = {
        "sm_80": (16, 1), "sm_86": (16, 1), "sm_90": (16, 2), "sm_90a": (16, 2), "sm_100": (32, 1),
        "sm_120": (32, 1), "sm_75": (16, 1), "gfx950": (32, 2), "gfx90a": (32, 2), "": (16, 2), "v5e": (16, 2),
    }  # fmt: skip
    for arch, want in expected.items():
        assert configs.get("scan", arch) == config(*want), arch


def test_a_file_may_leave_kernels_to_the_next(files: Any) -> None:
    params = {"BV": [16, 32], "num_warps": [1, 2]}
    files.write(candidates={"scan": {"params": params}, "gate": {"params": params}})
    both = {k: [{"when": {}, "config": config(16, 1)}] for k in ("scan", "gate")}
    files.write(sm_90=both, sm_100={"scan": [{"when": {}, "config": config(32, 2)}]})
    assert configs.get("scan", "sm_100") == config(32, 2)
    assert configs.get("gate", "sm_100") == config(16, 1)
    assert [(c.arch, c.kernel) for c in configs.shipped_for("sm_100")] == [
        ("sm_100", "scan"),
        ("sm_90", "gate"),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        [1],
        {"other kernel": [{"when": {}, "config": config()}]},
        {"scan": []},
        {"scan": [{"when": {"T": 4}, "config": config()}]},
        {"scan": [{"when": {"colour": 4}, "config": config()}, {"when": {}, "config": config()}]},
        {"scan": [{"when": {}, "config": config(BV=48)}]},
        {"scan": [{"when": {}, "config": {"BV": 16}}]},
        {"scan": [{"when": {}, "config": config() | {"extra": 1}}]},
        {"scan": [{"config": config()}]},
    ],
)
def test_malformed_files_are_refused(files: Any, bad: Any) -> None:
    files.write(sm_90=bad)
    with pytest.raises(configs.InvalidConfigError, match="sm_90"):
        configs.get("scan", "sm_90", T=1, H=1)


def test_malformed_candidates_are_refused(files: Any) -> None:
    for bad in ({"scan": {}}, {"scan": {"params": {}}}, {"scan": {"params": {"BV": [1]}, "typo": []}}):
        files.write(candidates=bad)
        with pytest.raises(configs.InvalidConfigError, match="candidates"):
            configs.candidates("scan")


def test_candidates_leave_out_what_is_excluded(files: Any) -> None:
    assert len(configs.candidates("scan")) == 4
    files.write(
        candidates={"scan": {"params": {"BV": [16, 32], "num_warps": [1, 2]}, "exclude": [config(32, 1)]}}
    )
    assert configs.candidates("scan") == [config(16, 1), config(16, 2), config(32, 2)]


def test_override_forces_and_restores() -> None:
    told = []
    configs.on_change(lambda: told.append(1))
    before = configs.get("recurrent", "sm_90", **SHAPE)
    other = next(c for c in configs.candidates("recurrent") if c != before)
    with configs.override("recurrent", other):
        assert configs.get("recurrent", "sm_90", **SHAPE) == other
        with configs.override("recurrent", before):
            assert configs.get("recurrent", "sm_90", **SHAPE) == before
        assert configs.get("recurrent", "sm_90", **SHAPE) == other
    assert configs.get("recurrent", "sm_90", **SHAPE) == before
    assert len(told) == 4
    configs._listeners.pop()
    with pytest.raises(ValueError, match="candidates"), configs.override("recurrent", {"BV": 3}):
        pass
