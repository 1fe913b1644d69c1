"""Train GPT-2 124M on a book, and log tokens per second, losses and memory.

    torchrun --nproc_per_node=4 02_opt_multi_gpu_ddp.py    # one process per GPU

00_orig.py spells everything out. 01_opt_single_gpu.py, and 02_opt_multi_gpu_ddp.py for many GPUs,
add fifteen techniques: 1 no stored mask, 2 TF32, 3 fused AdamW, 4 pinned batches, 5 bfloat16,
6 built-in layers, 7 FlashAttention, 8 torch.compile, 9 padded vocabulary, 10 larger batch, 11 fused
QKV, 12 huge pages, 13 compiled loss, 14 chunked cross-entropy, 15 allocator settings.

This is a benchmark, not a training recipe: that would also schedule the learning rate, clip
gradients, initialize weights as GPT-2 does and decay only matrices. Read data, model, training and
process, then main() at the end; "Plumbing" in between makes it robust. Name suffixes give tensor
dimensions: B batch, T tokens of the context, C channels (the width), H heads, D channels of one
head, V vocabulary, N tokens of the batch, M of a part of it.
"""

import argparse
import ctypes
import hashlib
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import namedtuple
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

HERE = Path(__file__).resolve().parent

# ---- Settings ----------------------------------------------------------------------------------

MODELS = {  # cpu-demo trains for a minute, without dropout, which fast CPU attention lacks
    "gpt2": dict(layers=12, heads=12, width=768),
    "gpt2-medium": dict(layers=24, heads=16, width=1024),
    "gpt2-large": dict(layers=36, heads=20, width=1280),
    "gpt2-xl": dict(layers=48, heads=25, width=1600),
    "cpu-demo": dict(layers=4, heads=4, width=256, context_length=256, dropout=0.0, batch_size=8,
                     eval_windows=16, max_tokens=40_960),
}


@dataclass
class Config:
    """The settings of a run. Those of 00 are from S. Raschka's published experiment."""

    model: str = "gpt2"
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocab_size: int = 50_304  # technique 9: 47 unused ids make it a multiple of 64, which is faster
    context_length: int = 1024
    dropout: float = 0.1
    dtype: str = "auto"
    dtype_reason: str = "by --dtype"

    batch_size: int = 32  # technique 10; of each rank, at the same learning rate
    learning_rate: float = 5e-4
    weight_decay: float = 0.1
    compile: bool = True

    seed: int = 123
    epochs: int = 15
    max_steps: int | None = None
    max_tokens: int | None = None
    target_loss: float = 0.0
    eval_freq: int = 15
    eval_windows: int = 40
    device: torch.device | None = None  # configure() sets it
    world_size: int = 1  # of how many processes; configure() asks torchrun
    data: str = str(HERE / "data")
    results_dir: str = str(HERE / "results")
    name: str = Path(__file__).stem

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.context_length * self.world_size


# ---- Data --------------------------------------------------------------------------------------

