"""``kdacore explain`` and ``kdacore plugins``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import kdacore
from kdacore.calls.description import CallDescription, options
from kdacore.calls.requests import request_of
from kdacore.calls.values import Shape
from kdacore.cli import main as cli
from kdacore.dispatch import selection
from kdacore.hookspecs import hookimpl
from kdacore.ops import FEATURES, OPS
from kdacore.registry import REGISTRY, Registered
from kdacore.types import Backend, Candidate, OpImpl, Requirement, Selection

CPU = ["--kind", "numpy", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.parametrize("op", list(OPS))
def test_every_op_can_be_explained(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = 8 if OPS[op].family == "decode" else 128
    assert cli.main(["explain", op, "--shape", f"1,{tokens},2,2,32,32", *CPU]) == 0
    out = capsys.readouterr().out
    assert "-> reference: supported" in out
    others = "xla: supported" in out
    why = "the only one that automatic choice takes" if others else "the only one that can"
    assert out.endswith(f"chosen: reference ({why})\n")


def test_it_says_what_the_python_function_says(capsys: pytest.CaptureFixture[str]) -> None:
    x = kdacore.ShapeDtype((2, 64, 2, 16))
    wanted = kdacore.explain("chunk_kda", x, x, x, x, kdacore.ShapeDtype((2, 64, 2)), output_final_state=True)
    assert cli.main(["explain", "chunk_kda", "--shape", "2,64,2,2,16,16", "--output-final-state", *CPU]) == 0
    assert capsys.readouterr().out == f"{wanted}\n"


def test_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["explain", "chunk_kda", "--shape", "1,65536,16,16,128,128", "--cp", "4"]
    assert cli.main(call) == 0
    assert "ranks: 4, each with T=65536 of 262144 tokens" in capsys.readouterr().out
    assert cli.main([*call, "--json"]) == 0
    assert "each rank receives" in json.loads(capsys.readouterr().out)["text"]
    assert cli.main(["explain", "fused_recurrent_kda", "--cp", "2"]) == 2
    assert "'cp'" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "chunk_kda", "--json", *CPU]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "reference"
    assert found["candidates"][0]["reasons"] == []


@pytest.mark.parametrize(
    "words",
    [
        ["--safe-gate"],
        ["--use-gate-in-kernel"],
        ["--use-gate-in-kernel", "--safe-gate", "--lower-bound", "-4"],
        ["--use-qk-l2norm-in-kernel", "--use-beta-sigmoid-in-kernel", "--allow-neg-eigval"],
        ["--initial-state", "bfloat16", "--output-final-state", "--state-v-first"],
        ["--cu-seqlens", "3"],
        ["--checkpoint-every", "64", "--disable-recompute"],
    ],
)
def test_switches_of_chunk_kda(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "chunk_kda", "--shape", "1,128,2,4,32,32", *CPU, *words]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "words",
    [
        ["--state-indices", "8", "--inplace-state"],
        ["--state-indices", "8", "--read-only-state"],
        ["--state-indices", "8", "--num-accepted-tokens", "--inplace-state"],
        ["--state-indices", "8", "--null-index", "0", "--has-initial-state"],
        ["--state-indices", "8", "--inplace-state", "--write-indices", "2"],
        ["--write-pool", "8", "--inplace-state", "--write-indices", "1"],
        ["--out"],
    ],
)
def test_switches_of_fused_recurrent_kda(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "fused_recurrent_kda", "--shape", "2,4,2,2,32,32", *CPU, *words]) == 0
    capsys.readouterr()


def test_switches_of_a_server_s_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cu-seqlens", "3", "--state-indices", "8", "--inplace-state", "--null-index", "0", "--out"]
    words += ["--has-initial-state", "--write-indices", "1", "--write-pool", "9", "--checkpoint-offsets", "5"]
    assert cli.main(["explain", "chunk_kda", "--shape", "1,70,2,2,32,32", *CPU, *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["backend"] == "reference"
    assert cli.main(["explain", "kda_gate", "--shape", "1,70,2,2,32,32", *CPU, "--write-pool", "9"]) == 2
    assert "write_pool" in capsys.readouterr().err


def test_what_is_asked_for_reaches_the_request() -> None:
    call = CallDescription(
        op="fused_recurrent_kda",
        shape=Shape(B=3, T=4, H=2, HV=4, K=16, V=32),
        pool="accepted",
        pool_rows=17,
        options=options(use_gate_in_kernel=True),
    )
    request = request_of(call)
    assert (request.N, request.pool_size, request.state_indices_ndim) == (3, 17, 2)
    assert (request.gate, request.HV, request.V) == ("softplus", 4, 32)


def test_nobody_can_serve_it(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = Backend(
        name="narrow",
        version="1",
        kinds=("torch",),
        ops={"chunk_kda": OpImpl(forward=print, serves=FEATURES)},
    )

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [narrow]

    REGISTRY.register(Plugin(), "narrow")
    assert cli.main(["explain", "chunk_kda", "--backend", "narrow", *CPU]) == 1
    out = capsys.readouterr().out
    assert "[array_kind] does not take these arrays (got numpy; wanted torch)" in out
    assert "chosen: none (backend 'narrow' was forced and cannot serve this call)" in out


@pytest.fixture
def fast_on_cuda() -> Iterator[None]:
    """A backend of the highest rank that needs a device and a package."""
    needs = (
        Requirement("board", lambda: "no board", "buy one", hardware=True),
        Requirement("library", lambda: None, "pip install library"),
    )
    fast = Backend(
        name="fast",
        version="1",
        kinds=("torch",),
        ops={"chunk_kda": OpImpl(forward=print, serves=FEATURES)},
        requirements=needs,
        rank=1000,
    )

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [fast]

    REGISTRY.register(Plugin(), "fast")
    yield
    REGISTRY.unregister("fast")


@pytest.mark.usefixtures("fast_on_cuda")
def test_hardware_that_is_assumed_need_not_be_here(capsys: pytest.CaptureFixture[str]) -> None:
    hopper = ["--device", "cuda", "--arch", "sm_90"]
    assert cli.main(["explain", "chunk_kda", *hopper]) == 0
    out = capsys.readouterr().out
    assert "-> fast: supported" in out and "     assumed, not here: no board\n" in out
    chosen, *last = out.splitlines()[-3:]
    assert chosen.startswith("chosen: fast")
    assert last == ["on sm_90: fast, no time measured", "to get it: pip install library"]
    assert cli.main(["explain", "chunk_kda", "--backend", "fast", *hopper, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "fast"
    assert [c["lacking"] for c in found["candidates"] if c["backend"] == "fast"] == [["no board"]]


@pytest.mark.usefixtures("fast_on_cuda")
def test_arrays_that_are_here_need_their_hardware() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 4, 2, 16)
    selection = kdacore.explain("chunk_kda", x, x, x, -x, x[..., 0])
    assert [r.code for r in selection.candidate("fast").reasons] == ["unavailable"]
    assert selection.backend != "fast"


def test_a_package_that_is_missing_is_noted_where_hardware_is_assumed() -> None:
    """With the line that installs it, and nowhere else."""
    bare = Backend(
        name="bare",
        version="1",
        kinds=("torch",),
        ops={"chunk_kda": OpImpl(forward=print, serves=FEATURES)},
        requirements=(Requirement("library", lambda: "no library", "pip install library"),),
        rank=1000,
    )
    call = CallDescription(device="cuda", arch="sm_90", kind="torch", dtype="bfloat16")
    judged = selection.judge(Registered(bare, "bare", "bare"), request_of(call), assumed=True)
    assert judged.supported and judged.lacking == ("no library; to get it: pip install library",)
    assert judged.remedies == ("pip install library",)
    judged = selection.judge(Registered(bare, "bare", "bare"), request_of(call))
    assert [r.code for r in judged.reasons] == ["unavailable"] and not judged.lacking


@pytest.mark.usefixtures("every_backend")
def test_the_form_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/guide/command-line.md has it."""
    words = ["--shape", "1,8192,8,8,128,128", "--device", "cuda", "--arch", "sm_90", "--safe-gate"]
    assert cli.main(["explain", "chunk_kda", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    chosen = " ".join(" ".join(lines).partition("chosen: ")[2].split())
    assert chosen.startswith("cuda, segments: 8 heads") and "; the device is assumed (" in chosen
    assert max(map(len, lines)) <= 100
    wanted = (
        r"on sm_90( with kdacore\[cuda\])?: cuda, segments, 0\.\d+ ms measured( to get it: pip install .*)?"
    )
    assert re.fullmatch(wanted, f"on sm_90{chosen.rpartition('on sm_90')[2]}")
    assert cli.main(["explain", "chunk_kda", *words, "--json"]) == 0
    forms = {c["backend"]: c["form"] for c in json.loads(capsys.readouterr().out)["candidates"]}
    assert forms["cuda"].startswith("segments: 8 heads (up to ") and forms["triton"].startswith(
        "segments: 8 heads"
    )
    assert not forms["reference"] and not forms["pallas"]


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
def test_the_compilers_name_of_an_architecture_is_the_devices(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for name in ("sm_90", "sm_90a", "sm90", "H200"):
        assert cli.main(["explain", op, "--arch", name]) == 0
        said.append(capsys.readouterr().out)
    monkeypatch.setenv("KDACORE_ARCH", "sm_90a")
    kdacore.config.refresh()
    assert cli.main(["explain", op]) == 0
    assert {*said, capsys.readouterr().out} == {said[0]} and "-> cuda: supported" in said[0]
    shapes = {n: kdacore.ShapeDtype((1, 64, 2, 128), "bfloat16", "cuda", "torch", "sm_90a") for n in "qkv"}
    assert kdacore.explain(op, **shapes, **_gates(op)).request.device.arch == "sm_90"


def _gates(op: str) -> dict[str, kdacore.ShapeDtype]:
    shape = (1, 64, 2, 128) if op == "chunk_kda" else (1, 64, 2)
    shapes = {"g": shape, "beta": (1, 64, 2)}
    return {n: kdacore.ShapeDtype(s, "bfloat16", "cuda", "torch", "sm_90") for n, s in shapes.items()}


MISSING = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        gone = ("torch", "triton", "jax", "jaxlib")
        return None if name.partition(".")[0] in gone else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from kdacore.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_laptop_without_packages_is_told_what_an_h200_would_run() -> None:
    words = ["explain", "chunk_kda", "--arch", "sm_90", "--shape", "1,8192,8,8,128,128", "--safe-gate"]
    run = subprocess.run([sys.executable, "-c", MISSING, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert max(map(len, run.stdout.splitlines())) <= 100
    last = "on sm_90" + " ".join(run.stdout.split()).rpartition("on sm_90")[2]
    install = r"pip install '\.\[cuda\]' in a checkout of kdacore"
    wanted = rf"on sm_90 with kdacore\[cuda\]: cuda, segments, 0\.\d+ ms measured to get it: {install}"
    assert re.fullmatch(wanted, last), run.stdout


def test_a_line_that_another_one_begins_with_is_said_once() -> None:
    """Without NVRTC, on an architecture without packaged kernels."""
    lines = (
        "pip install '.[cuda]' in a checkout",
        "pip install '.[cuda]' in a checkout, or a wheel",
        "buy one",
    )
    fields = ("cuda", (), None, 0, True, ("no driver",))
    request = request_of(CallDescription(device="cuda", arch="sm_89", kind="torch", dtype="bfloat16"))
    told = Selection(request, "cuda", "a test", (Candidate(*fields, remedies=lines),))
    assert str(told).splitlines()[-3:] == [
        "on sm_89 with kdacore[cuda]: cuda, no time measured",
        "to get it: pip install '.[cuda]' in a checkout",
        "to get it: buy one",
    ]


def test_an_architecture_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "chunk_kda", "--arch", "hopper"]) == 2
    assert "'hopper'; wanted an architecture such as sm_90, or a GPU such as H200" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["sm_90", "v5e"])
def test_a_cpu_has_no_architecture(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "chunk_kda", *CPU, "--arch", arch]) == 2
    assert "argument 'arch'" in capsys.readouterr().err


STRAY = [
    ("chunk_kda", ["--inplace-state"], "inplace_state"),
    ("chunk_kda", ["--read-only-state"], "read_only_state"),
    ("chunk_kda", ["--num-accepted-tokens"], "num_accepted_tokens"),
    ("fused_recurrent_kda", ["--checkpoint-offsets", "3"], "checkpoint_offsets"),
    ("kda_gate", ["--out"], "out"),
    ("chunk_kda", ["--chunk-size", "32"], "chunk_size"),
    ("fused_recurrent_kda", ["--checkpoint-every", "64"], "checkpoint_every"),
    ("fused_recurrent_kda", ["--disable-recompute"], "disable_recompute"),
    ("kda_gate", ["--cu-seqlens", "2"], "cu_seqlens"),
    ("kda_gate", ["--safe-gate"], "safe_gate"),
    ("kda_chunk_intra", ["--use-gate-in-kernel"], "use_gate_in_kernel"),
    ("kda_chunk_intra", ["--initial-state", "float32"], "initial_state"),
]


@pytest.mark.parametrize(("op", "words", "named"), STRAY, ids=[f"{op} {w[0]}" for op, w, _ in STRAY])
def test_what_the_op_does_not_have(
    op: str, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it the answer would be of another call."""
    assert cli.main(["explain", op, "--shape", "1,64,2,2,16,16", *CPU, *words]) == 2
    assert f"{op}: argument '{named}': got " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--use-gate-in-kernel"], ["--use-gate-in-kernel", "--lower-bound", "-5"]])
def test_a_gate_as_a_stage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "kda_chunk_gate", "--shape", "1,64,2,2,16,16", *CPU, *words]) == 0
    capsys.readouterr()


def test_a_device_that_a_backend_brings(capsys: pytest.CaptureFixture[str]) -> None:
    ops = {"chunk_kda": OpImpl(forward=print, serves=FEATURES)}
    own = Backend(name="own", version="1", kinds=("torch",), ops=ops, device_types=("npu",))

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [own]

    REGISTRY.register(Plugin(), "own")
    assert cli.main(["explain", "chunk_kda", "--backend", "own", "--device", "npu"]) == 0
    assert "chosen: own" in capsys.readouterr().out


def test_an_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "chunk_kda", "--backend", "nonsense", *CPU]) == 2
    assert "'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--dtype", "float99"], "'q'"),
        (["--shape", "1,8,2,3,16,16"], "'v'"),
        (["--lower-bound", "-5"], "'lower_bound'"),
        (["--checkpoint-every", "65"], "'checkpoint_every'"),
    ],
)
def test_a_broken_contract_is_2_and_names_the_argument(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "chunk_kda", *CPU, *words]) == 2
    assert f"argument {named}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--chunk-size", "0"], *(["--device", word] for word in ("cuda:x", "cuda:-1", "", "cudaa", "gpu"))],
)
def test_numbers_and_devices_that_are_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["explain", "chunk_kda", *words])
    assert done.value.code == 2
    assert f"argument {words[0]}: {words[1]!r} is " in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["1,2,3", "a,b,c,d,e,f"])
def test_a_shape_that_is_none(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["explain", "chunk_kda", "--shape", shape])
    assert done.value.code == 2
    assert "B,T,H,HV,K,V" in capsys.readouterr().err


def test_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "kdacore_reference" in out and "chunk_kda" in out
    assert max(map(len, out.splitlines())) <= 100
