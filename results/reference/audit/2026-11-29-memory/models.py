"""Training steps of five kinds of models on random data, to compare what the audit predicts of
their memory with the tensors that autograd stores.

    python models.py vit --batch_size 16

ViT, T5 and Mixtral are those of Transformers, made small; LSTM and U-Net are ours.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 1000
Loss = Callable[[int], torch.Tensor]  # of a random batch of so many samples


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


class LSTM(nn.Module):
    """A language model: an embedding, two layers, a head."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x):
        hidden, _ = self.lstm(self.embedding(x))
        return self.head(hidden)


def double_convolution(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down and up, with skips, for a label of each pixel."""

    def __init__(self, width: int = 32, labels: int = 10):
        super().__init__()
        self.first = double_convolution(3, width)
        self.second = double_convolution(width, 2 * width)
        self.third = double_convolution(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.back_second = double_convolution(4 * width, 2 * width)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.back_first = double_convolution(2 * width, width)
        self.head = nn.Conv2d(width, labels, 1)

    def forward(self, x):
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        third = self.third(F.max_pool2d(second, 2))
        second = self.back_second(torch.cat([second, self.up_second(third)], dim=1))
        first = self.back_first(torch.cat([first, self.up_first(second)], dim=1))
        return self.head(first)


def lstm() -> tuple[nn.Module, Loss]:
    model = LSTM()

    def loss(batch: int) -> torch.Tensor:
        x = ids(batch, 65)
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return model, loss


def unet() -> tuple[nn.Module, Loss]:
    model = UNet()

    def loss(batch: int) -> torch.Tensor:
        labels = torch.randint(10, (batch, 64, 64))
        return F.cross_entropy(model(torch.randn(batch, 3, 64, 64)), labels)

    return model, loss


def vit() -> tuple[nn.Module, Loss]:
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=3,
            image_size=96,
            patch_size=8,
            num_labels=100,
        )
    )

    def loss(batch: int) -> torch.Tensor:
        pixels, labels = torch.randn(batch, 3, 96, 96), torch.randint(100, (batch,))
        return model(pixel_values=pixels, labels=labels).loss

    return model, loss


def t5() -> tuple[nn.Module, Loss]:
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=256,
            d_kv=64,
            d_ff=1024,
            num_layers=4,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )

    def loss(batch: int) -> torch.Tensor:
        return model(input_ids=ids(batch, 128), labels=ids(batch, 96)).loss

    return model, loss


def mixtral() -> tuple[nn.Module, Loss]:
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=256,
            use_cache=False,
        )
    )

    def loss(batch: int) -> torch.Tensor:
        x = ids(batch, 128)
        return model(input_ids=x, labels=x).loss

    return model, loss


MODELS = dict(lstm=lstm, unet=unet, vit=vit, t5=t5, mixtral=mixtral)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, loss_of = MODELS[options.model]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss_of(options.batch_size).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
