"""Hashes, samples and ASTs are the same in every process: records of several runs and machines belong together."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

from cdmpp.program.ast import compact_asts
from cdmpp.program.network import Network
from cdmpp.program.space import TaskSpaces
from cdmpp.program.tasks import extract_tasks
from tests.samples.programs import matmul_task
from tests.samples.scripts import CONV, CUDA, parse


def fingerprints() -> dict[str, list[str]]:
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Softmax(1))
    network = Network.from_torch(layers, (torch.randn(1, 16),))
    asts = compact_asts([parse(CONV), parse(CUDA)])
    return {
        "tasks": [task.hash for task in extract_tasks([network])],
        "samples": [program.hash for program in TaskSpaces(matmul_task(64)).sample(4, seed=3)],
        "asts": [hashlib.sha256(a.leaves.tobytes() + a.positions.tobytes()).hexdigest() for a in asts],
    }


def test_equal_in_another_process() -> None:
    code = f"import json; from {__name__} import fingerprints; print(json.dumps(fingerprints()))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    found = fingerprints()
    assert json.loads(done.stdout) == found
    assert [len(values) for values in found.values()] == [2, 4, 2]
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in found["tasks"])