class TokenWindows(Dataset):
    """Pairs (x_T, y_T) of int64 ids. The x_T don't overlap, and y_T is x_T shifted by one token."""

    def __init__(self, tokens: np.ndarray, context_length: int):
        self.tokens, self.context_length = tokens, context_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context_length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = i * self.context_length
        window = self.tokens[start : start + self.context_length + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


Data = namedtuple("Data", "meta train val tokenizer")  # meta holds prepare.py's meta.json


def load_data(config: Config) -> Data:
    """Loads the tokens in --data. Raises UserError if there are none, or too few."""
    folder = Path(config.data)
    try:
        data = read_data(folder, config)
    except Exception as error:  # damaged files can raise anything
        reason = "no" if isinstance(error, FileNotFoundError) else f"damaged ({error!r})"
        raise UserError(f"{reason} tokens in {folder}: run `python data/prepare.py --out {folder}`")
    if len(data.train) < config.batch_size or len(data.val) < 1:
        raise UserError(f"the text is too short: {len(data.train)} windows to train on,"
                        f" {len(data.val)} to validate on: lower --context-length or --batch-size")
    return data


def read_data(folder: Path, config: Config) -> Data:
    """Reads what prepare.py wrote; tokens are mapped into memory, not copied."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    train = np.memmap(folder / "train.bin", "<u2", "r", shape=meta["tokens"]["train"])
    val = np.memmap(folder / "val.bin", "<u2", "r", shape=meta["tokens"]["val"])
    if max(train.max(), val.max()) >= config.vocab_size:
        raise ValueError("ids that the model doesn't have")
    # The tokenizer is kept beside the tokens, so that nothing is downloaded here.
    words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    ids = {word.encode("latin-1"): i for i, word in enumerate(words["tokens"])}
    tokenizer = tiktoken.Encoding(meta["tokenizer"], pat_str=words["pattern"],
                                  mergeable_ranks=ids, special_tokens=words["special"])
    T = config.context_length
    return Data(meta, TokenWindows(train, T), TokenWindows(val, T), tokenizer)


def prepare_data(config: Config) -> None:
    """Runs prepare.py if the default folder has no tokens."""
    folder, script = Path(config.data), HERE / "data" / "prepare.py"  # it writes meta.json last
    if config.data == Config.data and script.exists() and not (folder / "meta.json").exists():
        print(f"No tokens in {folder}: running data/prepare.py", flush=True)
        subprocess.run([sys.executable, script])


def prepare_data_on_machines(config: Config) -> None:
    """Prepares the data on rank 0, then on each machine that has a disk of its own."""
    rank, local_rank = dist.get_rank(), number_from_torchrun("LOCAL_RANK", 0)
    if rank == 0:
        prepare_data(config)
    dist.barrier()
    if local_rank == 0 and rank > 0:
        prepare_data(config)
    dist.barrier()


class RankSampler:
    """This rank's share of an order that all ranks draw: rank r of n takes numbers r, r + n, ... so
    that n ranks with batch B see what one process with batch n · B would."""

    def __init__(self, order: RandomSampler, config: Config):
        self.order, self.generator = order, order.generator
        self.rank, self.ranks = dist.get_rank(), config.world_size

    def __len__(self) -> int:
        return len(self.order) // self.ranks

    def __iter__(self):
        return islice(self.order, self.rank, len(self) * self.ranks, self.ranks)


def make_loader(windows: TokenWindows, config: Config) -> DataLoader:
    """Returns this rank's batches; train() seeds their order each epoch. So that many GPUs have
    steps to measure, an epoch repeats a short text until it has 8."""
    passes = math.ceil(8 * config.batch_size * config.world_size / len(windows))
    if passes > 1:
        print(f"One pass over the text has fewer than 8 steps: each epoch makes {passes}")
    count, generator = passes * len(windows), torch.Generator()
    sampler = RankSampler(RandomSampler(windows, False, count, generator), config)
    pin = config.device.type == "cuda"  # technique 4: page-locked, so that the CPU needn't wait
    return DataLoader(windows, config.batch_size, sampler=sampler, drop_last=True, pin_memory=pin)


# ---- Model -------------------------------------------------------------------------------------

class MultiHeadAttention(nn.Module):
    """Causal self-attention (Vaswani et al., arXiv:1706.03762); no bias on query, key and value.

    Each token takes a mean of the values of all tokens up to itself, weighted by how well its query
    fits their keys. Dividing by √D keeps the scores' size the same for every D, and a score of -inf
    becomes a weight of 0, so that no token sees the future."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.width // config.heads
        # Technique 11: one matmul in place of three.
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.dropout

    def forward(self, x_BTC):
        B, T, C = x_BTC.shape
        q_BTC, k_BTC, v_BTC = self.query_key_value(x_BTC).chunk(3, dim=-1)
        q_BHTD, k_BHTD, v_BHTD = (t.view(B, T, self.heads, self.head_dim).transpose(1, 2)
                                  for t in (q_BTC, k_BTC, v_BTC))
        # Techniques 1 and 7: one kernel, which stores neither a mask nor the scores of all pairs.
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


class TransformerBlock(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)  # technique 6: it is one kernel, as the GELU below
        self.attention = MultiHeadAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC):
        x_BTC = x_BTC + self.dropout(self.attention(self.norm1(x_BTC)))
        return x_BTC + self.dropout(self.feed_forward(self.norm2(x_BTC)))


