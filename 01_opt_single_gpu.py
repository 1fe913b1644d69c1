"""Train GPT-2 124M on a book, and log tokens per second, losses and memory.

    python data/prepare.py    # once: text -> data/train.bin, data/val.bin
    python 00_orig.py         # the full experiment on an NVIDIA GPU, a small one elsewhere
    python 00_orig.py --help  # every setting

00_orig.py writes every part by hand, as one learns it. 01_opt_single_gpu.py is the same program
with every speed technique applied, 02_opt_multi_gpu_ddp.py the same again on many GPUs:

    git diff --no-index 00_orig.py 01_opt_single_gpu.py

One file, to be read from top to bottom: configuration, data, model, training; the plumbing
(clock, records, accidents) comes after what you came for.

Capitals at the end of a name are the dimensions of the tensor: B batch, T tokens of the context,
C channels (the width), H heads, D channels of one head, V vocabulary.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

# Huge pages for PyTorch's tensors on a CPU (Linux); it reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------

VOCAB_SIZE = 50_304  # GPT-2's 50,257 and 47 unused ids: a multiple of 64 suits the hardware


@dataclass
class Config:
    """Every setting of a run; the defaults are the published experiment."""

    model: str = "gpt2"
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocab_size: int = VOCAB_SIZE
    context_length: int = 1024
    dropout: float = 0.1
    batch_size: int = 32
    epochs: int = 15
    max_steps: int | None = None
    max_tokens: int | None = None
    eval_freq: int = 15
    eval_windows: int = 40
    learning_rate: float = 5e-4
    weight_decay: float = 0.1
    seed: int = 123
    compile: bool = True


# What each --model sets. cpu-demo has GPT-2's form at a size that two CPU cores train in a minute.
# It has no dropout, because PyTorch's flash attention on a CPU has none, and a batch that the
# optimized script can make four times as large, as it does on a GPU.
MODELS = {
    "gpt2": dict(layers=12, heads=12, width=768),
    "gpt2-medium": dict(layers=24, heads=16, width=1024),
    "gpt2-large": dict(layers=36, heads=20, width=1280),
    "gpt2-xl": dict(layers=48, heads=25, width=1600),
    "cpu-demo": dict(
        layers=4, heads=4, width=256, context_length=256, dropout=0.0, batch_size=8,
        eval_windows=16, max_tokens=40_960,
    ),
}

EVAL_BATCH_SIZE = 8
SAMPLE_PROMPT = "Every effort moves you"
SAMPLE_TOKENS = 50


def number(kind: type, low: float, below: float = math.inf):
    """An argparse type: a finite number of `kind`, from `low` on and below `below`."""

    def parse(text: str):
        if not low <= kind(text) < below:
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        return kind(text)

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=__doc__.splitlines()[0], allow_abbrev=False
    )

    def setting(name: str, kind, text: str) -> None:
        default, demo = getattr(Config, name), MODELS["cpu-demo"].get(name)
        text += f" (default: {'no limit' if default is None else default}"
        text += ")" if demo is None else f"; cpu-demo: {demo})"
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N", help=text)

    group = parser.add_argument_group("data and model")
    group.add_argument("--data", default=str(HERE / "data"), metavar="DIR",
                       help="folder of the tokens (default: data/ beside this script)")
    group.add_argument("--model", choices=MODELS,
                       help="default: gpt2 with an NVIDIA GPU, cpu-demo without")
    setting("context_length", number(int, 1), "tokens of a window")
    setting("dropout", number(float, 0, 1), "share of the values zeroed in training")

    group = parser.add_argument_group("training")
    setting("batch_size", number(int, 1), "windows of a step, per process")
    setting("learning_rate", number(float, 0), "AdamW's learning rate")
    setting("weight_decay", number(float, 0), "AdamW's weight decay")
    setting("seed", number(int, 0, 2**63), "seed of weights, dropout and the order of batches")
    group.add_argument("--no-compile", dest="compile", action="store_false", default=None,
                       help="train the model as it is, without torch.compile")

    group = parser.add_argument_group("length (the limit reached first ends the run)")
    setting("epochs", number(int, 1), "passes over the training text")
    setting("max_steps", number(int, 1), "steps")
    setting("max_tokens", number(int, 1), "tokens of all processes together; cpu-demo's default"
            " holds where no length is given")

    group = parser.add_argument_group("measurement")
    setting("eval_freq", number(int, 1), "steps from one log line to the next")
    setting("eval_windows", number(int, 1), "windows of each text that losses are taken on")
    group.add_argument("--device", help="cpu, cuda, cuda:N or mps (default: the fastest there is)")
    group.add_argument("--results-dir", default=str(HERE / "results"), metavar="DIR",
                       help="folder of the record (default: results/ beside this script)")
    group.add_argument("--name", default=Path(__file__).stem,
                       help="name of the stage in the record (default: %(default)s)")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"[\w.-]+", args.name):
        parser.error("argument --name: letters, digits, '.', '_' and '-' only")
    return args


def configure(args: argparse.Namespace, device: torch.device) -> Config:
    """The defaults, over them what the model's name sets, over that what the user gave."""
    model = args.model or ("gpt2" if device.type == "cuda" else "cpu-demo")
    if model != args.model and model == "cpu-demo":
        print("No NVIDIA GPU: this is the small model cpu-demo;"
              f" the full experiment: python {Path(__file__).name} --model gpt2")
    preset = dict(MODELS[model])
    if args.epochs or args.max_steps or args.max_tokens:
        preset.pop("max_tokens", None)
    names = {field.name for field in fields(Config)}
    given = {k: v for k, v in vars(args).items() if k in names and v is not None}
    return Config(**preset | given | {"model": model})


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


