"""``mla-warmup``: exit statuses, what goes to which stream, and what each verb says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from capture.buckets import default_batch_sizes
from capture.report import WarmupReport
from tests.warmup.command import REPOSITORY, run, run_json

pytestmark = pytest.mark.usefixtures("own_cache")
TOY = ("--model", "tests.warmup.toys:factory", "--device", "cpu", "--batch-sizes", "4,1")
FAILING = ("--model", "tests.warmup.toys:failing", "--device", "cpu")


def test_help_imports_neither_torch_nor_rich() -> None:
    program = """
import sys
from capture.cli import main
code = main(["build", "--help"]) or main(["--help"])
heavy = {"torch", "rich", "numpy", "filelock", "triton"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "module:factory" in done.stdout


@pytest.mark.parametrize(
    ("options", "nodes", "expected"),
    [
        (("--device", "cpu"), True, ["cpu"]),
        (("--device", "cpu", "--target", "sm_90"), True, []),
        ((), True, ["cuda"]),
        ((), False, ["cpu"]),
    ],
    ids=["named", "target", "GPU in the machine", "no GPU"],
)
def test_the_device_is_opened_before_torch_is_needed(
    options: tuple[str, ...],
    nodes: bool,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("capture.process.prepare", opened.append)
    monkeypatch.setattr("capture.cli_support._GPU_NODES", (str(tmp_path if nodes else tmp_path / "none"),))
    run(capsys, "status", "--model", "tests.warmup.toys:factory", *options)
    assert opened == expected


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("bake",),
        ("build",),
        ("build", *TOY, "--batch-sizes", "1,0"),
        ("build", *TOY, "--max-batch-size", "8"),
        ("build", "--model", "tests.warmup.toys:missing"),
        ("build", "--model", "no_such_module:factory"),
        ("build", "--model", "tests.warmup.toys:not_a_spec"),
        ("clean",),
        ("clean", "--older-than", "soon"),
        ("clean", "--max-size", "big"),
        ("report", "/no/such/file"),
        ("explain",),
        ("pack", "a.tar.zst"),
        ("pack", "a.tar.zst", "--entry", "0123"),
        ("unpack", "a.tar.zst"),
        ("unpack", "a.tar.zst", "--digest", "sha256:12"),
        ("pull", "folder", *TOY, "--digest", f"sha256:{'0' * 64}", "--elsewhere"),
        ("status", "--model", ":factory", "--device", "cpu"),
        ("status", "--model", ".toys:factory", "--device", "cpu"),
        ("status", "--model", "deepseek-v2-lite", "--device", "xyz"),
        ("status", "--model", "deepseek-v2-lite", "--device", "cuda:x"),
        ("unpack", "a.tar.zst", "--digest", f"sha256:{'0' * 64}", "--device", "meta"),
        ("exec", "--device", "xyz", "--label", "a", "--", "true"),
        ("exec", "--label", "a"),
        ("exec", "--device", "cpu", "--json", "--", "true"),
        ("exec", "--device", "cpu", "--label", "a b", "--", "true"),
        ("status", *TOY, "--", "true"),
        ("build", *TOY, "--target", "sm_90"),
        ("build", "--model", "deepseek-v3", "--target", "sm90"),
        ("status", *TOY, "--query-len", "5", "--max-seq-len", "4"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_says_why(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "mla-warmup" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--model", "deepseek-v2-lite"),
        ("exec", "--label", "a"),
    ],
    ids=" ".join,
)
def test_a_gpu_that_is_not_there_is_said(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, _, err = run(capsys, *arguments, "--device", "cuda", *(["--", "true"] if arguments[0] == "exec" else []))
    assert code == 2
    assert err == "mla-warmup: device cuda is not here: GPUs that torch finds: 0\n"


def test_an_unknown_option_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bench", *TOY, "--cache-dir", "x")
    assert code == 2
    assert err.startswith("usage: mla-warmup bench")
    assert err.endswith("mla-warmup bench: error: unrecognized arguments: --cache-dir x\n")


def test_build_is_0_and_prints_one_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, raw = run_json(capsys, "build", *TOY)
    report = WarmupReport.from_json(raw)
    assert code == 0
    assert [unit.state for unit in report.units] == ["built"] * 4
    assert [bucket.batch_size for bucket in report.buckets] == [1, 4]
    assert raw.keys() >= {"schema", "fingerprint", "device", "backend", "phases", "units", "buckets"}
    assert raw.keys() >= {"compiled", "seconds", "cold"}


def test_options_reach_the_factory(capsys: pytest.CaptureFixture[str]) -> None:
    _, raw = run_json(capsys, "status", *TOY, "--dtype", "float16", "--page-size", "1")
    fields = raw["fingerprint"]["fields"]
    assert (fields["dtype"], fields["page_size"]) == ("float16", 1)


def test_the_largest_batch_size_stands_for_the_default_ones(capsys: pytest.CaptureFixture[str]) -> None:
    _, raw = run_json(capsys, "build", "--model", TOY[1], "--device", "cpu", "--max-batch-size", "12")
    assert tuple(row["batch_size"] for row in raw["buckets"]) == default_batch_sizes(12)


def test_a_second_build_is_warm(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY)
    code, raw = run_json(capsys, "build", *TOY)
    assert (code, raw["cold"], raw["compiled"]) == (0, False, 0)
    assert {unit["state"] for unit in raw["units"]} == {"hit"}


def test_a_failed_unit_is_1_and_named_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "build", *FAILING, "--json")
    assert code == 1
    assert "failed: exits: SystemExit: 3" in err
    assert [unit["state"] for unit in json.loads(out)["units"]] == ["built", "failed", "built"]


def test_an_error_of_the_cache_is_1_and_no_traceback(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    run(capsys, "build", *TOY)
    code, out, err = run(capsys, "build", *TOY)
    assert (code, out) == (1, "")
    assert "CacheAccessError" in err
    assert "Traceback" not in err


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "build", *TOY, "--quiet") == (0, "", "")


def test_progress_goes_to_stderr_and_the_table_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys, "build", *TOY)
    assert "built: kernel-0" in err
    assert "kernel-0" in out
    assert "cold: " in out


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_dry_run_lists_the_units_and_changes_nothing(
    as_json: bool, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "build", *TOY, "--dry-run", *(["--json"] if as_json else []))
    assert code == 0
    assert not cache.exists()
    for key in ("kernel-0", "kernel-1", "kernel-2", "graphs"):
        assert key in out


def test_status_lists_states_and_the_fingerprint(capsys: pytest.CaptureFixture[str]) -> None:
    code, raw = run_json(capsys, "status", *TOY)
    assert code == 0
    assert {unit["state"] for unit in raw["units"]} == {"missing"}
    run(capsys, "build", *TOY)
    _, raw = run_json(capsys, "status", *TOY)
    assert [(unit["key"], unit["state"]) for unit in raw["units"]][-1] == ("graphs", "hit")
    directory = Path(raw["directory"])
    assert directory.name == raw["fingerprint"]["digest"]
    (directory / "triton/kernel-1/kernel.bin").write_text("x")
    code, raw = run_json(capsys, "status", *TOY)
    assert code == 0
    assert [unit["state"] for unit in raw["units"]] == ["hit", "damaged", "hit", "hit"]
    assert list(raw["damaged"]) == ["triton/kernel-1/kernel.bin"]


def test_verify_loads_a_whole_cache(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY)
    code, raw = run_json(capsys, "verify", *TOY)
    assert code == 0
    assert {unit["state"] for unit in raw["units"]} == {"hit"}
    assert all(bucket["verified"] for bucket in raw["buckets"])


def test_verify_fails_on_damage_and_repairs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY)
    _, raw = run_json(capsys, "status", *TOY)
    path = Path(raw["directory"]) / "triton/kernel-1/kernel.bin"
    path.write_text("x")
    code, _, err = run(capsys, "verify", *TOY)
    assert code == 1
    assert "damaged: triton/kernel-1/kernel.bin: size 1, not" in err
    assert path.read_text() == "x"


