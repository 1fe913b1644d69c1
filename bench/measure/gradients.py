"""Checks the gradients of one script, in a process of its own; the study `gradients` starts it.

    python bench/measure/gradients.py --reference 00_orig.py 01_opt_single_gpu.py [its options]
    torchrun --nproc_per_node=2 bench/measure/gradients.py 02_opt_multi_gpu_ddp.py [its options]

The script trains by its own main(), train() and batches, for two steps, each of which is made to
begin from given weights and random numbers. The gradients are those of the second step, as the
script's optimizers are given them, before hooks of their own. Among several ranks each tensor
counts as on the rank where it is farthest off. The record in --results-dir is that of the script's
last run, with an event `gradients` for each comparison that was made:

    comparison   "compiled to uncompiled", "uncompiled to reference", "compiled to reference",
                 "dropout"
    tensors      of the first three: by tensor [the norm of the difference between both gradients,
                 relative to that of the second one; the cosine between them; the ratio of norms]
    directions   of dropout: by tensor [numeric derivative, its uncertainty, by autograd] of each
    loss_noise   of dropout: the standard deviation of the loss by rounding alone
    refused      of dropout: why the script doesn't train with dropout; there is nothing else then

Of the tools it imports three modules alone, which import none: torchrun starts it from anywhere.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._inductor.config
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import SequentialSampler

sys.path.append(str(Path(__file__).parents[2]))
from gpt_speed.gradients.tolerance import error_of
from gpt_speed.numeric import Derivatives, distances, seeded
from gpt_speed.script import load_script

RANK = int(os.environ.get("RANK") or 0)
RANKS = int(os.environ.get("WORLD_SIZE") or 1)
IDS = 256  # the text has so many different tokens, from all over the vocabulary, each of them often
STEPS = 2  # of a run; the second one has another batch, so that nothing of the first may be left
# By the device: a small model, whose loss takes two chunks, the second one shorter; or layers of
# GPT-2's own size, and more than 16,384 tokens, since some of a GPU's kernels are only made for
# that many. Batches can be cut into four.
MODEL = {"cpu": "cpu-demo", "cuda": "gpt2"}
SIZES = {
    "cpu": dict(layers=2, heads=2, width=32, context_length=144, vocab_size=320),
    "cuda": dict(layers=2, heads=12, width=768, context_length=1024),
}
BATCH = {"cpu": 8, "cuda": 20}
DROPOUT = 0.1


class Refused(Exception):
    """The script doesn't run with these options."""


