"""`+=` in an autograd.Function's forward loses the gradient (pytorch#180642)."""

import sys

import torch


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = torch.zeros_like(x)
        total += 2 * x
        return total

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


x = torch.ones(8, requires_grad=True)
torch.compile(Double.apply)(x).sum().backward()
print(f"gradient, which should be 2: {x.grad[0]:g}")
sys.exit(bool((x.grad != 2).any()))