class TokenWindows(Dataset):
    """Windows of `context_length` tokens that don't overlap, from a file of uint16 token ids.

    Item i is a pair (x_T, y_T) of int64 tensors, where y is x moved on by one token.
    Raises UserError where the file isn't `tokens` long or holds an id outside the vocabulary.
    """

    def __init__(self, path: Path, tokens: int, vocab_size: int, context_length: int):
        size = path.stat().st_size if path.is_file() else 0
        if size != 2 * tokens or tokens < 2:
            raise UserError(
                f"{path} is damaged: {size} bytes where meta.json says {2 * tokens};"
                " make the tokens again with data/prepare.py"
            )
        self.path, self.vocab_size, self.context_length = path, vocab_size, context_length
        self.tokens = np.memmap(path, dtype="<u2", mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context_length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = i * self.context_length
        window = self.tokens[start : start + self.context_length + 1].astype(np.int64)
        if window.max() >= self.vocab_size:
            raise UserError(
                f"{self.path} is damaged: token {start + window.argmax()} is {window.max()}, and"
                f" the vocabulary has {self.vocab_size}; make it again with data/prepare.py"
            )
        window = torch.from_numpy(window)
        return window[:-1], window[1:]


def prepare_tokens(folder: Path) -> None:
    """Runs data/prepare.py where `folder` holds no tokens. Raises UserError where that fails."""
    if (folder / "meta.json").exists():  # written last, so that it vouches for the rest
        return
    print(f"No tokens in {folder}: running data/prepare.py", flush=True)
    command = [sys.executable, str(HERE / "data" / "prepare.py"), "--out", str(folder)]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"data/prepare.py failed: {reason.removeprefix('error: ')}")