class GPTModel(nn.Module):
    """GPT-2 with a head that isn't tied to the embedding, so that "124M" has 163M parameters."""

    def __init__(self, config: Config):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*[TransformerBlock(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids_BT, targets_BT=None):
        """Returns logits, or with targets the mean loss. Technique 13: it is computed here, so that
        torch.compile fuses it, too."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTC = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        x_BTC = self.blocks(self.dropout(x_BTC))
        x_BTC = self.norm(x_BTC)
        if targets_BT is None:
            return self.head(x_BTC)
        x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
        # The forward pass of ChunkedLoss computes the gradients, too; loss.backward() scales them.
        return ChunkedLoss.apply(x_NC, self.head.weight, targets_N) / len(targets_N)


class ChunkedLoss(torch.autograd.Function):
    """Technique 14: computes the head and its cross entropy for M of the N tokens at a time, so
    that all logits never exist at once. The gradient of the logits is softmax - one_hot; that of x
    is this @ W, that of W this.T @ x. The forward pass makes both, and backward() scales them."""

    @staticmethod
    def forward(ctx, x_NC, weight_VC, targets_N):
        """Returns the sum of the losses."""
        chunk = max(1024, math.ceil(len(targets_N) / 8))  # smaller ones leave a GPU idle
        losses, x_gradients, head_gradient_VC = [], [], None
        ids_V = torch.arange(len(weight_VC), dtype=torch.int32, device=x_NC.device)  # few bytes
        for x_MC, targets_M in zip(x_NC.split(chunk), targets_N.split(chunk), strict=True):
            targets_M1 = targets_M[:, None]
            products_MV = x_MC @ weight_VC.T
            logits_MV = products_MV.float()
            # The softmax is spelled out, since loss and gradient both need its exponentials.
            max_M1 = logits_MV.amax(dim=-1, keepdim=True)
            exp_MV = (logits_MV - max_M1).exp()
            sum_M1 = exp_MV.sum(dim=-1, keepdim=True)
            losses.append((sum_M1.log() + max_M1 - logits_MV.gather(-1, targets_M1)).sum())
            # The gradient of the logits is their softmax, minus 1 at the target. It is stored once,
            # in the type that the matmuls take.
            one_hot_MV = (ids_V == targets_M1.int()).float()
            gradient_MV = (exp_MV / sum_M1 - one_hot_MV).to(products_MV.dtype)
            x_gradients.append(gradient_MV @ weight_VC)
            part_VC = gradient_MV.T @ x_MC  # rounded to the weights' type, as the sum below
            head_gradient_VC = part_VC if head_gradient_VC is None else head_gradient_VC + part_VC
        ctx.save_for_backward(torch.cat(x_gradients), head_gradient_VC)
        return torch.stack(losses).sum()  # with `loss += ...` torch.compile kept all logits

    @staticmethod
    def backward(ctx, gradient):
        x_gradient_NC, head_gradient_VC = ctx.saved_tensors
        return gradient * x_gradient_NC, gradient * head_gradient_VC, None


def prepare_model(model: GPTModel, config: Config) -> nn.Module:
    """Moves `model` to the device, in place, and returns the model that training steps call."""
    torch.set_float32_matmul_precision("high")  # technique 2: TF32, for weights in float32
    device = config.device
    # cuDNN's attention rounds the dropout rate to sixteenths, so it is used without dropout only.
    torch.backends.cuda.enable_cudnn_sdp(not config.dropout)
    # Technique 5: weights, gradients and AdamW's moments in bfloat16, half the bytes. There is no
    # float32 copy, so that an update below about 1/256 of a weight may round to nothing.
    model.to(device, getattr(torch, config.dtype))
    # While loss.backward() computes gradients, DDP averages over the ranks those that are ready, a
    # bucket at a time. For that the compiler cuts its graph into as many parts (technique 8).
    ddp_model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    # DDP marks its parts for a profiler, which the compiler would warn that it leaves out.
    logging.getLogger("torch._dynamo.variables.ctx_manager").setLevel(logging.ERROR)
    return torch.compile(ddp_model) if config.compile else ddp_model


def count_parameters_and_flops(model: nn.Module, config: Config) -> dict[str, int]:
    """Counts the parameters and the floating-point operations per training token: 2 forward and 4
    backward per weight of a linear layer, plus attention's (PaLM, arXiv:2204.02311, appendix B)."""
    matmul_weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    flops = 6 * matmul_weights + 12 * config.layers * config.context_length * config.width
    return dict(parameters=sum(p.numel() for p in model.parameters()), flops_per_token=flops)


# ---- Training ----------------------------------------------------------------------------------

def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate,
                             weight_decay=config.weight_decay, fused=True)  # technique 3


