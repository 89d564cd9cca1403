"""A run that is killed with SIGKILL at random moments and resumed; a script of its own, whose children are forked.

python killed.py MODEL DATA FOLDER KILLS SEED: prints one JSON line for each kill, then "reference" first of all.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

import torch
from safetensors.torch import load_file

from riftco.models.errors import package
from riftco.train.checkpoint import checkpoints, folder_of, open_checkpoint
from riftco.train.finetune import prepare
from riftco.train.run import RUN

STEPS = 12


def given(model, data, output):
    return {
        "model": model, "data": data, "output": str(output), "method": "lora", "rank": 4, "lr": 0.01, "dropout": 0.2,
        "steps": STEPS, "batch_tokens": 64, "accumulate": 2, "save_every": 1, "device": "cpu", "seed": 1,
    }  # fmt: skip


def child(model, data, output):
    """Start the run in `output`, or go on with it, in a process of its own; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        resume = (output / RUN).exists()
        prepare({"output": str(output)} if resume else given(model, data, output), resume=resume).train()
        code = 0
    finally:
        os._exit(code)


def finished(output):
    return (output / RUN).exists() and json.loads((output / RUN).read_text())["result_step"] == STEPS


def weights(output):
    return load_file(output / "adapter" / "adapter_model.safetensors")


def reach(output, step, pid):
    """Wait until this step is saved, or the run has ended."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if step == 0 or folder_of(output / "checkpoints", step).exists():
            return
        time.sleep(0.001)


def main(model, data, folder, kills, seed):
    torch.set_num_threads(1)
    package("transformers").AutoTokenizer  # noqa: B018 - imported once, before the forks
    root, rng = pathlib.Path(folder), random.Random(seed)
    started = time.perf_counter()
    _, status = os.waitpid(child(model, data, root / "reference"), 0)
    assert status == 0
    whole, want = time.perf_counter() - started, weights(root / "reference")
    for i in range(kills):
        output = root / f"run{i}"
        pid = child(model, data, output)
        reach(output, rng.randrange(STEPS), pid)  # whatever else the machine does, kills are spread over the run
        time.sleep(rng.uniform(0, 1) * whole / STEPS)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        whole_ones = [open_checkpoint(f).step for f in checkpoints(output / "checkpoints")]  # none may be unreadable
        if not finished(output):
            _, resumed = os.waitpid(child(model, data, output), 0)
            assert resumed == 0, f"kill {i} after {whole_ones} cannot be resumed"
        got = weights(output)
        equal = got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
        print(json.dumps({"steps": whole_ones, "killed": os.WIFSIGNALED(status), "equal": equal}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
