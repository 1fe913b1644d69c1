"""Train GPT-2 with other people's programs, in clones of their repositories, to compare with 01.

    python peers/clone.py nanogpt ~/nanoGPT/model.py 00_orig.py [options of 00_orig.py]
    python peers/clone.py nanogpt ~/nanoGPT/model.py    # only looks whether it can be imported

`python measure.py peers` starts it; `published` is S. Raschka's optimized script, in
ch05/10_llm-training-speed of LLMs-from-scratch.

Model, optimizer, loss, precision and compilation are theirs; their file is imported as it is. Text,
clock, losses and record are 00's, whose main() runs here with theirs in place of its own model.
"""

import argparse
import sys
import tempfile
from contextlib import chdir, nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

VOCABULARY = 50_304  # as in 01, and as both of them have it
# What they import for pictures and downloads, which aren't made here.
UNUSED = "matplotlib", "matplotlib.pyplot", "requests"


class Logits(nn.Module):
    """Their model with the interface of 00's, which losses and samples are computed with."""

    def __init__(self, model: nn.Module, logits_of):
        super().__init__()
        self.model, self.logits_of = model, logits_of

    def forward(self, ids_BT):
        return self.logits_of(self.model, ids_BT)


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the model that torch.compile was given; where it is switched off, `model` itself."""
    return getattr(model, "_orig_mod", model)


class NanoGPT:
    """nanoGPT's model.py, used as its train.py does: weights in float32 and bfloat16 by autocast,
    or on a CPU without; the head tied to the embedding, no biases, gradients clipped to 1."""

    NEEDED = "GPT", "GPTConfig"
    dtype = "float32"

    def __init__(self, theirs: ModuleType, in_float32: bool):
        self.theirs, self.autocast = theirs, None if in_float32 else "bfloat16"

    def make_model(self, config) -> nn.Module:
        shape = self.theirs.GPTConfig(
            block_size=config.context_length,
            vocab_size=config.vocab_size,
            n_layer=config.layers,
            n_head=config.heads,
            n_embd=config.width,
            dropout=config.dropout,
            bias=False,
        )
        # Without targets it returns the last token's logits alone.
        return Logits(self.theirs.GPT(shape), lambda model, ids_BT: model(ids_BT, ids_BT)[0])

    def prepare_model(self, model: Logits, config) -> nn.Module:
        torch.set_float32_matmul_precision("high")
        model.to(config.device)
        self.compiled = torch.compile(model.model)
        return model

    def make_optimizer(self, model: Logits, config) -> torch.optim.Optimizer:
        self.parameters = [*model.parameters()]
        return model.model.configure_optimizers(
            config.weight_decay, config.learning_rate, (0.9, 0.95), config.device.type
        )

    def compute_loss(self, model: Logits, x_BT, y_BT):
        device = x_BT.device.type
        with torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext():
            return self.compiled(x_BT, y_BT)[1]

    def backward_and_update(self, loss, optimizer) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        optimizer.step()


class Published:
    """S. Raschka's optimized script. Its own main() makes model and optimizer; what it would train
    them with is replaced."""

    NEEDED = "main", "calc_loss_batch", "create_dataloader_v1", "train_model_simple_with_timing"
    dtype, autocast = "bfloat16", None

    def __init__(self, theirs: ModuleType, in_float32: bool):
        self.theirs = theirs

    def make_model(self, config) -> nn.Module:
        shape = dict(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            emb_dim=config.width,
            n_heads=config.heads,
            n_layers=config.layers,
            drop_rate=config.dropout,
            qkv_bias=False,
        )
        settings = dict(
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            batch_size=config.batch_size,
            num_epochs=config.epochs,
        )
        train = mock.Mock(return_value=(None, None, None))
        stand_ins = mock.patch.multiple(
            self.theirs,
            train_model_simple_with_timing=train,
            create_dataloader_v1=mock.Mock(),
            tiktoken=mock.Mock(),
        )
        with stand_ins, tempfile.TemporaryDirectory() as folder, chdir(folder):
            Path("middlemarch.txt").touch()  # else it would be downloaded
            self.theirs.main(shape, settings)
        self.compiled, self.optimizer = (
            train.call_args.kwargs[name] for name in ("model", "optimizer")
        )
        return Logits(uncompiled(self.compiled), lambda model, ids_BT: model(ids_BT))

    def prepare_model(self, model: Logits, config) -> nn.Module:
        return model

    def make_optimizer(self, model: Logits, config) -> torch.optim.Optimizer:
        return self.optimizer

    def compute_loss(self, model: Logits, x_BT, y_BT):
        return self.theirs.calc_loss_batch(x_BT, y_BT, self.compiled, x_BT.device)


PEERS = {"nanogpt": NanoGPT, "published": Published}


class PinnedLoader(DataLoader):
    """Copies batches to a GPU as 01 does, from page-locked memory, while it still trains."""

    def __init__(self, *args, **settings):
        super().__init__(*args, pin_memory=torch.cuda.is_available(), **settings)

    def __iter__(self):
        for batch in super().__iter__():
            yield [ids.cuda(non_blocking=True) for ids in batch] if self.pin_memory else batch


def load(name: str, file: Path) -> ModuleType:
    """Returns a file as a module, registered by a name, since dataclasses look theirs up."""
    spec = spec_from_file_location(name, file)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_theirs(peer: type, file: Path) -> ModuleType:
    """Imports their file. Exits with 1 and one line where that fails, or where it lacks what is
    used here."""
    sys.modules |= dict.fromkeys(UNUSED, mock.MagicMock())
    try:
        theirs = load("theirs", file)
    except Exception as error:  # a file of others can raise anything
        sys.exit(f"error: {file} can't be imported: {error}")
    missing = [name for name in peer.NEEDED if not hasattr(theirs, name)]
    if missing:
        sys.exit(f"error: {file} has no {', '.join(missing)}")
    return theirs


def put_in_place(peer, script: ModuleType) -> None:
    """Replaces the functions of 00 that are the peer's, and lets the record say so."""
    script.GPTModel, script.DataLoader = peer.make_model, PinnedLoader
    for name in ("prepare_model", "make_optimizer", "compute_loss", "backward_and_update"):
        setattr(script, name, getattr(peer, name, getattr(script, name)))
    own_configure, own_write = script.configure, script.Run.write

    def configure(argv=None):
        config = own_configure(argv)
        config.vocab_size, config.dtype = VOCABULARY, peer.dtype
        return config

    def write(run, event: str, **figures) -> None:
        if event == "start":
            figures["config"] |= dict(
                autocast=peer.autocast,
                compile=uncompiled(peer.compiled) is not peer.compiled,
            )
        if event == "end":
            figures["attention_backend"] = "sdpa"
        own_write(run, event, **figures)

    script.configure, script.Run.write = configure, write


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train with other people's program.", allow_abbrev=False
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="nanoGPT without autocast, as its train.py trains on a CPU",
    )
    parser.add_argument("peer", choices=PEERS, help=f"whose: {' or '.join(PEERS)}")
    parser.add_argument("file", type=Path, help="their file in the clone")
    parser.add_argument("script", nargs="?", type=Path, help="00_orig.py; without, nothing runs")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of 00_orig.py")
    args = parser.parse_args()
    peer = PEERS[args.peer]
    theirs = load_theirs(peer, args.file)
    if not args.script:
        return 0
    script = load("script", args.script)
    put_in_place(peer(theirs, args.float32), script)
    sys.argv = [str(args.script), *args.options]
    return script.main()


if __name__ == "__main__":
    sys.exit(main())
