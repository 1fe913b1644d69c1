"""Train GPT-2 124M on a book, and log tokens per second, losses and memory.

    python data/prepare.py    # once: text -> data/train.bin, data/val.bin
    python 00_orig.py         # the full experiment on an NVIDIA GPU, a small one elsewhere
    python 00_orig.py --help  # every setting

00_orig.py writes every part by hand, as one learns it. 01_opt_single_gpu.py is the same program
with every speed technique applied, 02_opt_multi_gpu_ddp.py the same again on many GPUs:

    git diff --no-index 00_orig.py 01_opt_single_gpu.py

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
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

HERE = Path(__file__).resolve().parent

# ---- Configuration -----------------------------------------------------------------------------

def option(default, text: str, low: float | None = None, below: float = math.inf):
    """A setting that the user can give; a number has to be at least `low` and below `below`."""
    return field(default=default, metadata=dict(help=text, low=low, below=below))


@dataclass
class Config:
    """Every setting of a run, by default the published experiment. A setting is declared here,
    and nowhere else; one that is declared as an option() is an option of the command line."""

    model: str = option("gpt2", "size; default: gpt2 with an NVIDIA GPU, cpu-demo without")
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocab_size: int = 50_257  # GPT-2's
    context_length: int = option(1024, "tokens per window", 1)
    dropout: float = option(0.1, "share of the activations zeroed in training", 0, 1)

    batch_size: int = option(8, "windows per step and process", 1)

    learning_rate: float = option(5e-4, "AdamW's learning rate", 0)
    weight_decay: float = option(0.1, "AdamW's weight decay", 0)

    seed: int = option(123, "seed of the weights, dropout and the order of batches", 0, 2**63)
    epochs: int = option(15, "passes over the training text; the first limit ends the run", 1)
    max_steps: int | None = option(None, "steps", 1)
    max_tokens: int | None = option(None, "training tokens of all processes together", 1)
    target_loss: float = option(0.0, "end at a validation loss of so much; default: no limit", 0)
    eval_freq: int = option(15, "steps from one log line to the next", 1)
    eval_windows: int = option(40, "windows of each text that losses are measured on", 1)

    device: str | None = option(None, "cpu, cuda, cuda:N or mps; default: the fastest there is")
    data: str = option(str(HERE / "data"), "folder of the tokens; default: data/ beside this file")
    results_dir: str = option(str(HERE / "results"), "folder of the record; default: results/")
    name: str = option(Path(__file__).stem, "name of the run in its record")


# What each --model sets. cpu-demo has GPT-2's form at a size that two CPU cores train in a minute.
# It has no dropout, because PyTorch's flash attention on a CPU has none, and a batch that the
# optimized script can make four times as large, as it does on a GPU.
MODELS = {
    "gpt2": dict(layers=12, heads=12, width=768),
    "gpt2-medium": dict(layers=24, heads=16, width=1024),
    "gpt2-large": dict(layers=36, heads=20, width=1280),
    "gpt2-xl": dict(layers=48, heads=25, width=1600),
    "cpu-demo": dict(
        layers=4, heads=4, width=256, context_length=256, dropout=0.0, batch_size=2,
        eval_windows=16, max_tokens=40_960,
    ),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The settings that the user gave, and no others. Exits with 2 for a wrong one."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options]", allow_abbrev=False,
                                     description=__doc__.splitlines()[0],
                                     argument_default=argparse.SUPPRESS)
    settings = {setting.name: setting for setting in fields(Config) if setting.metadata}
    for name, setting in settings.items():
        text, demo = setting.metadata["help"], MODELS["cpu-demo"].get(name)
        if "default" not in text:
            text += f" (default: {'no limit' if setting.default is None else setting.default}"
            text += ")" if demo is None else f"; cpu-demo: {demo})"
        how = {"metavar": "TEXT"} if name != "model" else {"choices": MODELS}
        if setting.metadata["low"] is not None:
            how = {"metavar": "N", "type": float if isinstance(setting.default, float) else int}
        parser.add_argument("--" + name.replace("_", "-"), help=text, **how)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        low, below = settings[name].metadata["low"], settings[name].metadata["below"]
        if low is not None and not low <= value < below:
            parser.error(f"argument --{name.replace('_', '-')}: {value} is out of range")
    return args


def configure(args: argparse.Namespace, device: torch.device) -> Config:
    """The defaults, over them what the model's name sets, over that what the user gave."""
    given = vars(args)
    model = given.get("model", "gpt2" if device.type == "cuda" else "cpu-demo")
    if "model" not in given and model == "cpu-demo":
        print("No NVIDIA GPU: this is the small model cpu-demo;"
              f" the full experiment: python {Path(__file__).name} --model gpt2")
    preset = dict(MODELS[model])
    if given.keys() & {"epochs", "max_steps", "max_tokens"}:
        preset.pop("max_tokens", None)  # the user has said how long
    return Config(**preset | given | {"model": model, "device": device.type})


