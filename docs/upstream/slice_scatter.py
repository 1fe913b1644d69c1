"""slice_scatter's backward pass zeroes the gradient of what isn't overwritten (pytorch#180771)."""

import sys

import torch


@torch.compile
def loss(x, part):
    return torch.slice_scatter(x, part, start=0, end=2).sum()


x = torch.ones(5, requires_grad=True)
loss(x, torch.zeros(2, requires_grad=True)).backward()
print(f"sum of the gradient, which should be 3: {x.grad.sum():g}")
sys.exit(x.grad.tolist() != [0, 0, 1, 1, 1])