def compute_loss(model: nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats per token, which GPTModel.forward computes."""
    return model(x_BT, y_BT)


def backward_and_update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Backpropagates, and updates the weights."""
    loss.backward()
    optimizer.step()


def train(model: nn.Module, data: Data, config: Config, run: "Run") -> None:
    """Trains `model` in place, and reports to `run`; raises if a loss diverges."""
    training_model = prepare_model(model, config)  # it shares its weights with `model`
    run.start(model, data, config)
    optimizer = make_optimizer(model, config)
    loader = make_loader(data.train, config)
    total_steps = count_steps(config, len(loader))
    print(f"{len(loader)} steps per epoch, {total_steps} in all\n")
    if config.compile:
        hint_at_short_run(total_steps, config.device)

    for epoch in range(config.epochs):
        loader.sampler.generator.manual_seed(config.seed + epoch)
        dist.barrier()  # the clock starts on all ranks at once
        times = [now(config.device)]  # the clock starts: fetching batches is timed
        for step, (x_BT, y_BT) in enumerate(loader, start=epoch * len(loader)):
            x_BT = x_BT.to(config.device, non_blocking=loader.pin_memory)
            y_BT = y_BT.to(config.device, non_blocking=loader.pin_memory)  # technique 4

            optimizer.zero_grad()
            loss = compute_loss(training_model, x_BT, y_BT)
            backward_and_update(loss, optimizer)
            times.append(now(config.device))

            done = step + 1 == total_steps
            if step % config.eval_freq == 0 or (step + 1) % len(loader) == 0 or done:
                seconds = seconds_between(times)  # of each step; evaluation isn't timed
                train_loss = evaluate(model, data.train, config)
                val_loss = evaluate(model, data.val, config)
                run.log(epoch + 1, step, seconds, train_loss, val_loss)
                check_loss(train_loss + val_loss)
                dist.barrier()  # rank 0 may come late, since it writes the record
                done = done or val_loss <= config.target_loss
                times = [now(config.device)]  # the clock starts again
            if done:
                break
        run.epoch(epoch + 1, sample(model, data.tokenizer, config))  # not timed either
        if done:
            break


def count_steps(config: Config, steps_per_epoch: int) -> int:
    """Returns after how many steps the first limit is reached."""
    limits = [config.epochs * steps_per_epoch]
    if config.max_steps:
        limits.append(config.max_steps)
    if config.max_tokens:
        limits.append(math.ceil(config.max_tokens / config.tokens_per_step))
    return min(limits)


def check_loss(loss: float) -> None:
    """Raises FloatingPointError if training has diverged."""
    if not math.isfinite(loss):
        raise FloatingPointError("the loss is not finite: lower --learning-rate")


@torch.no_grad()
def evaluate(model: nn.Module, windows: TokenWindows, config: Config) -> float:
    """Mean loss (nats per token) of the first `eval_windows` windows, without dropout."""
    model.eval()
    loss_sum = 0.0
    count = min(config.eval_windows, len(windows))
    first = Subset(windows, range(dist.get_rank(), count, config.world_size))  # this rank's share
    for x_BT, y_BT in DataLoader(first, min(8, config.batch_size)):
        logits_BTV = model(x_BT.to(config.device))
        # Small batches and one window's loss at a time, to need less memory than training.
        for logits_TV, y_T in zip(logits_BTV, y_BT.to(config.device), strict=True):
            losses_T = F.cross_entropy(logits_TV.float(), y_T, reduction="none")
            loss_sum += losses_T.cpu().double().sum().item()
    model.train()
    return sum_over_ranks([loss_sum])[0] / (count * config.context_length)


@torch.no_grad()
def sample(model: nn.Module, tokenizer: tiktoken.Encoding, config: Config) -> str:
    """Continues a prompt by 50 tokens, each the likeliest of those that the tokenizer has."""
    model.eval()
    ids_BT = torch.tensor([tokenizer.encode("Every effort moves you")], device=config.device)
    for _ in range(50):
        logits_BTV = model(ids_BT[:, -config.context_length :])
        next_B1 = logits_BTV[:, -1, : tokenizer.n_vocab].argmax(dim=-1, keepdim=True)  # one id each
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    model.train()
    return tokenizer.decode(ids_BT[0].tolist(), "backslashreplace")  # it may end inside a character


def now(device: torch.device):
    """Returns a timestamp; on a GPU an event, so that nothing synchronizes."""
    if device.type == "cpu":
        return time.perf_counter()
    event = getattr(torch, device.type).Event(enable_timing=True)
    event.record()
    return event


def tokens_per_second(seconds: list[float], config: Config) -> float | None:
    """Returns the speed over steps that took so many seconds; None if there are none."""
    return config.tokens_per_step * len(seconds) / sum(seconds) if seconds else None


def seconds_between(times: list) -> list[float]:
    """Returns the seconds between timestamps; waits until a GPU has reached the last one."""
    if isinstance(times[0], float):
        return np.diff(times).tolist()
    times[-1].synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(times, times[1:], strict=False)]


# ---- Process -----------------------------------------------------------------------------------

def set_up_process(rank: int = 0) -> None:
    """Lets any text be printed, and a signal end the run with its record complete."""
    if rank != 0 or sys.stdout is None:  # one rank speaks for all
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal can't show
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def set_up_pytorch() -> None:
    """Sets what PyTorch reads once. Variables that the user has set stay."""
    make_compiler_folder()
    os.environ.setdefault("TORCHINDUCTOR_USE_FAST_MATH", "1")  # technique 8: cruder exp
    # Technique 14: a later start finds ChunkedLoss compiled; the cache's key has its code.
    os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD", "1")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # technique 12: huge pages on a CPU
    if not torch.cuda.is_available() and platform.libc_ver()[0] == "glibc":
        # Technique 15: freed memory stays for the next step.
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped apart
    if has_own_memory():  # technique 15: the segments of reserved memory grow, and leave no gaps
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


# ---- Plumbing: hardware, memory, record, settings, errors --------------------------------------