def test_verify_fails_on_an_empty_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "verify", *TOY)
    assert code == 1
    assert "missing: kernel-0" in err
    assert not cache.exists()


def test_clean_removes_only_what_it_says(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY, "--json")
    code, raw = run_json(capsys, "clean", "--all", "--dry-run")
    assert code == 0
    assert Path(raw["removed"][0]["path"]).is_dir()
    assert run(capsys, "clean", "--older-than", "7d")[1] == ""
    assert run(capsys, "clean", "--all")[1].startswith(f"removed {raw['removed'][0]['path']}")
    assert not Path(raw["removed"][0]["path"]).exists()


def test_saved_reports_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name in ("cold", "warm"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(run(capsys, "build", *TOY, "--json")[1])
    code, out, err = run(capsys, "report", *map(str, files))
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if "cold" in line and "warm" in line]
    assert [line for line in out.splitlines() if "kernel-2" in line and "built" in line and "hit" in line]


def test_the_working_directory_holds_the_users_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_server.py").write_text("from tests.warmup.toys import factory as make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run(capsys, "status", "--model", "my_server:make", "--device", "cpu")[0] == 0


def test_explain_names_the_fields_of_a_miss(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY, "--quiet")
    code, raw = run_json(capsys, "explain", *TOY, "--dtype", "float16")
    assert code == 0
    assert raw["differences"] == [{"field": "dtype", "here": "float16", "there": "bfloat16"}]
    assert "dtype is 'bfloat16'; here it is 'float16'" in run(capsys, "explain", *TOY, "--dtype", "float16")[1]