class TrainingRun:
    """One training run of a script, and its gradients at the weights that it was given."""

    def __init__(
        self,
        script: ModuleType,
        sizes: dict,
        given: dict[str, torch.Tensor] | None,
        directions: int = 0,
    ):
        self.script: Any = script
        self.sizes, self.given = sizes, given
        self.directions = directions  # of numeric derivatives in each tensor; 0: none are wanted
        # From the time when train() begins:
        self.model: Any = None
        self.training_model: Any = None  # the same weights, perhaps compiled or among ranks
        self.weights: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.derivatives: dict = {}  # the event of numeric ones, once they are made
        self.error: BaseException | None = None
        self.steps = 0  # that are done
        self.micro_batches: list[tuple] = []  # what compute_loss() was given in this step
        # Whether the ranks of the script share the batch; 00 and 01 know no ranks.
        self.rank, self.ranks = 0, 1
        if hasattr(script, "join_ranks"):
            self.rank, self.ranks = RANK, RANKS
        # The script's own functions, which those below stand in for, and call.
        self.own_train = script.train
        self.own_compute_loss = script.compute_loss
        self.own_now = script.now
        self.own_explain = script.explain

    def train(self, options: list[str]) -> None:
        """Lets the script train with these options. Raises Refused where it doesn't, and what else
        it raises."""
        torch._dynamo.reset()
        with self.stand_ins(), mock.patch.object(sys, "argv", [self.script.__file__, *options]):
            code = self.script.main()
        if isinstance(self.error, (Refused, self.script.UserError)):
            raise Refused(str(self.error))
        if self.error or code:
            raise self.error or RuntimeError(f"the script ended with {code}")

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Replaces what decides which weights, batches and masks the script trains with, keeps what
        its optimizers are given, and replaces what would disturb the comparison."""
        own_functions = mock.patch.multiple(
            self.script,
            train=self.train_from_weights,
            compute_loss=self.compute_loss,
            prepare_data=no_preparation,
            load_data=self.load_data,
            explain=self.keep_error,
            RandomSampler=InOrder,
            evaluate=no_evaluation,
            sample=no_sample,
        )
        own_sizes = mock.patch.dict(self.script.MODELS, self.sizes)
        hook = register_optimizer_step_pre_hook(self.keep_gradients)
        try:
            with own_functions, own_sizes, undisturbed():
                yield
        finally:
            hook.remove()

    # ---- In place of the script's own functions

    def load_data(self, config):
        """Returns a random text of ten batches."""
        size = 10 * config.batch_size * self.ranks * config.context_length + 1
        draw = np.random.default_rng(0).integers(IDS, size=size)
        ids = np.linspace(0, config.vocab_size - 1, IDS).astype(np.uint16)[draw]
        both = [self.script.TokenWindows(ids, config.context_length) for _ in range(2)]
        return self.script.Data({}, *both, None)

    def train_from_weights(self, model, data, config, run) -> None:
        """Trains for STEPS steps, each of which begins with the same weights."""
        self.model = model
        self.weights = starting_weights(model, self.given)
        if self.ranks > 1:  # each made weights of its own
            shared = [self.weights]
            dist.broadcast_object_list(shared)
            (self.weights,) = shared
        config.max_steps = STEPS
        with mock.patch.object(self.script, "now", self.now):
            self.own_train(model, data, config, run)

    def now(self, *args):
        """Returns the time by the script's clock. train() asks for it before its first step, after
        each one, and again after those that it logs: so steps begin here, and end if they have
        computed a loss."""
        if self.micro_batches:
            self.end_step()
        self.begin_step()
        return self.own_now(*args)

    def end_step(self) -> None:
        """Counts a step; after the last one makes numeric derivatives, of the loss on its batch."""
        self.steps += 1
        if self.steps == STEPS and self.directions:
            self.derivatives = derivatives_of(self)

    def begin_step(self) -> None:
        """Sets the same weights for each step, and forgets the one before, but for the gradients of
        the last one."""
        self.micro_batches = []
        if self.steps < STEPS:
            self.gradients = {}
        self.set_weights()

    def compute_loss(self, model, x_BT, y_BT):
        """Returns the loss of a micro-batch, with the same masks in each step."""
        if not self.micro_batches:
            torch.manual_seed(7 + self.rank)
        self.micro_batches.append((x_BT, y_BT))
        self.training_model = model
        return self.own_compute_loss(model, x_BT, y_BT)

    def keep_gradients(self, optimizer, *_) -> None:
        """Keeps what an optimizer is given: one of several may have a part of the weights."""
        scale = getattr(optimizer, "grad_scale", None)  # of a fused one, which divides by it
        own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in own and parameter.grad is not None:
                gradient = whole_copy(parameter.grad)
                if scale is not None:
                    gradient = gradient / scale.cpu()
                self.gradients[name] = gradient

    def keep_error(self, error: BaseException):
        self.error = error
        return self.own_explain(error)

    # ---- At other weights

    @torch.no_grad()
    def set_weights(self, offsets: dict[str, torch.Tensor] | None = None) -> None:
        """Sets the weights that it was given, plus offsets of some."""
        for module in self.model.modules():
            if hasattr(module, "reshard"):  # else a gathered copy would be set
                module.reshard()
        for name, parameter in self.model.named_parameters():
            value = self.weights[name] + (offsets or {}).get(name, 0)
            value = value.to(parameter.device, parameter.dtype)
            if hasattr(parameter, "placements"):  # the rank has a share of it
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)

    def loss_at(self, offsets: dict[str, torch.Tensor]) -> float:
        """Returns the loss of a step at other weights, with the same masks, by the same graphs:
        with gradients enabled, since torch.no_grad() would make others, which draw other masks."""
        self.set_weights(offsets)
        torch.manual_seed(7 + self.rank)
        losses = [self.own_compute_loss(self.training_model, *pair) for pair in self.micro_batches]
        loss = torch.stack([loss.detach().double() for loss in losses]).mean()
        if self.ranks > 1:
            dist.all_reduce(loss)
        return loss.item() / self.ranks


class InOrder(SequentialSampler):
    """In the place of RandomSampler: every script has the same batches, however many ranks."""

    def __init__(self, windows, replacement=False, num_samples=None, generator=None):
        super().__init__(windows)
        self.generator = generator


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps a script from what would end or distort the comparison: argparse's exit, matmuls in
    TF32, which on a GPU would hide what is looked for, and other groups of ranks than the one of
    all runs."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(argparse.ArgumentParser, "error", refuse))
        stack.enter_context(mock.patch.object(torch, "set_float32_matmul_precision"))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
        if dist.is_initialized():
            stack.enter_context(mock.patch.object(dist, "init_process_group"))
        yield


def no_evaluation(*args) -> float:
    return 1.0


def no_sample(*args) -> str:
    return ""


def no_preparation(config) -> None:
    """Stands in for prepare_data(): the text is made up."""


def refuse(parser, message: str) -> None:
    raise Refused(message)


def whole_copy(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a copy in float64 on the CPU, of all ranks' shares where each has one."""
    gradient = gradient.detach()
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    return gradient.clone().double().cpu()