# ---- Data --------------------------------------------------------------------------------------


class TokenWindows(Dataset):
    """Windows of tokens that don't overlap. Item i is a pair (x_T, y_T) of int64 tensors, where
    y_T is x_T moved on by one token."""

    def __init__(self, tokens: np.ndarray, context_length: int):
        self.tokens, self.context_length = tokens, context_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context_length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = i * self.context_length
        window = self.tokens[start : start + self.context_length + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def load_tokens(folder: Path, config: Config) -> tuple[dict, TokenWindows, TokenWindows]:
    """What meta.json says of the text, the training windows and the validation windows.

    Raises UserError for files that are missing or damaged, and for a text that is too short.
    """
    try:  # data/prepare.py writes meta.json last, which marks the data complete
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        counts = [int(meta["tokens"][part]) for part in ("train", "val")]
        if meta["tokenizer"] not in ("gpt2", "bytes"):
            raise ValueError("unknown tokenizer")
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = "no tokens" if isinstance(error, FileNotFoundError) else f"damaged ({error!r})"
        raise UserError(f"{folder / 'meta.json'}: {reason}; run `python data/prepare.py`")
    windows = []
    for part, count, needed in zip(("train", "val"), counts, (config.batch_size, 1), strict=True):
        path = folder / f"{part}.bin"
        whole = path.is_file() and path.stat().st_size == 2 * count > 0
        tokens = np.memmap(path, "<u2", "r") if whole else None
        if not whole or tokens.max() >= config.vocab_size:
            raise UserError(f"{path} is missing or damaged; run `python data/prepare.py`")
        windows.append(TokenWindows(tokens, config.context_length))
        if len(windows[-1]) < needed:
            raise UserError(f"the text is too short: {part}.bin has {count:,} tokens, {needed}"
                            f" window(s) of context length {config.context_length} need"
                            f" {needed * config.context_length + 1:,}; use a longer text,"
                            " or lower --context-length or --batch-size")
    return meta, *windows


def load_tokenizer(name: str, folder: Path) -> tiktoken.Encoding:
    """The tokenizer that the tokens were made with: "gpt2", or the 256 bytes."""
    if name == "bytes":
        ids = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks=ids, special_tokens={})
    cache = Path(os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(folder / "tiktoken")))
    # tiktoken names files by the SHA-1 of their URL, and fetches missing ones with no time-out.
    files = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
    if not all((cache / file).is_file() for file in files):
        raise UserError(f"GPT-2's tokenizer isn't in {cache}: fetch it with data/prepare.py")
    return tiktoken.get_encoding(name)


def make_loader(windows: TokenWindows, config: Config, device: torch.device) -> DataLoader:
    """Batches of an epoch. Its order comes from a generator of its own, which the loop seeds, so
    that every stage sees the same batches."""
    sampler = RandomSampler(windows, generator=torch.Generator())
    return DataLoader(windows, config.batch_size, sampler=sampler, drop_last=True)


# ---- Model -------------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTC):
        mean = x_BTC.mean(dim=-1, keepdim=True)
        var = x_BTC.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * (x_BTC - mean) / torch.sqrt(var + self.eps) + self.bias


