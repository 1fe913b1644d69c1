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
from contextlib import chdir
from dataclasses import replace
from functools import partial
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
LOOP = "train_model_simple_with_timing"  # the function with the published script's training loop


class TheirModel(nn.Module):
    """Somebody's model, ready to train, and its optimizer.

    Its forward() is that of 00's model: it returns the logits of all tokens, uncompiled, for the
    losses and samples of the record."""

    needed: tuple[str, ...]  # what their file must have
    dtype: str  # of the weights
    autocast: str | None = None  # its type
    matmul_precision: str | None = None  # where their program sets it, and not their file

    def __init__(self, compiled: nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__()
        self.compiled, self.optimizer = compiled, optimizer

    @property
    def uncompiled(self) -> nn.Module:
        """What torch.compile was given; where it is switched off, it has returned the same."""
        return getattr(self.compiled, "_orig_mod", self.compiled)

    @property
    def is_compiled(self) -> bool:
        return self.uncompiled is not self.compiled

    def compute_loss(self, x_BT, y_BT) -> torch.Tensor:
        """Returns the loss of a training step."""
        raise NotImplementedError


class NanoGPT(TheirModel):
    """nanoGPT's model.py, used as its train.py does: weights in float32 and bfloat16 by autocast,
    or on a CPU without; the head tied to the embedding, no biases, gradients clipped to 1."""

    needed = "GPT", "GPTConfig"
    dtype = "float32"
    matmul_precision = "high"

    def __init__(self, theirs: ModuleType, in_float32: bool, config):
        shape = theirs.GPTConfig(
            block_size=config.context_length,
            vocab_size=config.vocab_size,
            n_layer=config.layers,
            n_head=config.heads,
            n_embd=config.width,
            dropout=config.dropout,
            bias=False,
        )
        model = theirs.GPT(shape).to(config.device)
        optimizer = model.configure_optimizers(
            config.weight_decay, config.learning_rate, (0.9, 0.95), config.device.type
        )
        super().__init__(torch.compile(model), optimizer)
        if not in_float32:
            self.autocast = "bfloat16"
        self.weights = [*model.parameters()]
        optimizer.register_step_pre_hook(self.clip_gradients)

    def forward(self, ids_BT):
        # Without targets it returns the last token's logits alone.
        return self.uncompiled(ids_BT, ids_BT)[0]

    def compute_loss(self, x_BT, y_BT) -> torch.Tensor:
        with torch.autocast(x_BT.device.type, torch.bfloat16, enabled=self.autocast is not None):
            return self.compiled(x_BT, y_BT)[1]

    def clip_gradients(self, *_) -> None:
        """Clips them to the norm 1, before each update."""
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)


class PublishedScript(TheirModel):
    """S. Raschka's optimized script, whose own main() makes model and optimizer. It compiles, and
    has no other type than bfloat16."""

    needed = "main", "calc_loss_batch", "create_dataloader_v1", LOOP
    dtype = "bfloat16"

    def __init__(self, theirs: ModuleType, in_float32: bool, config):
        super().__init__(*model_and_optimizer(theirs, config))
        self.calc_loss_batch = theirs.calc_loss_batch

    def forward(self, ids_BT):
        return self.uncompiled(ids_BT)

    def compute_loss(self, x_BT, y_BT) -> torch.Tensor:
        return self.calc_loss_batch(x_BT, y_BT, self.compiled, x_BT.device)


def model_and_optimizer(theirs: ModuleType, config) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns what the published script's main() would train.

    That main() reads its text, which it downloads if it isn't there; makes model, optimizer,
    loaders and a tokenizer; and calls its training loop with them. Here the text is an empty file,
    loaders and tokenizer are mocks, and a third mock, in the place of the loop, keeps what it is
    called with."""
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
    train = mock.Mock(return_value=(None, None, None))  # the curves of a loop without a step
    stand_ins = mock.patch.multiple(
        theirs, create_dataloader_v1=mock.Mock(), tiktoken=mock.Mock(), **{LOOP: train}
    )
    with stand_ins, tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("middlemarch.txt").touch()
        theirs.main(shape, settings)
    try:
        ((_, trained),) = train.call_args_list
        return trained["model"], trained["optimizer"]
    except (ValueError, KeyError):
        sys.exit(f"error: {theirs.__file__} doesn't call {LOOP} once, with model and optimizer")


PEERS = {"nanogpt": NanoGPT, "published": PublishedScript}


# ---- In the place of 00's own


class PinnedLoader(DataLoader):
    """Copies batches to a GPU as 01 does, from page-locked memory, while it still trains."""

    def __init__(self, *args, **settings):
        super().__init__(*args, pin_memory=torch.cuda.is_available(), **settings)

    def __iter__(self):
        for batch in super().__iter__():
            if self.pin_memory:
                batch = [ids.cuda(non_blocking=True) for ids in batch]
            yield batch


def prepare_model(model: TheirModel, config) -> TheirModel:
    """Sets what their program sets; returns the model as it is, which is on the device already."""
    if model.matmul_precision:
        torch.set_float32_matmul_precision(model.matmul_precision)
    return model


def make_optimizer(model: TheirModel, config) -> torch.optim.Optimizer:
    return model.optimizer


def compute_loss(model: TheirModel, x_BT, y_BT) -> torch.Tensor:
    return model.compute_loss(x_BT, y_BT)


def configure(own_configure, dtype: str, given: dict):
    """Returns the settings that 00 makes of its options, with a peer's vocabulary and type."""
    return replace(own_configure(given), vocab_size=VOCABULARY, dtype=dtype)


def record_of(own_run: type) -> type:
    """Returns the class of 00's record, extended by what only peers have."""

    class PeerRecord(own_run):
        def start(self, model: TheirModel, data, config) -> None:
            self.model = model
            super().start(model, data, config)
            self.attention = "sdpa"

        def write(self, event: str, **figures) -> None:
            if event == "start":
                figures["config"] |= dict(
                    autocast=self.model.autocast, compile=self.model.is_compiled
                )
            super().write(event, **figures)

    return PeerRecord


def put_in_place(script: ModuleType, peer: type[TheirModel], make_peer) -> None:
    """Replaces what 00's main() looks up by these names, so that it trains a peer."""
    vars(script).update(
        GPTModel=make_peer,
        DataLoader=PinnedLoader,
        prepare_model=prepare_model,
        make_optimizer=make_optimizer,
        compute_loss=compute_loss,
        configure=partial(configure, script.configure, peer.dtype),
        Run=record_of(script.Run),
    )


# ---- The program


def load(name: str, file: Path) -> ModuleType:
    """Returns a file as a module, registered by a name, since dataclasses look theirs up."""
    spec = spec_from_file_location(name, file)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_theirs(peer: type[TheirModel], file: Path) -> ModuleType:
    """Imports their file. Exits with 1 and one line where that fails, or where it lacks what is
    used here."""
    sys.modules |= dict.fromkeys(UNUSED, mock.MagicMock())
    try:
        theirs = load("theirs", file)
    except Exception as error:  # a file of others can raise anything
        sys.exit(f"error: {file} can't be imported: {error}")
    missing = [name for name in peer.needed if not hasattr(theirs, name)]
    if missing:
        sys.exit(f"error: {file} has no {', '.join(missing)}")
    return theirs


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
    put_in_place(script, peer, make_peer=partial(peer, theirs, args.float32))
    sys.argv = [str(args.script), *args.options]
    return script.main()


if __name__ == "__main__":
    sys.exit(main())
