"""Builds of AITER's modules with a stand-in compiler that fails in every way that AITER's has been seen to."""

from __future__ import annotations

import _ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.units import BuildOptions
from mla_ops import warmup
from mla_ops.backends.aiter import build, runtime
from mla_ops.backends.aiter.build import BuildError, ModuleBuilder, build_key, modules_for, sweep_locks, unsound
from mla_ops.backends.aiter.contract import Contract, Installation
from mla_ops.backends.aiter.probe import ProbeShape, probe, run_probe
from mla_ops.integrations.aiter_units import AiterModulesUnit, aiter_units

from .fake_rocm import Launch, Launches

ROOT = Path(build.__file__).parents[3]
NAMES = ("module_aiter_enum", "module_mla_asm", "module_cache")
# A whole ELF file: a header whose section table ends where the file does.
ELF = (
    "b'\\x7fELF' + bytes(36) + (64).to_bytes(8, 'little') + bytes(10) + (64).to_bytes(2, 'little')"
    " + (1).to_bytes(2, 'little') + bytes(2 + 64) + b'amdgcn-amd-amdhsa--gfx942'"
)
WRITE = f"open(module + '.so', 'wb').write({ELF})\n"
TOKEN = "json.dump({'module': module, 'nonce': nonce}, open(result, 'w'))\n"


def builder(tmp_path: Path, script: str = WRITE + TOKEN, **options: Any) -> ModuleBuilder:
    """A builder whose compiler is ``script``; every run of it leaves a file in ``tmp_path/runs``."""
    runs = tmp_path / "runs"
    runs.mkdir(exist_ok=True)
    prelude = f"""
        import json, os, signal, sys, time
        module, result, nonce = sys.argv[1:4]
        open(os.path.join({str(runs)!r}, f"{{module}}.{{os.getpid()}}"), "w").write(json.dumps(dict(os.environ)))
    """
    code = textwrap.dedent(prelude) + script
    installation = Installation(tmp_path / "aiter", tmp_path, "0.0", Contract({}, False, (), False, False), "digest")
    defaults: dict[str, Any] = {"archs": ["gfx942"], "timeout": 20.0, "command": (sys.executable, "-c", code)}
    return ModuleBuilder(installation, tmp_path / "jit", **(defaults | options))


def runs(tmp_path: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in (tmp_path / "runs").iterdir())


def silent(line: str) -> None:
    pass


def test_modules_are_built_once_and_then_found(tmp_path: Path) -> None:
    built = builder(tmp_path).build(NAMES, silent)
    assert list(built) == list(NAMES)
    assert builder(tmp_path).build(NAMES, silent) == built
    assert runs(tmp_path) == sorted(NAMES)
    assert sorted(path.name for path in (tmp_path / "jit").iterdir()) == sorted(f"{name}.so" for name in NAMES)