class GELU(nn.Module):
    """The tanh approximation that GPT-2 uses (Hendrycks and Gimpel, arXiv:1606.08415)."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class MultiHeadAttention(nn.Module):
    """Causal self-attention (Vaswani et al., arXiv:1706.03762); no bias on query, key and value."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        ones_TT = torch.ones(config.context_length, config.context_length)
        self.register_buffer("mask_TT", torch.triu(ones_TT, diagonal=1), persistent=False)

    def forward(self, x_BTC):
        B, T, C = x_BTC.shape
        q_BTC, k_BTC, v_BTC = self.query(x_BTC), self.key(x_BTC), self.value(x_BTC)
        q_BHTD, k_BHTD, v_BHTD = (
            t.view(B, T, self.heads, self.head_dim).transpose(1, 2) for t in (q_BTC, k_BTC, v_BTC)
        )
        scores_BHTT = q_BHTD @ k_BHTD.transpose(2, 3) / self.head_dim**0.5
        future_TT = self.mask_TT.bool()[:T, :T]
        scores_BHTT = scores_BHTT.masked_fill(future_TT, -torch.inf)
        weights_BHTT = self.dropout(torch.softmax(scores_BHTT, dim=-1))
        y_BHTD = weights_BHTT @ v_BHTD
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


class TransformerBlock(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1 = LayerNorm(config.width)
        self.attention = MultiHeadAttention(config)
        self.norm2 = LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            GELU(),
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
        self.norm = LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids_BT):
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTC = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        x_BTC = self.blocks(self.dropout(x_BTC))
        return self.head(self.norm(x_BTC))  # logits_BTV


def prepare_model(model: GPTModel, config: Config, device: torch.device) -> nn.Module:
    """Moves `model` to the device, in place, and returns what a training step calls."""
    model.to(device)
    return model


def count_parameters(model: nn.Module, config: Config) -> tuple[int, int]:
    """(parameters, floating-point operations to train on one token).

    6 operations for each parameter in a matrix product, 2 forward and 4 backward, and
    12 × layers × context × width for attention (PaLM, arXiv:2204.02311, appendix B).
    """
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = 12 * config.layers * config.context_length * config.width
    return sum(p.numel() for p in model.parameters()), 6 * products + attention


# ---- Training ----------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )


