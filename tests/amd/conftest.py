"""The hardware suite: `pytest tests/amd -m amd` on a machine with an AMD GPU and AITER, ending in a report to send.

Nothing here has run on an AMD GPU yet: that is what the suite is for.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_ops.backends.aiter import runtime
from mla_ops.doctor import diagnose

REPORT = Path(os.environ.get("MLA_AMD_REPORT", "mla-amd-report.json"))
_rows: list[dict[str, Any]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.is_available() and runtime.arch_of(device) is not None:
        return
    for item in items:
        if item.get_closest_marker("amd"):
            item.add_marker(pytest.mark.skip(reason="needs an AMD GPU under ROCm, with AITER"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    result = yield
    if item.get_closest_marker("amd") and (result.when == "call" or result.outcome == "failed"):
        _rows.append(
            {
                "test": item.nodeid,
                "outcome": result.outcome,
                "seconds": round(result.duration, 3),
                "measured": dict(item.user_properties),
                "message": str(result.longrepr)[-4000:] if result.outcome == "failed" else "",
            }
        )
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _rows:
        return
    properties = torch.cuda.get_device_properties(0)
    report = {
        "schema": 1,
        "device": {"name": properties.name, "arch": properties.gcnArchName, "units": properties.multi_processor_count},
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "diagnosis": diagnose().to_json(),
        "tests": _rows,
    }
    REPORT.write_text(json.dumps(report, indent=1))
    print(f"\nthe report is in {REPORT.resolve()}: please attach it to an issue")