def test_a_bundle_is_packed_and_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY, "--quiet")
    file, other = str(tmp_path / "toy.tar.zst"), ("--cache-dir", str(tmp_path / "other"))
    code, raw = run_json(capsys, "pack", file, "--model", TOY[1], "--device", "cpu")
    assert code == 0
    code, taken = run_json(capsys, "unpack", file, "--digest", raw["digest"], "--device", "cpu", *other)
    assert (code, sorted(taken["taken"])) == (0, ["graphs", "kernel-0", "kernel-1", "kernel-2"])
    assert run_json(capsys, "build", *TOY, *other)[1]["cold"] is False


def test_a_bundle_is_pushed_and_pulled_by_its_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY, "--quiet")
    digest = run(capsys, "push", f"file://{tmp_path}", *TOY)[1].strip()
    other = ("--cache-dir", str(tmp_path / "other"))
    code, out, _ = run(capsys, "pull", f"file://{tmp_path}", *TOY, "--digest", digest, *other)
    assert (code, out.endswith("units taken: 4 of 4\n")) == (0, True)
    assert run_json(capsys, "build", *TOY, *other)[1]["cold"] is False


def test_an_entry_is_named_by_the_beginning_of_its_digest(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "build", *TOY, "--quiet")
    name = next(path.name for path in cache.iterdir() if path.is_dir())
    assert run_json(capsys, "pack", str(tmp_path / "a"), "--entry", name[:6])[1]["entry"] == name


def test_a_wrong_digest_is_1_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY, "--quiet")
    file = str(tmp_path / "toy.tar.zst")
    run(capsys, "pack", file, *TOY)
    code, out, err = run(capsys, "unpack", file, "--digest", "sha256:" + "0" * 64, "--device", "cpu")
    assert (code, out) == (1, "")
    assert "nothing of it was opened" in err


def test_a_digest_in_capitals_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "build", *TOY, "--quiet")
    file = str(tmp_path / "toy.tar.zst")
    digest = run(capsys, "pack", file, *TOY)[1].strip().removeprefix("sha256:")
    options = ("--device", "cpu", "--cache-dir", str(tmp_path / "other"))
    assert run(capsys, "unpack", file, "--digest", f"sha256:{digest.upper()}", *options)[0] == 0


@pytest.mark.parametrize("model", [TOY, FAILING], ids=["good", "failing"])
def test_with_stderr_closed_stdout_holds_the_report_alone(model: tuple[str, ...]) -> None:
    command = f"{sys.executable} -m capture.cli build {' '.join(model)} --json 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    report = WarmupReport.from_json(json.loads(done.stdout))
    assert (done.returncode, report.ok) == ((1, False) if model is FAILING else (0, True))


def test_what_a_model_prints_is_no_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chatty.py").write_text("""
from tests.warmup.toys import CallUnit, toy_spec

print("import")

def factory(options):
    print("factory")
    return toy_spec(CallUnit(key="unit", call=lambda: print("unit"), phase="kernels", persistent=True))
""")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "build", "--model", "chatty:factory", "--device", "cpu", "--json", "--quiet")
    assert code == 0
    assert WarmupReport.from_json(json.loads(out)).ok
    assert err.split() == ["import", "factory", "unit"]


def test_what_the_encoding_of_stdout_lacks_is_escaped(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "capture.cli", "status", *TOY, "--cache-dir", str(tmp_path / "caché")],
        cwd=REPOSITORY, env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cach\\xe9" in done.stdout


def test_bench_repeats_cold_and_warm_starts(capsys: pytest.CaptureFixture[str]) -> None:
    code, raw = run_json(capsys, "bench", *TOY, "--repeat", "1", "--quiet")
    assert code == 0
    assert [report["cold"] for report in raw["cold"]] == [True]
    assert [(report["cold"], report["compiled"]) for report in raw["warm"]] == [(False, 0)]
    assert [bucket["batch_size"] for bucket in raw["warm"][0]["buckets"]] == [1, 4]


def test_a_run_is_written_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    run(capsys, "build", *TOY, "--quiet", "--trace", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"kernels", "weights", "kernel-0", "graphs"} <= names
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_trace_that_cannot_be_written_costs_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "build", *TOY, "--json", "--quiet", "--trace", str(tmp_path / "none/trace.json"))
    assert code == 1
    assert WarmupReport.from_json(json.loads(out)).ok
    assert "none/trace.json" in err


def test_reports_are_written_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name in ("cold", "warm"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(run(capsys, "build", *TOY, "--json")[1])
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, "report", *map(str, files), "--html", str(page))
    assert (code, out) == (0, "")
    assert page.read_text().count('<section class="card">') == 2