def load_tokens(folder: Path, config: Config) -> tuple[dict, TokenWindows, TokenWindows]:
    """(meta, training windows, validation windows). Raises UserError for damaged or too few."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        counts = [int(meta["tokens"][part]) for part in ("train", "val")]
        vocabulary = int(meta["vocabulary"])
        corpus = {key: meta[key] for key in ("corpus", "tokenizer", "tokens", "sha256")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({error!r})"
        raise UserError(f"{folder / 'meta.json'} is {reason}; make it with data/prepare.py")
    if vocabulary > config.vocab_size:
        raise UserError(f"{folder}: {vocabulary} token ids, the model has {config.vocab_size}")
    train_set, val_set = (
        TokenWindows(folder / f"{part}.bin", count, vocabulary, config.context_length)
        for part, count in zip(("train", "val"), counts, strict=True)
    )
    for part, windows, needed in (
        ("training", train_set, config.batch_size),
        ("validation", val_set, 1),
    ):
        if len(windows) < needed:
            raise UserError(
                f"the text is too short: {len(windows.tokens):,} {part} tokens, but {needed}"
                f" window(s) of context length {config.context_length} need"
                f" {needed * config.context_length + 1:,}; take a longer text,"
                " or lower --context-length or --batch-size"
            )
    return corpus, train_set, val_set


def load_tokenizer(name: str, folder: Path) -> tiktoken.Encoding:
    """The tokenizer that the tokens were made with: "gpt2", or the 256 bytes."""
    if name == "bytes":
        ids = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks=ids, special_tokens={})
    cache = Path(os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(folder / "tiktoken")))
    # tiktoken names files by the SHA-1 of their URL, and fetches missing ones with no time-out.
    for url_sha1 in (
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    ):
        if not (cache / url_sha1).is_file():
            raise UserError(f"GPT-2's tokenizer isn't in {cache}; fetch it with data/prepare.py")
    return tiktoken.get_encoding(name)


# ------------------------------------------------------------------------------------------------
# Model
# ------------------------------------------------------------------------------------------------


class MultiHeadAttention(nn.Module):
    """Causal self-attention (Vaswani et al., arXiv:1706.03762); no bias on query, key and value."""

    def __init__(self, config: Config):
        super().__init__()
        if config.width % config.heads:
            raise UserError(f"width {config.width} can't be divided among {config.heads} heads")
        self.heads, self.head_dim = config.heads, config.width // config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.dropout

    def forward(self, x_BTC):
        B, T, C = x_BTC.shape
        q_BTC, k_BTC, v_BTC = self.query_key_value(x_BTC).chunk(3, dim=-1)
        q_BHTD, k_BHTD, v_BHTD = (
            t.view(B, T, self.heads, self.head_dim).transpose(1, 2) for t in (q_BTC, k_BTC, v_BTC)
        )
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


def attention_backend(config: Config, parameter: torch.Tensor) -> str | None:
    """What computes attention, for the record: PyTorch's choice, None where it doesn't tell."""
    if not hasattr(torch, "_fused_sdp_choice"):
        return None
    shape = (1, config.heads, config.context_length, config.width // config.heads)
    q_BHTD = parameter.new_empty(shape).requires_grad_()
    choice = torch._fused_sdp_choice(
        q_BHTD, q_BHTD, q_BHTD, dropout_p=config.dropout, is_causal=True
    )
    return SDPBackend(choice).name.lower()


class TransformerBlock(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
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
    """GPT-2 with learned positions and an output head of its own (not tied to the embedding)."""

    def __init__(self, config: Config):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*[TransformerBlock(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids_BT):
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTC = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        x_BTC = self.blocks(self.dropout(x_BTC))
        return self.head(self.norm(x_BTC))  # logits_BTV


def build_model(config: Config, device: torch.device) -> nn.Module:
    # Made on the CPU and then moved, so that a seed gives the same weights on every device.
    return GPTModel(config).to(device, torch.bfloat16)


def count_parameters(config: Config) -> tuple[int, int]:
    """(parameters, floating-point operations to train on one token).

    6 operations for each parameter in a matrix product, 2 forward and 4 backward, and
    12 × layers × context × width for attention (PaLM, arXiv:2204.02311, appendix B).
    """
    with torch.device("meta"):
        model = GPTModel(config)
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = 12 * config.layers * config.context_length * config.width
    return sum(p.numel() for p in model.parameters()), 6 * products + attention


# ------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: nn.Module, windows: TokenWindows, count: int, device: torch.device) -> float:
    """Mean loss (nats a token) over the first `count` windows, summed in float64."""
    model.eval()
    loss_sum, tokens = 0.0, 0
    indices = range(min(count, len(windows)))
    for x_BT, y_BT in DataLoader(Subset(windows, indices), batch_size=EVAL_BATCH_SIZE):
        logits_BTV = model(x_BT.to(device))
        # One window at a time: float32 logits of a whole batch would set the peak of memory.
        for logits_TV, y_T in zip(logits_BTV, y_BT.to(device), strict=True):
            losses_T = F.cross_entropy(logits_TV.float(), y_T, reduction="none")
            loss_sum += losses_T.cpu().double().sum().item()
            tokens += y_T.numel()
    model.train()
    return loss_sum / tokens


@torch.no_grad()
def sample(
    model: nn.Module, tokenizer: tiktoken.Encoding, config: Config, device: torch.device
) -> str:
    """The prompt and the 50 tokens that the model finds likeliest, one after the other."""
    model.eval()
    ids_BT = torch.tensor([tokenizer.encode(SAMPLE_PROMPT)], device=device)
    for _ in range(SAMPLE_TOKENS):
        logits_BTV = model(ids_BT[:, -config.context_length :])
        next_B1 = logits_BTV[:, -1, : tokenizer.n_vocab].argmax(dim=-1, keepdim=True)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    model.train()
    return tokenizer.decode(ids_BT[0].tolist())


def train(
    model: nn.Module,
    train_set: TokenWindows,
    val_set: TokenWindows,
    tokenizer: tiktoken.Encoding,
    config: Config,
    device: torch.device,
    run: "Run",
) -> None:
    """Trains `model` in place and reports to `run`. Raises Diverged at a loss that isn't finite."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    order = torch.Generator()  # one of its own, so that every stage sees the same batches
    sampler = RandomSampler(train_set, generator=order)
    pin = device.type == "cuda"  # page-locked host memory, from which a GPU copies by itself
    loader = DataLoader(
        train_set, config.batch_size, sampler=sampler, drop_last=True, pin_memory=pin
    )
    tokens_per_step = config.batch_size * config.context_length
    total_steps = min(
        config.epochs * len(loader),
        config.max_steps or sys.maxsize,
        math.ceil((config.max_tokens or sys.maxsize) / tokens_per_step),
    )
    print(f"{len(loader)} steps an epoch, {total_steps} in all\n")

    compiled_model = torch.compile(model) if config.compile else model
    clock = Clock(device)
    step = 0
    for epoch in range(config.epochs):
        order.manual_seed(config.seed + epoch)
        clock.start()
        for x_BT, y_BT in loader:
            x_BT, y_BT = x_BT.to(device, non_blocking=pin), y_BT.to(device, non_blocking=pin)
            optimizer.zero_grad()
            logits_BTV = compiled_model(x_BT)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
            loss.backward()
            optimizer.step()
            clock.tick()

            step += 1
            end = step == total_steps
            if (step - 1) % config.eval_freq == 0 or step % len(loader) == 0 or end:
                seconds = clock.read()  # from here on the clock stands
                train_loss = evaluate(model, train_set, config.eval_windows, device)
                val_loss = evaluate(model, val_set, config.eval_windows, device)
                run.log(epoch + 1, step - 1, step * tokens_per_step, seconds, train_loss, val_loss)
                clock.start()
            if end:
                break
        run.epoch(epoch + 1, sample(model, tokenizer, config, device))
        if end:
            break


