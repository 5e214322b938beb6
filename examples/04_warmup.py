"""Warm a machine up: the first process builds, the second one loads, and both say where the seconds went.

python examples/04_warmup.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
}


def main() -> None:
    from rich.console import Console

    from capture import WarmupReport
    from capture.report import render_side_by_side

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"  # any Hugging Face config of an MLA model
        model.write_text(json.dumps(CONFIG))
        command = [sys.executable, "-m", "capture.cli", "build", "--model", str(model), "--batch-sizes", "1,2,4"]
        command += ["--dtype", "float32", "--device", "cpu", "--cache-dir", f"{folder}/cache", "--json"]
        reports = []
        for _ in ("cold", "warm"):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            reports.append(WarmupReport.from_json(json.loads(done.stdout)))
    Console().print(render_side_by_side(reports))
    cold, warm = reports
    print(f"compiled: {cold.compiled} cold, {warm.compiled} warm")


if __name__ == "__main__":
    main()