def compute_loss(model: nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats per token."""
    logits_BTV = model(x_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())


def backward_and_update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()


def train(model, training_model, train_set, val_set, tokenizer, config, device, run) -> None:
    """Trains `model` in place and reports to `run`. Raises Diverged at a loss that isn't finite."""
    optimizer = make_optimizer(model, config)
    loader = make_loader(train_set, config, device)
    tokens_per_step = config.batch_size * config.context_length
    total_steps = min(
        config.epochs * len(loader),
        config.max_steps or sys.maxsize,
        math.ceil((config.max_tokens or sys.maxsize) / tokens_per_step),
    )
    print(f"{len(loader)} steps per epoch, {total_steps} in all\n")

    clock = Clock(device)
    step, done = 0, False
    for epoch in range(config.epochs):
        loader.sampler.generator.manual_seed(config.seed + epoch)
        clock.start()
        for x_BT, y_BT in loader:
            x_BT, y_BT = x_BT.to(device), y_BT.to(device)

            optimizer.zero_grad()
            loss = compute_loss(training_model, x_BT, y_BT)
            backward_and_update(loss, optimizer)
            clock.tick()

            step += 1
            done = step == total_steps
            if (step - 1) % config.eval_freq == 0 or step % len(loader) == 0 or done:
                seconds = clock.stop()  # evaluation isn't timed
                train_loss = evaluate(model, train_set, config, device)
                val_loss = evaluate(model, val_set, config, device)
                run.log(epoch + 1, step - 1, step * tokens_per_step, seconds, train_loss, val_loss)
                done = done or val_loss <= config.target_loss
                clock.start()
            if done:
                break
        run.epoch(epoch + 1, sample(model, tokenizer, config, device))  # not timed either
        if done:
            break


@torch.no_grad()
def evaluate(model: nn.Module, windows: TokenWindows, config: Config, device) -> float:
    """Mean loss (nats per token) over the first `eval_windows` windows, summed in float64."""
    model.eval()
    loss_sum, tokens = 0.0, 0
    first = Subset(windows, range(min(config.eval_windows, len(windows))))
    for x_BT, y_BT in DataLoader(first, min(8, config.batch_size)):
        logits_BTV = model(x_BT.to(device))
        # Small batches, and one window at a time: evaluation must not set the peak of memory.
        for logits_TV, y_T in zip(logits_BTV, y_BT.to(device), strict=True):
            losses_T = F.cross_entropy(logits_TV.float(), y_T, reduction="none").cpu()
            loss_sum += losses_T.double().sum().item()
            tokens += y_T.numel()
    model.train()
    return loss_sum / tokens


@torch.no_grad()
def sample(model: nn.Module, tokenizer: tiktoken.Encoding, config: Config, device) -> str:
    """A prompt and the 50 tokens that the model finds likeliest, one after the other."""
    model.eval()
    ids_BT = torch.tensor([tokenizer.encode("Every effort moves you")], device=device)
    for _ in range(50):
        logits_BTV = model(ids_BT[:, -config.context_length :])
        next_B1 = logits_BTV[:, -1, : tokenizer.n_vocab].argmax(dim=-1, keepdim=True)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    model.train()
    return tokenizer.decode(ids_BT[0].tolist())


# ---- Plumbing: clock, record, errors -----------------------------------------------------------


class Clock:
    """Times each training step. On a GPU it records events, which it reads only when it is
    stopped, so that timing makes nothing wait."""

    def __init__(self, device: torch.device):
        self.event = {"cuda": torch.cuda.Event, "mps": torch.mps.Event}.get(device.type)

    def start(self) -> None:
        self.marks = []
        self.tick()

    def tick(self) -> None:
        self.marks.append(self.event(enable_timing=True) if self.event else time.perf_counter())
        if self.event:
            self.marks[-1].record()

    def stop(self) -> list[float]:
        """Seconds of each step since the start; waits for the device."""
        steps = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.event:
            return [end - start for start, end in steps]
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in steps]


class Run:
    """What a run prints, and its record: one JSON object per line, flushed as it happens, and
    before it is printed, so that a killed run keeps every line that was seen."""

    def __init__(self, config: Config, meta: dict, model: nn.Module, device: torch.device):
        self.device, self.start_time = device, time.perf_counter()
        self.tokens_per_step = config.batch_size * config.context_length
        self.seconds = []
        self.average, self.val_loss = None, None
        self.attention = "manual"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        stamp = re.sub("[-:]", "", now)
        path = Path(config.results_dir, f"{config.name}-{device.type}-{stamp}-{os.getpid()}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "x", encoding="utf-8")
        machine, counts = environment(device), count_parameters(model, config)
        settings = asdict(config) | dict(
            parameters=counts[0], flops_per_token=counts[1], world_size=1,
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            matmul_precision=torch.get_float32_matmul_precision(),
        )
        del settings["data"], settings["results_dir"]  # paths of this machine
        source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        self.write("start", schema=1, stage=config.name, time=now, config=settings, data=meta,
                   environment=machine, source_sha256=source)
        print(f"PyTorch version: {torch.__version__}")
        print(f"Device: {device.type} ({machine['gpu'] or machine['cpu']})")
        print(f"CUDA version: {torch.version.cuda or 'n/a'}")
        print(f"Model: {config.model}, {counts[0]:,} parameters")
        print(f"Record: {path}")

    def write(self, event: str, **figures) -> None:
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                figures[name] = None  # JSON knows neither NaN nor infinity
        self.file.write(json.dumps({"event": event, **figures}, allow_nan=False) + "\n")
        self.file.flush()

    def log(self, epoch, step, tokens, seconds: list[float], train_loss, val_loss) -> None:
        """Reports the steps since the last line, which took `seconds` each."""
        self.seconds += seconds
        interval = self.tok_per_sec(seconds)
        self.average = self.tok_per_sec(self.seconds[1:])  # step 0 is warm-up and compilation
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
        rates = [self.tok_per_sec([second]) for second in self.seconds[2:]]  # two for warm-up
        p25, median, p75 = np.percentile(rates, [25, 50, 75]) if len(rates) >= 3 else [None] * 3
        self.write(
            "end", status=status, error=error, avg_tok_per_sec=self.average,
            median_step_tok_per_sec=median, p25_step_tok_per_sec=p25, p75_step_tok_per_sec=p75,
            first_step_seconds=self.seconds[0] if self.seconds else None,
            train_seconds=sum(self.seconds), wall_seconds=time.perf_counter() - self.start_time,
            reserved_gb=memory["reserved_gb"], peak_reserved_gb=memory["peak_reserved_gb"],
            val_loss=self.val_loss, attention_backend=self.attention,
        )
        self.file.close()
        if median:
            print(f"Median step tok/sec: {median:.0f}")


def environment(device: torch.device) -> dict:
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"model name\s*: (.+)", cpuinfo)
    return dict(
        torch=torch.__version__, python=platform.python_version(), threads=torch.get_num_threads(),
        os=f"{platform.system()} {platform.machine()}",
        cpu=cpu[1] if cpu else platform.processor() or platform.machine(),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    )


