"""Networks that PyTorch runs eagerly, measured against the prediction of ``cdmpp latency``; none was seen in training.

Eight networks of the zoo whose operators are not in the training data (``HELD_OUT``), and six that are defined here.

    python benchmarks/eager.py --device epyc-zen5-2.6ghz@1 --measured data/library/epyc-zen5-1core/networks.json
    python benchmarks/eager.py --device h200 --measured data/library-gpu/h200/networks.json --json eager_h200.json

Given several shares, smallest first: how often the smallest one as fast as the last, within 5 %, is predicted right. On a GPU
also batches of 16, and kernels alone, in a graph. ``--measured`` writes its file, or predicts what it holds on any machine.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Figure, arguments, bootstrap, figure, provenance, report, start
from torch import nn
from torch.nn import functional as F

from cdmpp.device import Device, get_device
from cdmpp.endtoend import smallest_share
from cdmpp.endtoend.eager import eager_latency
from cdmpp.predictor.operators import load_operator_model
from cdmpp.profiler import machine
from cdmpp.profiler.engine import label, split_half_difference
from cdmpp.profiler.library import graph_clock, sampled, wall_clock
from cdmpp.program.network import Network, example_inputs, load_network
from cdmpp.program.zoo import zoo_entry
from cdmpp.tuner.measure import device_of_this_machine

HELD_OUT = ("densenet121", "gcn", "inception_v3", "vgg16", "efficientnet_b0", "gpt2", "mlp_mixer", "unet")
_SAMPLES, _LEAST_S = 15, 1.0
#: Rounds that measure all networks in sequence; each network's median round counts, as neighbours on the machine come and go.
_ROUNDS = 3


class Attends(nn.Module):
    """Layers of attention (``scaled_dot_product_attention``) and gated feed-forward networks."""

    def __init__(self, dim: int = 320, heads: int = 5, layers: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(dim, 5 * dim) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(5 * dim // 2, dim) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            b, n, d = x.shape
            parts = qkv(self.norms[2 * i](x)).view(b, n, 3, self.heads, d // self.heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
            gate, value = up(self.norms[2 * i + 1](x)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * value)
        return x


class Tagger(nn.Module):
    """A bidirectional LSTM over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9000, 144), nn.Linear(2 * 208, 37)
        self.lstm = nn.LSTM(144, 208, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.out(self.lstm(self.embed(x))[0]), dim=-1)


def _block(i: int, o: int, k: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o), act())


def own_networks() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Name -> module and inputs."""
    torch.manual_seed(0)
    pictures = nn.Sequential(
        _block(3, 40, 5, 2), _block(40, 72), nn.MaxPool2d(2), _block(72, 136), _block(136, 136), nn.MaxPool2d(2),
        _block(136, 264), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(264, 90),
    )  # fmt: skip
    mobile = nn.Sequential(
        _block(3, 24, 3, 2, act=nn.Hardswish),
        *(
            nn.Sequential(_block(c, 4 * c, 1, act=nn.SiLU), _block(4 * c, 4 * c, 5, 2, 4 * c, nn.SiLU),
                          _block(4 * c, 2 * c, 1))
            for c in (24, 48, 96)
        ),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 50),
    )  # fmt: skip
    sound = nn.Sequential(
        nn.Conv1d(1, 48, 15, 4), nn.GELU(), nn.Conv1d(48, 96, 9, 3), nn.GELU(), nn.Conv1d(96, 192, 5, 2), nn.GELU(),
        nn.AvgPool1d(4), nn.Flatten(), nn.Linear(192 * 81, 30),
    )  # fmt: skip
    table = nn.Sequential(*(m for i, o in ((430, 900), (900, 900), (900, 700), (700, 5)) for m in (nn.Linear(i, o), nn.Tanh())))
    return {
        "own: pictures": (pictures, (torch.randn(2, 3, 176, 176),)),
        "own: mobile": (mobile, (torch.randn(1, 3, 208, 208),)),
        "own: transformer": (Attends(), (torch.randn(2, 112, 320),)),
        "own: tagger": (Tagger(), (torch.randint(0, 9000, (3, 45)),)),
        "own: sound": (sound, (torch.randn(2, 1, 7900),)),
        "own: table": (table, (torch.randn(96, 430),)),
    }


def measured_s(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a warm run, and their noise."""
    sentinel, samples, began = machine.Sentinel(), [], time.perf_counter()
    run()
    while len(samples) < _SAMPLES or time.perf_counter() - began < _LEAST_S:
        sentinel.wait(0.5)
        start_s = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start_s)
        sentinel.measured(samples[-1])
    return label(samples), split_half_difference(samples)


