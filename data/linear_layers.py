"""How `epyc-zen4-1core-linear-layers` was measured: FOLDER PROGRAMS_PER_TASK, where 1 takes each layer as it is."""

import sys

import numpy as np
import torch
from torch import nn

from cdmpp import Network, ProfileConfig, profile


class Layers(nn.Module):
    """Linear layers of one row or a few, 1 to 256 MB of weights: classifiers and a language model's decoding."""

    def __init__(self, number, seed=0):
        super().__init__()
        rng, self.layers, self.relu, self.inputs = np.random.default_rng(seed), nn.ModuleList(), [], []
        while len(self.layers) < number:
            n, k = (int(v) // 8 * 8 for v in np.exp(rng.uniform(np.log(256), np.log(25000), 2)))
            if 2**18 <= n * k <= 2**26:
                rows = 1 if rng.random() < 0.7 else int(rng.integers(2, 9))
                self.layers.append(nn.Linear(n, k))
                self.relu.append(rng.random() < 0.5)
                self.inputs.append(torch.zeros(rows, n))

    def forward(self, *inputs):
        each = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        return tuple(torch.relu(y) if relu else y for y, relu in zip(each, self.relu, strict=True))


if __name__ == "__main__":
    folder, programs = sys.argv[1], int(sys.argv[2])
    module = Layers(48)
    network = Network.from_torch(module, module.inputs, "linear_layers")
    config = ProfileConfig(programs_per_task=programs, unscheduled=programs == 1, workers=1, run_timeout_s=3)
    print(profile([network], out=folder, config=config, resume=True, notify=print))
