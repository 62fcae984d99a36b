"""docs/guide/environment.md and kdacore.config name the same variables, and nothing else reads the environment."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from kdacore import ConfigError, config

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("kdacore/**/*.py"), *ROOT.glob("backends/*/kdacore_*/**/*.py")]


def test_docs_and_code_name_the_same_variables() -> None:
    rows = re.findall(
        r"^\| `((?:KDACORE|FLA)_\w+)` \|", (ROOT / "docs/guide/environment.md").read_text(), re.MULTILINE
    )
    assert rows == list(config.VARIABLES)


def test_every_variable_in_the_sources_is_declared() -> None:
    named = {v for f in SOURCES for v in re.findall(r"\b(?:FLA_KDACORE|KDACORE_[A-Z_]+)\b", f.read_text())}
    assert named <= set(config.VARIABLES)


def test_only_config_reads_our_variables() -> None:
    reads = re.compile(r"environ(\.get\(|\[)[^\n]*KDACORE_|getenv\([^\n]*KDACORE_")
    assert [f.name for f in SOURCES if reads.search(f.read_text())] == []


def test_defaults() -> None:
    parsed = config.parse({})
    assert parsed.backend == () and parsed.selfcheck and not parsed.validate_values
    assert parsed.cache_dir.name == "kdacore"
    assert config.parse({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/kdacore")
    assert config.parse({"KDACORE_BACKEND": " a, b ,"}).backend == ("a", "b")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_caches_go_where_the_system_keeps_them(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    asked = []
    monkeypatch.setattr(config.sys, "platform", system)
    monkeypatch.setattr(
        platformdirs,
        "user_cache_path",
        lambda *name, **more: asked.append((name, more)) or Path("/caches/kdacore"),
    )
    assert config.parse({}).cache_dir == Path("/caches/kdacore")
    assert asked == [(("kdacore",), {"appauthor": False})]
    assert config.parse({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/kdacore")


def test_nobody_s_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may run as a user whom no list knows, without HOME: caches go to the folder for temporary files."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", staticmethod(nobody))
    folder = config.parse({}).cache_dir
    assert folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("kdacore-")
    with pytest.raises(ConfigError, match="KDACORE_CACHE_DIR"):
        config.parse({"KDACORE_CACHE_DIR": "~a user whom no list knows/x"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KDACORE_VALIDATE", "all"),
        ("KDACORE_SELFCHECK", "yes"),
        ("KDACORE_PALLAS_INTERPRET", "2"),
        ("KDACORE_INTEGRATIONS", "fla,vlm"),
        ("FLA_KDACORE", "yes"),
        ("KDACORE_PLUGIN_IMPORT_LIMIT", "soon"),
        ("KDACORE_PLUGIN_IMPORT_LIMIT", "0"),
    ],
)
def test_unknown_values_are_errors(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        config.parse({variable: value})