def choose_compiler_folder() -> None:
    """Keeps compiled code in ~/.cache, since /tmp is emptied at a reboot. Each machine has its own
    part, since code is made for its CPU. PyTorch's own folder stays where there is no home, or
    where it can't be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpt-speed")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))  # fails where the disk is full
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / platform.node())


def make_compiler_folder() -> None:
    """Makes the folder for compiled code that the user names. Else PyTorch's optimizers, which load
    the compiler, would fail without a hint."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not folder:
        choose_compiler_folder()
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"{first_line(error)} (see TORCHINDUCTOR_CACHE_DIR)") from None


def has_own_memory() -> bool:
    """Returns whether there is an NVIDIA GPU, under Linux, with memory of its own; a GB10 uses the
    host's. The driver is asked, since PyTorch could tell only when it is too late to set it up."""
    shared = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # another system, or no such GPU
        return False
    driver.cuInit(0)
    driver.cuDeviceGetAttribute(ctypes.byref(shared), 18, 0)  # CU_DEVICE_ATTRIBUTE_INTEGRATED
    return not shared.value


def fit_to_hardware(config: Config) -> None:
    """Settles what depends on the hardware: the weights' dtype, and whether it can compile."""
    if config.dtype == "auto":
        answer = [*best_dtype(config.device)]
        dist.broadcast_object_list(answer)  # rank 0's, if they differ
        config.dtype, config.dtype_reason = answer
    print(f"Training in {config.dtype}: {config.dtype_reason}")
    config.compile = config.compile and can_compile(config)
    if config.compile and config.device.type == "cuda":
        warn_of_compiler_bugs(config)
    (failures,) = sum_over_ranks([not config.compile])
    if failures and config.compile:  # one rank would slow all others down
        config.compile = False
        print("Training without torch.compile, which doesn't work on another rank")


def best_dtype(device: torch.device) -> tuple[str, str]:
    """Returns bfloat16 if the hardware has units for it, else float32, and the reason."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"{major}.{minor}"
        if major >= 8:
            return "bfloat16", f"compute capability {capability}"
        return "float32", (f"compute capability {capability} has no bfloat16 units; for float16:"
                           " python patches/stack.py compose precision-fp16 --out my.py")
    if device.type == "cpu":
        has = getattr(torch.cpu, "get_capabilities", dict)()  # older PyTorch lacks it
        for unit in ("amx_bf16", "avx512_bf16", "bf16"):  # on Intel; on Intel and AMD; on Arm
            if has.get(unit):
                return "bfloat16", f"the CPU has {unit}"
        return "float32", "this CPU has no bfloat16 units"  # emulation would be slower
    return "float32", f"bfloat16 was not measured on {device.type}; to try it: --dtype bfloat16"


def can_compile(config: Config) -> bool:
    """Tries whether torch.compile works here; if it doesn't, prints the reason in one line."""
    x = torch.ones(8, device=config.device, dtype=getattr(torch, config.dtype))
    try:
        torch._dynamo.config.suppress_errors = False  # else a failure would run uncompiled
        with warnings.catch_warnings():  # a GPU without bfloat16 is a failure, too
            warnings.filterwarnings("error", ".*does not support bfloat16")
            compiled = torch.compile(lambda x: x + torch.compiler.is_compiling())
            if compiled(x)[0] == 2:  # 1 + True
                return True
        reason = "it is switched off, maybe by TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE"
    except Exception as error:
        lines = str(error).split("\n")
        reason = " ".join(lines[:2] + [line for line in lines[2:] if "error: " in line][:1])
    print(f"Training without torch.compile; docs/troubleshooting.md says what it needs ({reason})")
    return False


def warn_of_compiler_bugs(config: Config) -> None:
    """Prints which bugs of this PyTorch change what compiled code computes on a GPU."""
    version = [int(number) for number in torch.__version__.split(".")[:2]]
    if version == [2, 10]:
        print("PyTorch 2.10 may compile gradients that are NaN: use another (docs/upstream.md)")
    if version >= [2, 13] and config.dropout:
        print("From PyTorch 2.13 on compiled dropout repeats its masks on a GPU: use 2.11, or"
              " --dropout 0 (docs/upstream.md)")


def hint_at_short_run(steps: int, device: torch.device) -> None:
    """Suggests --no-compile, in a terminal, for runs of less than half of the steps that repay
    compiling: 140 on two CPU cores, with an empty cache; on a GPU nobody has measured it."""
    if device.type == "cpu" and steps < 140 / 2 and sys.stdout.isatty():
        print(f"{steps} steps: the first time, compiling takes longer than it saves here;"
              " to train without it: --no-compile\n")