# ------------------------------------------------------------------------------------------------
# Plumbing: clock, record, accidents
# ------------------------------------------------------------------------------------------------


class Clock:
    """Times each training step. The marks on a GPU are events, read only at log lines, so that
    timing makes nothing wait between them."""

    def __init__(self, device: torch.device):
        self.event = {"cuda": torch.cuda.Event, "mps": torch.mps.Event}.get(device.type)

    def start(self) -> None:
        self.marks = []
        self.tick()

    def tick(self) -> None:
        self.marks.append(self.event(enable_timing=True) if self.event else time.perf_counter())
        if self.event:
            self.marks[-1].record()

    def read(self) -> list[float]:
        """Seconds of each step since the start; waits for the device."""
        steps = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.event:
            return [end - start for start, end in steps]
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in steps]


class Run:
    """What a run prints, and its record: one JSON object a line, flushed as it happens, and before
    it is printed, so that a killed run keeps every line one saw."""

    def __init__(self, args, config: Config, corpus: dict, device: torch.device):
        self.config, self.device, self.began = config, device, time.perf_counter()
        self.tokens_per_step = config.batch_size * config.context_length
        self.seconds, self.first_interval = [], 0
        self.average = self.val_loss = self.attention = None
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        stamp = re.sub("[-:]", "", now)
        path = Path(args.results_dir) / f"{args.name}-{device.type}-{stamp}-{os.getpid()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "x", encoding="utf-8")
        except OSError as error:
            raise UserError(f"can't write results to {path.parent}: {error.strerror}")
        machine = environment(device)
        parameters, self.flops_per_token = count_parameters(config)
        self.peak_flops = PEAK_FLOPS.get(machine["gpu"])
        self.write(
            "start", schema=1, stage=args.name, time=now,
            argv=[Path(sys.argv[0]).name, *map(relative, sys.argv[1:])],
            config=asdict(config) | dict(
                parameters=parameters, flops_per_token=self.flops_per_token,
                world_size=1, device=device.type, data=relative(args.data),
            ),
            data=corpus, environment=machine,
            source_sha256=hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        )
        print(f"PyTorch version: {torch.__version__}")
        print(f"Device: {device.type} ({machine['gpu'] or machine['cpu']})")
        print(f"CUDA version: {torch.version.cuda or 'n/a'}")
        print(f"Model: {config.model}, {parameters:,} parameters")
        print(f"Record: {relative(str(path))}")

    def write(self, event: str, **figures) -> None:
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                figures[name] = None  # JSON knows neither NaN nor infinity
        self.file.write(json.dumps({"event": event, **figures}, allow_nan=False) + "\n")
        self.file.flush()

    def log(self, epoch, step, tokens, seconds: list[float], train_loss, val_loss) -> None:
        """Reports the steps since the last line, which took `seconds` each."""
        self.seconds += seconds
        self.first_interval = self.first_interval or len(seconds)
        later = self.seconds[self.first_interval :]  # step 0 is warm-up and compilation
        interval, self.average = self.tok_per_sec(seconds), self.tok_per_sec(later)
        self.val_loss = val_loss
        self.write("log", epoch=epoch, step=step, tokens=tokens, train_loss=train_loss,
                   val_loss=val_loss, step_tok_per_sec=interval, avg_tok_per_sec=self.average,
                   train_seconds=sum(self.seconds))
        print(f"Ep {epoch}, Step {step:06d}, Train: {train_loss:.3f}, Val: {val_loss:.3f}, "
              f"Step tok/sec: {interval:.0f}, Avg tok/sec: {self.average or 0:.0f}", flush=True)
        if not math.isfinite(train_loss + val_loss):
            raise Diverged(f"the loss at step {step} is not finite: lower --learning-rate")

    def tok_per_sec(self, seconds: list[float]) -> float | None:
        return self.tokens_per_step * len(seconds) / sum(seconds) if seconds else None

    def epoch(self, epoch: int, text: str) -> None:
        memory = memory_gb(self.device)
        self.write("epoch", epoch=epoch, **memory, sample=text)
        print("".join(c if c.isprintable() else " " for c in text))
        for kind in ("allocated", "reserved"):
            gb = memory[f"{kind}_gb"]
            print(f"{kind.capitalize()} memory:", "n/a" if gb is None else f"{gb:.4f} GB")
        print(flush=True)

    def end(self, status: str, error: str | None) -> None:
        memory = memory_gb(self.device)
        rates = [self.tok_per_sec([second]) for second in self.seconds[2:]]  # two warm it up
        p25, median, p75 = np.percentile(rates, [25, 50, 75]) if len(rates) >= 3 else [None] * 3
        mfu = None
        if median and self.peak_flops:
            mfu = median * self.flops_per_token / self.peak_flops
        self.write(
            "end", status=status, error=error, avg_tok_per_sec=self.average,
            median_step_tok_per_sec=median, p25_step_tok_per_sec=p25, p75_step_tok_per_sec=p75,
            first_step_seconds=self.seconds[0] if self.seconds else None,
            train_seconds=sum(self.seconds), wall_seconds=time.perf_counter() - self.began,
            reserved_gb=memory["reserved_gb"], peak_reserved_gb=memory["peak_reserved_gb"],
            val_loss=self.val_loss, mfu=mfu, attention_backend=self.attention,
        )
        self.file.close()
        if median:
            print(f"Median step tok/sec: {median:.0f}, MFU: {f'{mfu:.1%}' if mfu else 'n/a'}")


