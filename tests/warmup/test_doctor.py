"""`mla-warmup doctor` on what a start costs."""

from __future__ import annotations

import pytest
import torch

from mla_ops.doctor import Finding, diagnose


def bytecode() -> Finding:
    (finding,) = (finding for finding in diagnose().findings if finding.topic == "bytecode")
    return finding


@pytest.mark.parametrize("cached", [None, "/no/such/file.pyc"], ids=["not kept", "not there"])
def test_modules_without_bytecode_are_named_with_the_remedy(
    cached: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.__spec__, "cached", cached)
    assert bytecode().state == "warning"
    assert "compileall" in bytecode().remedy


def test_modules_with_bytecode_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__spec__, "cached", torch.__file__)
    assert (bytecode().state, bytecode().remedy) == ("ok", "")
