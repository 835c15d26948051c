"""Jobs on a machine to which `benchmarks/on_gpu.sh` carries wheels: these large packages are not among them."""

import json
import os
import subprocess
import sys
from pathlib import Path

MISSING = ("datasets", "pyarrow", "scipy", "diffusers", "peft")


def test_a_job_trains_on_a_machine_that_lacks_packages(tmp_path: Path) -> None:
    question = {"role": "user", "content": "two and two"}
    rows = [{"messages": [question, {"role": "assistant", "content": str(number)}]} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["parallelism.pipeline_parallel_degree=1", "training.steps=2", "training.seq_len=64"]
    options += ["data.num_workers=0", "checkpoint.enable=true"]
    options += [f'data.source="{tmp_path}/train.jsonl"', f'job.dump_folder="{tmp_path}/run"']
    script = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))\n"
    script += "from mmtrain.commands.cli import train_main; sys.exit(train_main(sys.argv[1:]))"
    words = ["--config", "debug_text.toml", *(f"--{option}" for option in options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run/checkpoint/step-2/.metadata").is_file()