def attention_backend(model: nn.Module, config: Config) -> str | None:
    """Returns the attention kernel that PyTorch chooses; None if this version doesn't say. Prints
    a line if it is the slow one, on a GPU."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return None
    shape = (1, config.context_length, config.heads, config.width // config.heads)
    q_BHTD = next(model.parameters()).new_empty(shape).transpose(1, 2).requires_grad_()
    number = choose(q_BHTD, q_BHTD, q_BHTD, dropout_p=config.dropout, is_causal=True)
    kernel = nn.attention.SDPBackend(number).name.lower()
    if kernel == "math" and config.device.type == "cuda":
        print("Attention runs in the slow kernel math (see docs/troubleshooting.md); on an AMD GPU"
              " try TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1")
    return kernel


def memory_gb(device: torch.device) -> dict[str, float | None]:
    """Returns reserved GB (1024³ bytes), now and at the peak; on a CPU the peak resident set."""
    size, peak, status = None, None, Path("/proc/self/status")
    if device.type == "cuda":
        size, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    elif status.exists() and "VmHWM:" in status.read_text():  # gVisor has no VmHWM
        size = peak = 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return dict(reserved_gb=size and size / 1024**3, peak_reserved_gb=peak and peak / 1024**3)


def describe_machine(device: torch.device) -> dict[str, str | int | None]:
    """Returns what the speed depends on besides the script."""
    cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "unknown CPU")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return dict(torch=torch.__version__, cpu=cpu, gpu=gpu, threads=torch.get_num_threads())


class Run:
    """Prints the log and writes the record: one JSON object per line. No weights are saved. All
    ranks call it, since its figures are of all of them; rank 0 writes."""

    def __init__(self):
        self.file, self.seconds, self.average = None, [], None  # start() opens the file
        self.memory = {}  # at the end of an epoch: that of the rank with the most

    def start(self, model: nn.Module, data: Data, config: Config) -> None:
        self.config, self.attention = config, attention_backend(model, config)
        device, began = config.device, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        unique = os.urandom(3).hex()  # another machine may write into the same folder
        path = Path(config.results_dir, f"{config.name}-{device.type}-{began}-{unique}.jsonl")
        if dist.get_rank() == 0:  # one record is enough
            path.parent.mkdir(parents=True, exist_ok=True)
        where, mode = (path, "x") if dist.get_rank() == 0 else (os.devnull, "w")
        self.file = open(where, mode, encoding="utf-8")
        settings = dict(asdict(config), **count_parameters_and_flops(model, config),
                        device=device.type, matmul_precision=torch.get_float32_matmul_precision())
        del settings["data"], settings["results_dir"]  # paths of this machine
        machine = describe_machine(device)
        self.write("start", schema=3, stage=config.name, time=began, config=settings,
                   data=data.meta, environment=machine,
                   source_sha256=hashlib.sha256(Path(__file__).read_bytes()).hexdigest())
        print(f"PyTorch version: {torch.__version__}\n"
              f"Device: {device.type} ({machine['gpu'] or machine['cpu']})\n"
              f"CUDA version: {torch.version.cuda or 'n/a'}\nModel: {config.model}, "
              f"{settings['parameters']:,} parameters\nRecord: {path}")

    def write(self, event: str, **figures) -> None:
        print(json.dumps({"event": event, **figures}, allow_nan=False), file=self.file, flush=True)

    def log(self, epoch: int, step: int, seconds: list[float], train_loss, val_loss) -> None:
        """Reports the speed since the last line, and over all steps but the first, a warm-up."""
        ranks = self.config.world_size
        seconds = [total / ranks for total in sum_over_ranks(seconds)]  # their mean
        self.seconds += seconds
        rate = tokens_per_second(seconds, self.config)
        self.average = tokens_per_second(self.seconds[1:], self.config)  # the first step warms up
        losses = [x if math.isfinite(x) else None for x in (train_loss, val_loss)]  # no NaN in JSON
        self.write("log", epoch=epoch, step=step, tokens=(step + 1) * self.config.tokens_per_step,
                   train_loss=losses[0], val_loss=losses[1], step_tok_per_sec=rate,
                   avg_tok_per_sec=self.average, seconds=seconds)
        print(f"Ep {epoch}, Step {step:06d}, Train: {train_loss:.3f}, Val: {val_loss:.3f}, "
              f"Step tok/sec: {rate:.0f}, Avg tok/sec: {self.average or 0:.0f}", flush=True)

    def epoch(self, epoch: int, text: str) -> None:
        memory = memory_gb(self.config.device)
        self.memory = memory = largest_over_ranks(memory)
        self.write("epoch", epoch=epoch, **memory, sample=text)
        print("".join(c if c.isprintable() else " " for c in text))
        print(f"Reserved memory: {memory['reserved_gb'] or math.nan:.4f} GB\n", flush=True)

    def end(self, status: str, error: str | None) -> None:
        memory = memory_gb(self.config.device) if error else self.memory  # of this rank alone
        self.write("end", status=status, error=error, avg_tok_per_sec=self.average,
                   attention_backend=self.attention, **memory)
        self.file.close()
        rates = self.config.tokens_per_step / np.array(self.seconds[2:])  # the second may be slow
        if len(rates) >= 3:
            print(f"Median step tok/sec: {np.median(rates):.0f}")


def read_options(argv: list[str] | None = None) -> dict:
    """Returns the options that are given. Exits with 2 for an invalid one, with 0 after --help."""
    return vars(make_parser().parse_args(argv))


def configure(given: dict) -> Config:
    """Returns the settings of a run with these options. Raises UserError if its device fails."""
    given["world_size"] = number_from_torchrun("WORLD_SIZE", 1)
    try:
        device = choose_device(given.get("device"))
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        raise UserError(f"{first_line(error)} (see docs/troubleshooting.md)") from None
    model = given.get("model", "gpt2" if device.type == "cuda" else "cpu-demo")
    if "model" not in given and model == "cpu-demo":
        print("No NVIDIA GPU: training the small cpu-demo model (--model gpt2 for GPT-2 124M)")
    if given.keys() & {"epochs", "max_steps"}:  # they lift cpu-demo's limit
        given.setdefault("max_tokens", None)
    return Config(**MODELS[model] | given | dict(model=model, device=device))


def make_parser() -> argparse.ArgumentParser:
    """Lists the options: settings whose defaults stand in Config."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS, description="Train GPT-2"
                                     " on a book. The model cpu-demo has some defaults of its own.")

    def add(flag: str, text: str, default: str | None = None, **how) -> None:
        default = default or getattr(Config, flag[2:].replace("-", "_"))
        if "type" in how:
            how = dict(metavar="N") | how
        parser.add_argument(flag, help=f"{text} (default: {default})", **how)

    count = between(int, 1)
    switch = argparse.BooleanOptionalAction
    add("--model", "model size", "gpt2 on CUDA, else cpu-demo", choices=MODELS)
    add("--context-length", "tokens per window", type=count)
    add("--dropout", "share of activations zeroed in training", type=between(float, 0, 1))
    add("--dtype", "weight dtype", "bfloat16 if the hardware supports it",
        choices=("auto", "float32", "bfloat16"))
    add("--batch-size", "windows per step and process", type=count)
    add("--learning-rate", "AdamW's learning rate", type=between(float, 0, 1e36))
    add("--weight-decay", "AdamW's weight decay", type=between(float, 0))
    add("--compile", "torch.compile; in short trainings the variant compile-blocks saves time,"
        " since it starts sooner", action=switch)
    add("--seed", "seed of the weights, dropout and batch order", type=between(int, 0, 2**63))
    add("--epochs", "epochs of 8 steps or more; training stops at the first limit", type=count)
    add("--max-steps", "steps", "no limit", type=count)
    add("--max-tokens", "tokens of all processes", "no limit, for cpu-demo 40,960", type=count)
    add("--target-loss", "stop at this validation loss", "none", type=between(float, 0))
    add("--eval-freq", "steps between log lines; each epoch ends with another line", type=count)
    add("--eval-windows", "windows per split used to compute losses", type=count)
    add("--device", "kind of device", "cuda, else cpu", choices=("cpu", "cuda"))
    add("--data", "folder of the tokens", "data/ beside this file")
    add("--results-dir", "folder of the record", "results/")
    add("--name", "name of the run in its record", type=file_name, metavar="NAME")
    return parser


