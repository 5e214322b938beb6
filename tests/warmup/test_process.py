"""What a warm-up begins in the background: the driver and the device, which nobody else must notice."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capture import prepare, process
from capture.process import await_background, in_background, open_device


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions of CUDA's driver that were called, the device's number behind cuDeviceGet."""
    made: list[str] = []

    def get(chosen: Any, index: int) -> int:
        made.append(f"cuDeviceGet {index}")
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: made.append("cuInit") or 0,  # type: ignore[func-returns-value]
        cuDeviceGet=get,
        cuDevicePrimaryCtxRetain=lambda *given: made.append("cuDevicePrimaryCtxRetain") or 0,  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return made


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:3", ["cuInit", "cuDeviceGet 3", "cuDevicePrimaryCtxRetain"]),
        ("cuda", ["cuInit"]),
        ("cpu", []),
    ],
)
def test_only_a_device_that_is_named_gets_a_context(device: str, expected: list[str], calls: list[str]) -> None:
    open_device(device)
    await_background()
    assert calls == expected


def test_without_cuda_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    open_device("cuda:0")
    await_background()


def test_what_was_begun_is_waited_for_once() -> None:
    done: list[int] = []
    for number in range(3):
        in_background("work", lambda number=number: done.append(number))  # type: ignore[misc]
    await_background()
    assert sorted(done) == [0, 1, 2]
    await_background()


def test_preparing_imports_no_torch_and_leaves_tritons_key_read() -> None:
    pytest.importorskip("triton")
    code = """if True:
        import sys
        from capture import BuildOptions, WarmupManager, prepare, process
        prepare("cuda:0")
        assert "torch" not in sys.modules
        process.await_background()
        from triton.runtime import cache
        assert cache.triton_key.cache_info().currsize == 1
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_preparing_again_reads_nothing_again(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    reads: list[int] = []
    monkeypatch.setattr(cache, "triton_key", lambda: reads.append(1))
    monkeypatch.setattr(process, "_key_is_read", False)
    prepare("cuda")
    prepare("cuda")
    await_background()
    assert reads == [1]


def test_nothing_is_prepared_for_the_cpu(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_key_is_read", False)
    prepare("cpu")
    await_background()
    assert not calls
    assert not process._key_is_read


def test_without_triton_the_device_is_opened_all_the_same(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(process, "_key_is_read", False)
    prepare("cuda")
    await_background()
    assert calls == ["cuInit"]
    assert not process._key_is_read


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is not None, reason="needs CUDA's driver")
def test_torch_uses_the_context_that_was_made_before_it_was_imported() -> None:
    code = """if True:
        import ctypes
        from capture import prepare, process
        prepare("cuda:0")
        process.await_background()
        driver, context, primary = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0) == 0
        import torch
        assert torch.ones(3, device="cuda").sum().item() == 3
        assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
        assert context.value == primary.value
    """
    subprocess.run([sys.executable, "-c", code], check=True)