def memory_gb(device: torch.device) -> dict[str, float | None]:
    """GB (1024³ bytes) now and at the peak; on a CPU the resident set; None where it is unknown."""
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
        figures = [1024 * kib for kib in (now, peak, peak, peak)]  # the peak stands for reserved
    names = "allocated_gb", "reserved_gb", "peak_allocated_gb", "peak_reserved_gb"
    return {k: v and v / 1024**3 for k, v in zip(names, figures, strict=True)}


def pick_device(name: str | None) -> torch.device:
    """The device `name`, or the fastest there is. Raises UserError where it doesn't work."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = name or ("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # by PyTorch's build
        raise UserError(f"no device {name}: " + re.split(r"\n|\. ", str(error))[0])
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device


class UserError(Exception):
    """An error that the user can fix, printed as one line."""


class Diverged(UserError):
    status = "diverged"  # the loss is NaN or infinite


def interrupt(number, frame) -> None:
    """Ctrl-C and SIGTERM end a run in the same way; a second one can't cut the end short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def explain(error: BaseException) -> tuple[str, str, int]:
    """(status of the run, one line for the user, exit code)."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"interrupted by signal {text}", 128 + error.args[0]
    memory = "out of memory|MemoryError|ALLOC_FAILED|bad_alloc|allocate memory|create a memory"
    if re.search(memory, repr(error)):
        hint = "lower --batch-size or --context-length, or use a smaller --model"
        return "out_of_memory", f"out of memory: {hint} ({text})", 1
    if not isinstance(error, UserError | OSError):
        traceback.print_exception(error)  # an error of the program, not of its input
        text = f"{type(error).__name__}: {text}"
    return getattr(error, "status", "failed"), text, 1


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal can't show
    args = parse_arguments()
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    run, (status, message, code) = None, ("complete", None, 0)
    try:
        device = pick_device(getattr(args, "device", None))
        config = configure(args, device)
        meta, train_set, val_set = load_tokens(Path(config.data), config)
        tokenizer = load_tokenizer(meta["tokenizer"], Path(config.data))
        torch.manual_seed(config.seed)
        model = GPTModel(config)  # on the CPU, so that a seed gives the same weights everywhere
        training_model = prepare_model(model, config, device)
        run = Run(config, meta, model, device)
        train(model, training_model, train_set, val_set, tokenizer, config, device, run)
    except (Exception, KeyboardInterrupt) as error:
        status, message, code = explain(error)
    if message:
        print(f"error: {message}", file=sys.stderr)
    if run:
        run.end(status, message)
    return code


if __name__ == "__main__":
    sys.exit(main())