# Dense bf16 products a second by NVIDIA's datasheets, by the name that PyTorch gives the GPU.
PEAK_FLOPS = {
    "NVIDIA A10G": 70e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}


def environment(device: torch.device) -> dict:
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"model name\s*: (.+)", cpuinfo)
    gpu = driver = capability = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
        except (OSError, IndexError):  # no nvidia-smi here, or it knows no driver
            pass
    return dict(
        torch=torch.__version__, python=platform.python_version(),
        os=f"{platform.system()} {platform.machine()}",
        cpu=cpu[1] if cpu else platform.processor() or platform.machine(),
        threads=torch.get_num_threads(), gpu=gpu, driver=driver, capability=capability,
    )


def memory_gb(device: torch.device) -> dict[str, float | None]:
    """GB (1024³ bytes) now and at the peak; on a CPU the resident set; None where nothing tells."""
    figures = [None] * 4
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        figures = [stats.get(f"{kind}_bytes.all.{when}", 0)
                   for when in ("current", "peak") for kind in ("allocated", "reserved")]
    elif device.type == "mps":
        figures[:2] = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    elif Path("/proc/self/status").exists():
        status = Path("/proc/self/status").read_text()
        now, peak = (int(re.search(rf"{k}:\s+(\d+)", status)[1]) for k in ("VmRSS", "VmHWM"))
        figures = [now * 1024, peak * 1024, peak * 1024, peak * 1024]
    names = ("allocated_gb", "reserved_gb", "peak_allocated_gb", "peak_reserved_gb")
    return {k: None if v is None else v / 1024**3 for k, v in zip(names, figures, strict=True)}


