"""The launcher against a fake CUDA driver: every byte it hands over is what Triton's own launch hands over."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from compiled_process import run_python

HERE = Path(__file__).parent / "driver"
HAS_COMPILER = bool(shutil.which("gcc")) and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


@pytest.mark.skipif(not HAS_COMPILER, reason="Triton's launcher is compiled with gcc and the Python headers")
def test_fast_launch_equals_tritons(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, HERE / "fake_cuda.c"], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    done = run_python(
        HERE / "launch_on_fake.py",
        LD_LIBRARY_PATH=str(tmp_path),
        TRITON_LIBCUDA_PATH=str(tmp_path),
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