FAILURES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    "abort": ("os.abort()", "killed by SIGABRT"),
    "exit 0": ("os._exit(0)", "exit code 0 and no result"),
    "SystemExit": ("raise SystemExit('build failed')", "exit code 1\nbuild failed"),
    "exit 0 after the file": (WRITE + "sys.exit(0)", "exit code 0 and no result"),
    "another's token": (WRITE + "nonce = 'old'\n" + TOKEN, "exit code 0 and no result"),
    "no file": (TOKEN, "made no file"),
    "half a file": (f"open(module + '.so', 'wb').write(({ELF})[:100])\n" + TOKEN, "cut off at 100 bytes"),
    "not a library": ("open(module + '.so', 'w').write('x' * 99)\n" + TOKEN, "not an ELF file"),
    "wrong arch": (WRITE.replace("gfx942", "gfx950") + TOKEN, "no code for gfx942"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_builder_that_fails_in_any_way_publishes_nothing(case: str, tmp_path: Path) -> None:
    script, message = FAILURES[case]
    with pytest.raises(BuildError, match=message):
        builder(tmp_path, script).build(["module_cache"], silent)
    assert list((tmp_path / "jit").iterdir()) == []
    assert builder(tmp_path).build(["module_cache"], silent)  # and the next one can


def test_a_builder_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"""
import subprocess
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(process.pid))
time.sleep(600)
"""
    with pytest.raises(BuildError, match="no end after 3 s"):
        builder(tmp_path, script, timeout=3.0).build(["module_cache"], silent)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child.read_text()}").exists() and _running(int(child.read_text())):
        assert time.monotonic() < deadline, "the compiler outlived its builder"
        time.sleep(0.05)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_modules_that_succeed_are_published_when_another_fails(tmp_path: Path) -> None:
    script = "if module == 'module_mla_asm': sys.exit(3)\n" + WRITE + TOKEN
    with pytest.raises(BuildError, match="module_mla_asm could not be built: the builder ended with exit code 3"):
        builder(tmp_path, script).build(NAMES, silent)
    assert set(builder(tmp_path).sound()) == {"module_aiter_enum", "module_cache"}


def test_the_base_module_is_there_when_the_others_are_built(tmp_path: Path) -> None:
    script = "assert module == 'module_aiter_enum' or os.path.exists('module_aiter_enum.so')\n" + WRITE + TOKEN
    builder(tmp_path, script).build(NAMES, silent)


def test_compiler_processes_and_targets_are_shared_out_by_environment(tmp_path: Path) -> None:
    builder(tmp_path, archs=["gfx942"], parallel=2, max_jobs=9, compute_units=304).build(NAMES, silent)
    (seen,) = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("module_mla_asm.*")]
    assert (seen["MAX_JOBS"], seen["GPU_ARCHS"], seen["CU_NUM"], seen["AITER_AOT_IMPORT"]) == (
        "4",
        "gfx942",
        "304",
        "1",
    )
    assert seen["AITER_JIT_DIR"] != str(tmp_path / "jit")


def test_stale_locks_of_all_three_layers_are_swept(tmp_path: Path) -> None:
    locks = ["lock_module_cache", "module_cache/build/lock", "module_cache/build/.ninja_lock"]
    for name in locks:
        path = tmp_path / "jit" / "build" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert len(sweep_locks(tmp_path / "jit")) == 3
    for name in locks:
        assert not (tmp_path / "jit" / "build" / name).exists()


def test_a_damaged_module_is_built_again(tmp_path: Path) -> None:
    builder(tmp_path).build(["module_cache"], silent)
    (tmp_path / "jit" / "module_cache.so").write_bytes(b"damaged")
    builder(tmp_path).build(["module_cache"], silent)
    assert runs(tmp_path) == ["module_cache"] * 2


def test_a_changed_key_builds_everything_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder(tmp_path).build(["module_cache"], silent)
    monkeypatch.setattr(build, "build_key", lambda installation, archs: "changed")
    builder(tmp_path).build(["module_cache"], silent)
    assert runs(tmp_path) == ["module_cache"] * 2


def test_a_read_only_directory_serves_what_it_has_and_refuses_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder(tmp_path).build(["module_cache"], silent)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert builder(tmp_path).build(["module_cache"], silent)
    with pytest.raises(PermissionError, match="read-only and lacks module_mla_asm"):
        builder(tmp_path).build(["module_cache", "module_mla_asm"], silent)


