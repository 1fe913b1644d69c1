"""Prints the MiB that torch-kitsune predicts for the programs of others.py, as JSON.

    pip install torch-kitsune==0.7.0; python kitsune_says.py

It is given the model, without the loss, and the type of most activations.
"""

import json

import torch
from kitsune.predict import predict_memory
from others import CONTEXT, GPT, PROGRAMS, Program


class Logits(GPT):
    """Takes ids alone, as float, as torch-kitsune passes them."""

    def forward(self, ids):
        ids = ids.long()
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def predicted(program: Program) -> float:
    result = predict_memory(
        Logits(program),
        input_shape=(CONTEXT,),
        batch_size=program.batch,
        dtype=torch.bfloat16 if program.autocast else torch.float32,
        optimizer="adamw",
        training=True,
    )
    return result.total_bytes / 2**20


print(json.dumps({name: round(predicted(program), 1) for name, program in PROGRAMS.items()}))
