"""A nested region's backward pass overwrites its input (mended by pytorch#193960)."""

import sys

import torch


@torch.compiler.nested_compile_region
def region(x):
    return x.sin()


def loss(weight):
    return (region(region(weight + 1)).exp() @ weight).sum()


torch.manual_seed(0)
weight = torch.rand(8, 8, requires_grad=True)
(eager,) = torch.autograd.grad(loss(weight), weight)
(compiled,) = torch.autograd.grad(torch.compile(loss)(weight), weight)
error = ((compiled - eager).norm() / eager.norm()).item()
print(f"relative error of the gradient: {error:.2g}")
sys.exit(error > 1e-4)