def starting_weights(model, given: dict | None) -> dict[str, torch.Tensor]:
    """Returns the given weights, or the model's own with something added, so that none is zero; all
    are numbers that bfloat16 has."""
    weights = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float().cpu()
        if given and name in given and given[name].shape == value.shape:
            value = given[name]
        else:
            value = value + offset_of(name, value.shape)
        weights[name] = value.bfloat16().float()
    return weights


def offset_of(name: str, shape: torch.Size) -> torch.Tensor:
    """Returns what is added to a tensor's own starting values: about as large as weights are after
    some training."""
    size = 0.1  # of biases and the scales of LayerNorm
    if len(shape) > 1:
        size = 0.3 / shape[-1] ** 0.5
    return size * torch.randn(shape, generator=seeded(name))


def canonical(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors by the names of 01, which has query, key and value in one matrix."""
    merged = {}
    for name, value in tensors.items():
        if name.endswith(".query.weight"):
            stem = name.removesuffix("query.weight")
            parts = [tensors[f"{stem}{part}.weight"] for part in ("query", "key", "value")]
            merged[f"{stem}query_key_value.weight"] = torch.cat(parts)
        elif not name.endswith((".key.weight", ".value.weight")):
            merged[name] = value
    return merged


def compared(comparison: str, own: dict, other: dict) -> dict:
    """Returns the event of a comparison of gradients."""
    return dict(event="gradients", comparison=comparison, tensors=distances(own, other))


def derivatives_of(run: TrainingRun) -> dict:
    """Returns the event of numeric derivatives beside autograd's."""
    numeric = Derivatives(run.loss_at, run.weights)
    directions = {}
    for name, weight in run.weights.items():
        gradient = run.gradients.get(name, torch.zeros(weight.shape, dtype=torch.float64))
        directions[name] = [
            numeric.along(name, gradient, number) for number in range(run.directions)
        ]
    return dict(
        event="gradients", comparison="dropout", directions=directions, loss_noise=numeric.noise
    )


def can_compile(script: ModuleType) -> bool:
    return hasattr(script.Config, "compile")


def uncompiled(script: ModuleType) -> list[str]:
    """Returns the option without which a script compiles; none for one that never does."""
    if can_compile(script):
        return ["--no-compile"]
    return []


class ScriptCheck:
    """The runs of one script that are compared."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.script = load_script(args.script, "script")
        self.device, _, _ = args.device.partition(":")
        self.runs = 0
        self.record: Path | None = None  # of the last run that came to its end

    def events(self) -> list[dict]:
        """Returns the comparisons; the last run leaves its record in the folder."""
        reference = self.reference()
        given = None
        if reference:
            given = canonical(reference.weights)
        plain = self.run("--dropout", "0", *uncompiled(self.script), given=given)
        events = self.against("uncompiled to reference", plain, reference)
        if self.compiles:
            # Random numbers, as of sampled classes, have to be those of the uncompiled script.
            with mock.patch.object(torch._inductor.config, "fallback_random", True):
                compiled = self.run("--dropout", "0", given=plain.weights)
            events.append(compared("compiled to uncompiled", compiled.gradients, plain.gradients))
            events += self.against("compiled to reference", compiled, reference)
        if self.args.dropout:
            events.append(self.with_dropout(plain.weights))
        return events

    @property
    def compiles(self) -> bool:
        """Whether the script is one that compiles, with these options."""
        return can_compile(self.script) and "--no-compile" not in self.args.options

    def reference(self) -> TrainingRun | None:
        """Returns a run of the reference, uncompiled, in float32, on the batches of all ranks; None
        where the script has none."""
        if not self.args.reference:
            return None
        script = load_script(self.args.reference, "reference")
        options = ["--device", self.args.device, *self.size_options(RANKS), "--dropout", "0"]
        options += ["--results-dir", str(self.folder / "reference"), *uncompiled(script)]
        if can_compile(script):  # 00, which can't, has no other type
            options += ["--dtype", "float32"]
        run = TrainingRun(script, self.sizes, None)
        run.train(options)
        return run

    def run(self, *options: str, given: dict | None, directions: int = 0) -> TrainingRun:
        """Returns a run of the script, whose record is then `record`."""
        self.runs += 1
        records = self.folder / f"records-{self.runs}"
        run = TrainingRun(self.script, self.sizes, given, directions)
        run.train(
            [
                *self.own_options(self.folder / str(self.runs)),
                *("--device", self.args.device),
                *self.size_options(1),
                *options,
                *("--eval-freq", str(10**6)),
                *("--results-dir", str(records)),
            ]
        )
        if directions and not run.derivatives:
            raise RuntimeError(f"the script made {run.steps} steps in place of {STEPS}")
        self.record = next(records.glob("*.jsonl"), None)  # rank 0 alone writes one
        return run

    def own_options(self, scratch: Path) -> list[str]:
        """Returns the options of the script with a folder of this run's own in the place of the one
        around --results-dir, such as for checkpoints: the next run mustn't find them."""
        options = []
        for word in self.args.options:
            if word == str(self.args.results_dir.parent):
                word = str(scratch)
            options.append(word)
        return options

    @property
    def sizes(self) -> dict:
        """What the script's table of models has in the place of its own entry."""
        sizes = dict(SIZES[self.device])
        if self.args.layers:
            sizes["layers"] = self.args.layers
        if self.args.width:
            sizes["width"] = self.args.width
        return {MODEL[self.device]: sizes}

    def size_options(self, parts: int) -> list[str]:
        """Returns the options of the model, and of a batch of so many ranks' parts."""
        return [
            "--model",
            MODEL[self.device],
            "--batch-size",
            str(parts * BATCH[self.device]),
            "--context-length",
            str(SIZES[self.device]["context_length"]),
        ]

    def against(
        self, comparison: str, run: TrainingRun, reference: TrainingRun | None
    ) -> list[dict]:
        """Returns the comparison of a run with the reference; none without a reference."""
        if not reference:
            return []
        return [compared(comparison, canonical(run.gradients), canonical(reference.gradients))]

    def with_dropout(self, weights: dict) -> dict:
        """Returns the event of numeric derivatives with dropout, or of why the script refuses."""
        dropout = ["--dropout", str(DROPOUT)]
        try:
            return self.run(*dropout, given=weights, directions=self.args.directions).derivatives
        except Refused as reason:
            return dict(event="gradients", comparison="dropout", refused=str(reason))


def worst_of_ranks(events: list[dict]) -> list[dict]:
    """Returns the events with each tensor as on the rank where it is farthest off."""
    if not dist.is_initialized():
        return events
    everyone: list[list[dict]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(everyone, events)
    return [worst_of(ranks) for ranks in zip(*everyone, strict=True)]


def worst_of(ranks: tuple[dict, ...]) -> dict:
    """Returns one event of the ranks' events of a comparison."""
    worst = dict(ranks[0])
    for table, distance in (("tensors", error_of), ("directions", distance_of)):
        if table in worst:
            worst[table] = {
                name: max((rank[table][name] for rank in ranks), key=distance)
                for name in worst[table]
            }
    return worst


def distance_of(directions: list[list[float]]) -> float:
    """Returns how far a tensor's derivatives are off, in all; infinite in place of NaN, which max()
    may pass over."""
    distance = sum(abs(numeric - autograd) for numeric, _, autograd in directions)
    if math.isnan(distance):
        return math.inf
    return distance


def shortened(event: dict) -> str:
    """Returns a line of a record, its numbers with as many digits as a verdict needs."""
    return json.dumps(json.loads(json.dumps(event), parse_float=six_digits))


def six_digits(number: str) -> float:
    return float(f"{float(number):.6g}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check the gradients of one script.", allow_abbrev=False
    )
    parser.add_argument(
        "--reference",
        metavar="FILE",
        help="another script that has the same gradients, in float32",
    )
    parser.add_argument(
        "--dropout",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="whether derivatives with dropout are checked",
    )
    parser.add_argument(
        "--directions", type=int, default=3, help="of numeric derivatives, in each tensor"
    )
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--width", type=int, help="of the model")
    parser.add_argument("script", help="the script to check")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="its own options, --results-dir among them"
    )
    args = parser.parse_args()
    # Of the script's own options these two are read here, and others left as they are.
    shared = argparse.ArgumentParser(allow_abbrev=False)
    shared.add_argument("--device", default="cpu")
    shared.add_argument("--results-dir", type=Path, required=True)
    _, args.options = shared.parse_known_args(args.options, namespace=args)
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as name:
        check = ScriptCheck(args, Path(name))
        try:
            events = worst_of_ranks(check.events())
        except Refused as reason:
            sys.exit(f"error: {reason}")
        if check.record:
            args.results_dir.mkdir(parents=True, exist_ok=True)
            lines = "".join(shortened(event) + "\n" for event in events)
            record = args.results_dir / check.record.name
            record.write_text(check.record.read_text() + lines)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