def between(kind: type, low: float, below: float = math.inf):
    """Returns a type for argparse: an int or float from `low` to less than `below`."""
    def number(text: str) -> float:
        value = kind(text)
        if not low <= value < below:
            raise argparse.ArgumentTypeError(f"{value} is out of range")
        return value
    return number


def file_name(text: str) -> str:
    """Returns the name of a run, with which the name of its record begins."""
    if not text or Path(text).name != text or not text.isprintable():
        raise argparse.ArgumentTypeError("no file name can begin with it")
    return text


def require_torchrun() -> None:
    """Raises UserError unless torchrun, or another launcher, started this process."""
    if not all(map(os.environ.get, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))):
        how = f"torchrun --nproc_per_node={torch.cuda.device_count() or 2} {Path(__file__).name}"
        raise UserError(f"start it with one process per GPU, on a CPU with any number: {how}")


def choose_device(kind: str | None) -> torch.device:
    """Returns this rank's GPU, or the CPU. Raises UserError where there is no GPU for the rank."""
    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.init()  # else device_count() may count a GPU cut by MIG as one
    gpus = torch.cuda.device_count()
    gpu = number_of_own_gpu(gpus)
    if gpu >= gpus:
        raise UserError(f"no GPU is left for this process: torchrun --nproc_per_node={gpus}")
    device = torch.device(f"cuda:{gpu}")
    torch.ones(1, device=device).item()
    torch.cuda.set_device(gpu)
    return device


def number_of_own_gpu(gpus: int) -> int:
    """Returns which of the visible GPUs this rank uses. Slurm may show each rank its own GPU alone
    (srun --gpus-per-task=1); torchrun shows all."""
    sees_its_own = gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    return 0 if sees_its_own else number_from_torchrun("LOCAL_RANK", 0)


