"""Compiled scan over several layers: gradients of all but the last one (pytorch#153679)."""

import sys

import torch
import torch._dynamo.config
from torch._higher_order_ops import scan

torch._dynamo.config.capture_scalar_outputs = True  # on a CPU it doesn't compile otherwise
torch.manual_seed(0)
weights = [(0.3 * torch.randn(8, 8)).requires_grad_() for _ in range(3)]
inputs, start = torch.randn(5, 4, 8), [torch.zeros(4, 8) for _ in weights]


def step(carry, x):
    states = []
    for state, weight in zip(carry, weights, strict=True):
        x = state + (state + x) @ weight
        states.append(x)
    return states, x.clone()


def loss():
    return scan(step, start, inputs)[1].square().sum()


eager, compiled = (torch.autograd.grad(f(), weights) for f in (loss, torch.compile(loss)))
error = max(((c - e).norm() / e.norm()).item() for c, e in zip(compiled, eager, strict=True))
print(f"largest relative error of a weight's gradient: {error:.2g}")
sys.exit(error > 1e-4)