RACER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.aiter.test_build import TOKEN, WRITE, builder, silent
builder(Path({folder!r}), "time.sleep(0.2)\\n" + WRITE + TOKEN).build(["module_cache"], silent)
"""


def test_eight_racing_processes_build_once(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code = RACER.format(root=str(ROOT), folder=str(tmp_path))
    racers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(8)]
    assert [racer.wait(120) for racer in racers] == [0] * 8
    assert runs(tmp_path) == ["module_cache"]


def test_the_lock_of_a_killed_process_is_free_and_a_held_one_is_waited_for_visibly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = f"""
import sys, time
from filelock import FileLock
lock = FileLock({str(tmp_path / "jit.lock")!r})
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""
    monkeypatch.setattr(build, "_HEARTBEAT", 0.1)
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        said: list[str] = []
        with pytest.raises(TimeoutError, match="its lock goes with it"):
            builder(tmp_path, lock_timeout=0.3).build(["module_cache"], said.append)
        assert any("waiting for another builder" in line for line in said)
        process.send_signal(signal.SIGKILL)
    assert builder(tmp_path, lock_timeout=20.0).build(["module_cache"], silent)


def test_the_key_changes_with_the_target_and_the_sources(installation: Installation) -> None:
    keys = {
        build_key(installation, ["gfx942"]),
        build_key(installation, ["gfx942", "gfx950"]),
        build_key(dataclasses.replace(installation, digest="other"), ["gfx942"]),
    }
    assert len(keys) == 3


def test_the_modules_are_the_wheels_and_no_more_than_needed(installation: Installation) -> None:
    assert modules_for(installation, prefill=False) == ("module_aiter_enum", "module_mla_asm", "module_cache")
    assert set(modules_for(installation, persistent=True)) == {
        *("module_aiter_enum", "module_mla_asm", "module_mla_metadata", "module_mla_reduce", "module_cache"),
        "module_fmha_v3_varlen_fwd",
    }


def test_a_real_extension_module_is_sound() -> None:
    assert unsound(Path(_ctypes.__file__), ["gfx942"]) == ""


# --- as units of a warm-up --------------------------------------------------------------------------------------


def test_a_warm_up_builds_the_base_module_then_the_others_then_probes(fake_gpu: Launches) -> None:
    base, others, probe = aiter_units("cuda", num_heads=16, query_len=1, page_size=64)
    assert isinstance(base, AiterModulesUnit)
    assert isinstance(others, AiterModulesUnit)
    assert base.modules == ("module_aiter_enum",)
    assert "module_mla_asm" in others.modules
    assert others.needs == (base.key,)
    assert probe.needs == (base.key, others.key)
    assert {base.kind, others.kind, base.phase} == {"aiter_module", "kernels"}


PROBES = {
    "right": ("import json; print(json.dumps({'probe': shape, 'ok': True}, sort_keys=True))", None),
    "exit 0": ("import os; os._exit(0)", "exit code 0 and no good verdict"),
    "abort": ("import os; os.abort()", "exit code -6"),
    "wrong numbers": ("raise AssertionError('worst at 3')", "worst at 3"),
    "hangs": ("import time; time.sleep(60)", "did not end within 2 s"),
}


@pytest.mark.parametrize("case", PROBES)
def test_only_a_verdict_is_a_success_of_a_probe(case: str) -> None:
    script, message = PROBES[case]
    command = (sys.executable, "-c", f"import json, sys; shape = json.loads(sys.argv[1]); {script}")
    if message is None:
        run_probe(ProbeShape(16), command=command)
        return
    with pytest.raises(RuntimeError, match=message):
        run_probe(ProbeShape(16), timeout=2.0, command=command)


def test_the_probe_itself_passes_over_aiters_machine_code(machine: list[Launch]) -> None:
    probe(ProbeShape(16, splits=2), device="cpu")
    assert len(machine) == 1


def test_the_warm_up_of_a_model_has_them_and_their_key(fake_gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    options = BuildOptions(batch_sizes=(1,), tp=8, layers=1, device="cuda")
    spec = warmup.spec("deepseek-v3", options)
    assert spec.backend[0] == "aiter"
    assert [unit.kind for unit in spec.ordered()][:3] == ["aiter_module", "aiter_module", "aiter_probe"]
    assert spec.fields["aiter"] == build_key(runtime.installed_runtime().installation, ["gfx942"])
