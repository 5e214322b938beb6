"""`mla-warmup doctor` on what a start costs."""

from __future__ import annotations

import pytest
import torch

from mla_ops.doctor import Finding, diagnose


def bytecode() -> Finding:
    (finding,) = (finding for finding in diagnose().findings if finding.topic == "bytecode")
    return finding


def test_modules_without_bytecode_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__spec__, "cached", "/no/such/file.pyc")
    assert bytecode().state == "warning"
    assert "compileall" in bytecode().remedy


def test_modules_with_bytecode_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__spec__, "cached", torch.__file__)
    assert (bytecode().state, bytecode().remedy) == ("ok", "")