def number_from_torchrun(name: str, default: int) -> int:
    """Returns a number that torchrun gives each process: RANK and WORLD_SIZE count all processes,
    LOCAL_RANK and LOCAL_WORLD_SIZE those of this machine."""
    return int(os.environ.get(name) or default)


def join_ranks(config: Config) -> None:
    """Connects this process with the others; each takes an equal share of its machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, cores // number_from_torchrun("LOCAL_WORLD_SIZE", 1))
    if sys.platform == "win32":  # where PyTorch compiles in one process, and has no libuv
        os.environ.setdefault("USE_LIBUV", "0")
    else:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, share)))
    gpu = config.device if config.device.type == "cuda" else None
    # NCCL's ten minutes could end a rank that waits for one whose compiler cache is still empty.
    dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu, timeout=timedelta(minutes=30))
    if gpu is None:
        torch.set_num_threads(share)


def compare_ranks(config: Config) -> None:
    """Raises UserError, on all ranks, where one has other settings or tokens than rank 0."""
    own = {"device", "data", "results_dir", "name"}  # folders may differ, too
    mine = {name: value for name, value in asdict(config).items() if name not in own}
    meta = Path(config.data, "meta.json")
    sha256 = hashlib.sha256(meta.read_bytes()).hexdigest() if meta.exists() else "missing"
    mine["data/meta.json"] = sha256
    mine["PyTorch"] = torch.__version__
    mine["script"] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    everyone = [mine] * config.world_size
    dist.all_gather_object(everyone, mine)
    for rank, settings in enumerate(everyone):
        for name, first in everyone[0].items():
            if settings.get(name) != first:
                raise UserError(f"rank {rank} has {name} {settings.get(name)}, rank 0 has {first}")


def sum_over_ranks(values: list[float]) -> list[float]:
    """Returns each value's sum in float64; NCCL needs the tensor on this rank's GPU."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    totals = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


def largest_over_ranks(figures: dict[str, float | None]) -> dict[str, float | None]:
    """Returns each figure's largest: that of the rank which runs out of memory first."""
    everyone = [figures] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)
    return {name: max(rank[name] or 0 for rank in everyone) or None for name in figures}


class UserError(Exception):
    """An error that the user can fix, printed as one line."""


def interrupt(number, frame) -> None:
    """Ends a run on Ctrl-C or SIGTERM."""
    ignore_signals()
    raise KeyboardInterrupt(number)


def ignore_signals() -> None:
    """Ignores further signals, so that none cuts the end of a run short."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def first_line(error: BaseException) -> str:
    """Returns what an error says first, or its name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory ran out, for which not every library has a class. Triton's "out of
    resource" is memory on the chip itself; for that a smaller batch doesn't help."""
    signs = ("out of memory", "MemoryError", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED",
             "bad_alloc", "allocate memory", "create a memory")
    return "out of resource" not in str(error) and any(sign in repr(error) for sign in signs)


def explain(error: BaseException) -> tuple[str, str, int]:
    """Returns a status, a line for the user and an exit code."""
    text = first_line(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"interrupted by signal {text}", 128 + error.args[0]
    if isinstance(error, FloatingPointError):
        return "diverged", text, 1
    if is_out_of_memory(error):
        return "out_of_memory", f"out of memory: lower --batch-size or --context-length ({text})", 1
    if not isinstance(error, UserError | OSError):
        sys.excepthook(type(error), error, error.__traceback__)  # a bug, with its traceback
        text = f"{type(error).__name__}: {text}"
    return "failed", text, 1


def main() -> int:
    rank = number_from_torchrun("RANK", 0)  # known before the ranks have joined
    run = Run()
    status, message, code = "complete", None, 0
    try:
        set_up_process(rank)
        given = read_options()
        require_torchrun()
        set_up_pytorch()
        config = configure(given)
        join_ranks(config)
        prepare_data_on_machines(config)
        compare_ranks(config)
        data = load_data(config)
        fit_to_hardware(config)
        torch.manual_seed(config.seed + rank)  # for dropout; DDP starts all from rank 0's weights
        model = GPTModel(config)  # on the CPU, so that weights don't depend on the device
        train(model, data, config, run)
        dist.destroy_process_group()  # not after an error, where it would wait for other ranks
    except (Exception, KeyboardInterrupt) as error:
        ignore_signals()
        status, message, code = explain(error)
        if rank == 0 or status not in ("interrupted", "diverged"):  # which end all ranks at once
            print(f"error: rank {rank}: {message}", file=sys.stderr)
    ignore_signals()
    try:
        if run.file is not None:  # else it failed before run.start()
            run.end(status, message)
    except OSError as error:  # such as a full disk
        if not code:  # else an error is printed already
            print(f"error: {error}", file=sys.stderr)
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