def on_cpu(cases: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, list[tuple[float, float]]]:
    """Measured seconds and noise of every network on every share, by ``network device``."""
    devices = [device_of_this_machine(device) for device in devices]
    cores, measured = machine.usable_cores(), defaultdict(list)
    for name, device in [(name, device) for name in cases for device in devices] * _ROUNDS:
        module, inputs = cases[name]
        machine.pin(machine.core_groups(cores, int(device.share), 1)[0])
        torch.set_num_threads(int(device.share))
        with torch.inference_mode():
            measured[f"{name} {device.name}"].append(measured_s(lambda module=module, inputs=inputs: module(*inputs)))
    return {key: sorted(found)[_ROUNDS // 2] for key, found in measured.items()}


def on_gpu(cases: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """The same for a run including Python, and third the seconds of the kernels alone; without networks that no graph holds."""
    measured = {}
    for name, (module, inputs) in cases.items():
        module, inputs = module.cuda(), [x.cuda() for x in inputs]
        with torch.inference_mode():
            try:
                kernels_s = sampled(graph_clock(lambda module=module, inputs=inputs: module(*inputs)))[0]
                run = wall_clock(lambda module=module, inputs=inputs: (module(*inputs), torch.cuda.synchronize()))
                measured[f"{name} {device.name}"] = (*sampled(run), kernels_s)
            except RuntimeError as err:
                print(f"{name}: {str(err).splitlines()[0]}", flush=True)
        module.cpu()
    return measured


def main() -> None:
    args = arguments(__doc__, __file__).parse_args()
    devices = [get_device(name) for name in args.device.split(",")]
    names = [*HELD_OUT, *(f"{name}@b16" for name in HELD_OUT if devices[0].kind == "gpu")]
    cases = {name: (zoo_entry(name.split("@")[0]).build().eval(), example_inputs(load_network(name))) for name in names}
    cases |= {name: (module.eval(), inputs) for name, (module, inputs) in own_networks().items()}
    if args.measured is not None and args.measured.exists():
        measured = json.loads(args.measured.read_text())
    else:
        measured = on_gpu(cases, devices[0]) if devices[0].kind == "gpu" else on_cpu(cases, devices)
        if args.measured is not None:
            args.measured.write_text(json.dumps(measured))
            return
    cases = {name: case for name, case in cases.items() if f"{name} {devices[0].name}" in measured}
    model = load_operator_model(args.model, devices[0].kind)
    rows: list[dict[str, Any]] = []
    for name, device in ((name, device) for name in cases for device in devices):
        predicted = eager_latency(Network.from_torch(*cases[name], name), device, model)
        seconds, noise, *kernels_s = measured[f"{name} {device.name}"]
        low, high = predicted.independent_low_s or 0.0, predicted.independent_high_s or 0.0
        rows.append(
            {
                "network": name, "device": device.name, "measured_ms": 1e3 * seconds,
                "predicted_ms": 1e3 * predicted.latency_s, "low_ms": 1e3 * low, "high_ms": 1e3 * high,
                "noise": noise, "operators": len(predicted.layers), "calls_ms": 1e3 * predicted.gap_s,
            }
        )  # fmt: skip
        if kernels_s:
            rows[-1] |= {"kernels_ms": 1e3 * kernels_s[0], "predicted_kernels_ms": 1e3 * predicted.kernel_s}
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{v}" for k, v in rows[-1].items()), flush=True)
    found = [
        errors([row for row in rows if row["device"] == device.name], f"networks run eagerly on {device.name}")
        for device in devices
    ]
    if "kernels_ms" in rows[0]:
        called = {"network": "network", "noise": "noise", "kernels_ms": "measured_ms", "predicted_kernels_ms": "predicted_ms"}
        alone = [{name: row[key] for key, name in called.items()} for row in rows]
        found.append(errors(alone, f"their kernels alone on {devices[0].name}"))
    if len(devices) > 1:
        shares = [
            [smallest_share([row[key] for row in rows if row["network"] == name]) for name in cases]
            for key in ("predicted_ms", "measured_ms")
        ]
        right = np.mean(np.array(shares[0]) == np.array(shares[1]))
        always = np.mean(np.array(shares[1]) == len(devices) - 1)
        values = {"right": float(right), "the whole is needed": float(always)}
        found.append(figure("smallest share as fast", values, len(cases)))
    report(args.json, provenance(__file__, [Path(__file__).parent.parent / "data"]), found, rows=rows)


def errors(rows: list[dict[str, Any]], name: str) -> Figure:
    """The figure with the errors of the networks on one device."""
    ape = np.array([abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows])
    inside = [row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in rows if "low_ms" in row]
    values = {
        "median_ape": float(np.median(ape)),
        "mape": float(ape.mean()),
        "largest APE": float(ape.max()),
        **({"in interval": float(np.mean(inside))} if inside else {}),
        "noise": float(np.median([row["noise"] for row in rows])),
    }
    names = np.array([row["network"] for row in rows])
    interval = {"median_ape": bootstrap(ape, names, median=True), "mape": bootstrap(ape, names)}
    return figure(name, values, len(rows), interval=interval)


if __name__ == "__main__":
    start(main)