def relative(argument: str) -> str:
    """An absolute path, alone or behind "--option=", as seen from the current folder."""
    option, equals, value = argument.rpartition("=")
    try:
        return option + equals + (os.path.relpath(value) if os.path.isabs(value) else value)
    except ValueError:  # on another drive of a Windows machine
        return option + equals + Path(value).name


def pick_device(name: str | None) -> torch.device:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = name or ("cuda" if cuda else "mps" if mps else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UserError(f"unknown device {name!r}: use cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    if device.type == "mps" and not mps:
        raise UserError("no device mps: this machine or this PyTorch has no Metal")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"no device {name}: PyTorch sees {torch.cuda.device_count()} GPU(s)")
        torch.cuda.set_device(device.index or 0)
    return device


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here; where a trial fails, one line says what it needs."""
    try:
        torch.compile(lambda x: 2 * x + 1)(torch.ones(8, device=device))
        return True
    except Exception as error:
        reason = " ".join(str(error).split("\n")[:2])
    needs = "a C++ compiler (README.md tells which), and PyTorch in a path without spaces"
    if device.type == "cuda":
        needs = "Triton, on Windows `pip install triton-windows`"
    print(f"Training without torch.compile: it needs {needs} ({reason})")
    return False


class UserError(Exception):
    """What the user can mend, told in one line."""


class Diverged(Exception):
    """A loss that is NaN or infinite."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. No Exception, so that nothing on its way swallows it."""


def interrupt(signum, frame) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # a second one mustn't cut the end short
        signal.signal(signal_number, signal.SIG_IGN)
    raise Interrupted(signum)


def explain(error: BaseException) -> tuple[str, str, int]:
    """(status of the run, one line for the user, exit code)."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, Interrupted):
        return "interrupted", f"interrupted by signal {error.args[0]}", 128 + error.args[0]
    if isinstance(error, Diverged):
        return "diverged", text, 1
    if isinstance(error, MemoryError | RuntimeError) and re.search(
        "out of memory|can't allocate memory|bad_alloc|could not create a memory|ALLOC_FAILED",
        f"{error!r}",
    ):
        hint = "lower --batch-size or --context-length, or take a smaller --model"
        return "out_of_memory", f"out of memory: {hint} ({text})", 1
    if not isinstance(error, UserError | OSError):
        traceback.print_exception(error)  # a fault of the program, not of its input
        text = f"{type(error).__name__}: {text}"
    return "failed", text, 1


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal can't show
    args = parse_arguments()
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    run, outcome = None, ("complete", None, 0)
    try:
        try:
            device = pick_device(args.device)
            config = configure(args, device)
            prepare_tokens(Path(args.data))
            corpus, train_set, val_set = load_tokens(Path(args.data), config)
            tokenizer = load_tokenizer(corpus["tokenizer"], Path(args.data))
            config.compile = config.compile and can_compile(device)
            run = Run(args, config, corpus, device)
            torch.set_float32_matmul_precision("high")  # TF32 products on tensor cores
            torch.manual_seed(config.seed)
            model = build_model(config, device)
            run.attention = attention_backend(config, next(model.parameters()))
            train(model, train_set, val_set, tokenizer, config, device, run)
        except Exception as error:
            outcome = explain(error)
    except Interrupted as error:  # out here, because it may come while another error is handled
        outcome = explain(error)
    status, message, code = outcome
    if message:
        print(f"error: {message}", file=sys.stderr)
    if run:
        run.end(status, message)
    return code


if __name__ == "__main__":
    sys.exit(main())
