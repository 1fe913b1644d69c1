"""Small training scripts, each with something that an audit has to see: audit_toys.py NAME"""

import contextlib
import math
import os
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

B, T, C, H, V = 2, 16, 32, 4, 1001


class Net(nn.Module):
    """A language model of one block, whose parts a toy may replace."""

    def __init__(self, attention=None, norm=None, activation=None, vocabulary=V, tied=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, C), nn.Embedding(4 * V, C)
        self.norm, self.attention = norm or nn.LayerNorm(C), attention or Fast()
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.activation = activation or nn.GELU()
        self.head = nn.Linear(C, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def hidden(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x + self.attention(self.norm(x))
        return x + self.down(self.activation(self.up(x)))

    def forward(self, ids, targets=None):
        logits = self.head(self.hidden(ids))
        return logits if targets is None else loss_of(logits, targets)


def heads(x):
    return x.view(x.shape[0], x.shape[1], H, -1).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


class Fast(nn.Module):
    """Query, key and value from one matmul; PyTorch's attention."""

    def __init__(self):
        super().__init__()
        self.merged = nn.Linear(C, 3 * C)

    def forward(self, x):
        q, k, v = map(heads, self.merged(x).chunk(3, -1))
        return joined(self.attend(q, k, v))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Dropping(Fast):
    """With dropout, for which PyTorch has no kernel on CPUs."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


class StoredMask(Fast):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 64).tril()[None, None])

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[0, 0, :T, :T] == 1)


class ByHand(StoredMask):
    """As minGPT has it."""

    def attend(self, q, k, v):
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(C / H)
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        return F.softmax(scores, -1) @ v


class MaskedTwice(StoredMask):
    """As GPT-2 had it: the mask multiplies scores, and is subtracted."""

    def attend(self, q, k, v):
        mask = self.mask[:, :, :T, :T]
        return F.softmax(q @ k.transpose(-2, -1) * mask - 1e10 * (1 - mask), -1) @ v


class Assigned(StoredMask):
    """A mask that chooses where scores are assigned."""

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1)
        scores[:, :, self.mask[0, 0, :T, :T] == 0] = float("-inf")
        return F.softmax(scores, -1) @ v


class Lower(Fast):
    def attend(self, q, k, v):
        scores = (q @ k.transpose(-2, -1)).tril()
        return F.softmax(scores.masked_fill(scores == 0, float("-inf")), -1) @ v


class Indexed(StoredMask):
    """The part of a stored mask that integers choose."""

    def attend(self, q, k, v):
        places = torch.arange(T)
        mask = self.mask[0, 0, places][:, places] == 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Capped(StoredMask):
    """As Gemma 2 has it."""

    def attend(self, q, k, v):
        scores = 30 * torch.tanh(q @ k.transpose(-2, -1) / 30)
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        return F.softmax(scores, -1) @ v


class Signed(Fast):
    """Weights with the sign of their scores."""

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        return (F.softmax(scores.abs().masked_fill(hidden, -1e9), -1) * scores.sign()) @ v


class Gated(Fast):
    """Weights that a parameter of each head and place multiplies."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(H, T, T))

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        return (F.softmax(scores.masked_fill(hidden, -1e9), -1) * self.gate) @ v


class Talking(StoredMask):
    """Heads mixed before the softmax by a product, after it by a convolution."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Parameter(torch.eye(H)), nn.Conv2d(H, H, 1)

    def attend(self, q, k, v):
        scores = torch.einsum("bhts,hg->bgts", q @ k.transpose(-2, -1), self.before)
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        return self.after(F.softmax(scores, -1)) @ v


class Twice(Fast):
    """Weights times themselves."""

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(hidden, -1e9), -1)
        return weights @ weights @ v


class Scaled(ByHand):
    """All that PyTorch's attention knows, too: a scale, a bias, a mask, dropout."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(H, 1, 1)), nn.Parameter(torch.ones(H, T, T))

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1) * self.scale + self.bias
        scores = torch.where(self.mask[:, :, :T, :T] == 0, -1e9, scores)
        return F.dropout(F.softmax(scores, -1, dtype=torch.float32).type_as(v), 0.1) @ v


class Exponentials(Fast):
    """A softmax of single operators, and a mask that is made in the step and added."""

    def attend(self, q, k, v):
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / 3 + torch.full((T, T), -1e9).triu(1)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return torch.einsum("bhts,bhsd->bhtd", weights / weights.sum(-1, keepdim=True), v)


class Relative(Fast):
    """As Transformer-XL has it: learned scores of positions are added, and the mask, which is made
    in the step, takes its type and device from activations."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(C // H, T))

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1) + q @ self.places
        return F.softmax(scores.masked_fill(self.hidden(q), -1e9), -1) @ v

    def hidden(self, q):
        return q.new_ones(T, T).triu(1).bool()


class RelativeOnly(Relative):
    """Without a mask."""

    def hidden(self, q):
        return torch.zeros((), dtype=torch.bool)


class BiasAndMask(Fast):
    """As T5's decoder has it: the mask is added to a learned bias, which is added to scores."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(2 * T, H)
        places = torch.arange(T)
        self.register_buffer("distances", places[:, None] - places + T)
        self.register_buffer("mask", torch.full((T, T), -1e9).triu(1))

    def attend(self, q, k, v):
        bias = self.bias(self.distances).permute(2, 0, 1) + self.mask
        return F.softmax(q @ k.transpose(-2, -1) + bias, -1) @ v


class Apart(Fast):
    """Three matmuls, with rotated queries and keys."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        angle = torch.arange(T)[:, None] * torch.ones(C // H)

        def turned(x):
            one, other = x.chunk(2, -1)
            return x * angle.cos() + torch.cat([-other, one], -1) * angle.sin()

        return joined(self.attend(turned(q), turned(k), v))


class QueryApart(Fast):
    """Two matmuls of one input."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(C, C), nn.Linear(C, 2 * C)

    def forward(self, x):
        return joined(self.attend(*map(heads, (self.q(x), *self.kv(x).chunk(2, -1)))))


class Cross(Apart):
    def forward(self, x):
        q, k, v = self.q(x.flip(1) * 2), self.k(x), self.v(x)
        return joined(F.scaled_dot_product_attention(*map(heads, (q, k, v))))


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(C, H, batch_first=True)

    def forward(self, x):
        return self.own(x, x, x)[0]


class MaskedMultihead(Multihead):
    """Adds a stored mask in one operator with the product of queries and keys."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((T, T), -1e9).triu(1))

    def forward(self, x):
        return self.own(x, x, x, attn_mask=self.mask, need_weights=True)[0]


class Linear(Apart):
    """Keys are normalized over the tokens, and multiplied by the values first."""

    def attend(self, q, k, v):
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class Deep(nn.Module):
    """Two layers by hand, as BERT-pytorch has them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(C, C) for _ in range(3)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            q, k, v = (part(x).unflatten(-1, (-1, T)).transpose(1, 2) for part in layer)
            x = x + joined(F.softmax(q @ k.mT, -1) @ v)
        return x


class Norm(nn.Module):
    """Divides by the standard deviation or the mean square, or is PyTorch's RMSNorm."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(C))

    def forward(self, x):
        if self.how == "std":
            return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)
        if self.how == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        if self.how == "normalize":
            return F.normalize(x, dim=-1) * C**0.5 * self.weight
        return F.rms_norm(x, (C,), self.weight)


class Cubed(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.0447 * x * x * x)))


def batch():
    ids = torch.randint(0, V, (B, T + 1))
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model, step=None, steps=4, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (step or model)(*batch())
        loss.backward()
        optimizer.step()


def fixed(model):
    """On a batch that is older than the step."""
    pair = batch()
    train(model, lambda *_: model(*pair))


def lives():
    """Tensors that their sizes tell apart; one of each step lives until the next."""
    model, kept = nn.Linear(10, 100, bias=False), None

    def step(*_):
        nonlocal kept
        kept = torch.zeros(11)
        return model(torch.ones(7, 10)).t()[::2].t().sum()

    train(model, step, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))


def matmul():
    """Of a number, without which a step is none."""
    return (torch.ones(1, 1) @ torch.ones(1, 1)).sum()


def exp_sum(weight):
    return weight.exp().sum()


def known(foreach=None):
    """Tensors of 12 MiB, which have segments of their own."""
    weights = [nn.Parameter(torch.ones(3 * 2**20)) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, foreach=foreach)
    train(None, lambda *_: matmul() + sum(map(exp_sum, weights)), optimizer=optimizer)


def known_norm():
    """A tensor of 12 MiB, and its norm."""
    weight = nn.Parameter(torch.ones(1024, 3072))
    optimizer = torch.optim.SGD([weight])
    train(None, lambda *_: matmul() + F.rms_norm(weight, (3072,)).sum(), optimizer=optimizer)


def known_loss():
    """Of logits in 16 bits under autocast, which take 24 MiB."""
    weight = nn.Parameter(torch.ones(1024, 12 * 1024))
    targets = torch.zeros(1024, dtype=torch.int64)

    def step(*_):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(weight.bfloat16(), targets)
        return matmul() + loss

    train(None, step, optimizer=torch.optim.SGD([weight]))


def kept_result():
    """Of 12 MiB, which lives until the next step makes it anew, as `logits` of many scripts do."""
    weight, result = nn.Parameter(torch.ones(3 * 2**20)), None

    def step(*_):
        nonlocal result
        result = weight * 2
        return matmul() + result.sum()

    train(None, step, optimizer=torch.optim.SGD([weight]))


def soft_scores():
    """By hand, under autocast."""
    model = Net(ByHand())

    def step(*pair):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*pair)

    train(model, step)


def attention_again():
    """Which a checkpoint computes twice."""
    from torch.utils.checkpoint import checkpoint

    model = Net(Dropping())
    train(
        model,
        lambda ids, targets: loss_of(
            model.head(checkpoint(model.hidden, ids, use_reentrant=False)), targets
        ),
    )


class Recurrent(nn.Module):
    """In place of attention."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(C, C, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0]


def sized():
    """A model whose batch size is an option."""
    size, model = int(sys.argv[-1]), Net()
    train(model, lambda *_: model(*(ids.repeat(size, 1) for ids in batch())))


def of(**parts):
    return lambda: train(Net(**{name: part() for name, part in parts.items()}))


def closure():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(32, 8), torch.randn(32, 1)

    def loss():
        optimizer.zero_grad()
        value = F.mse_loss(model(x), y)
        value.backward()
        return value

    for _ in range(4):
        optimizer.step(loss)


def gan():
    """The generator is updated half as often."""
    make, judge = nn.Sequential(nn.Linear(8, 64), nn.Tanh()), nn.Linear(64, 1)
    makes, judges = torch.optim.Adam(make.parameters()), torch.optim.Adam(judge.parameters())
    for _ in range(4):
        for _ in range(2):
            judges.zero_grad()
            fake = make(torch.randn(16, 8)).detach()
            (judge(fake).mean() - judge(torch.randn(16, 64)).mean()).backward()
            judges.step()
        makes.zero_grad()
        (-judge(make(torch.randn(16, 8))).mean()).backward()
        makes.step()


def updates_by_hand():
    model = Net()
    for _ in range(4):
        model(*batch()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()


def accumulated():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    for _ in range(4):
        for _ in range(3):
            model(*batch()).backward()
        print(model.up.weight.sum().item())
        optimizer.step()
        optimizer.zero_grad()


def evaluated():
    """An evaluation by other means within each step."""
    model, plain = Net(), Net(ByHand(), Norm("std"), Cubed())

    def step(*pair):
        with torch.no_grad():
            plain(*pair)
        return model(*pair)

    train(model, step, optimizer=torch.optim.AdamW(model.parameters(), fused=True))


def autocast():
    model = Net()

    def step(ids, targets):
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, targets)

    train(model, step)


def compiled_model():
    model = Net()
    compiled = torch.compile(model)
    train(model, lambda ids, targets: loss_of(compiled(ids), targets))


def compiled_step():
    """Model, loss and update in compiled functions."""
    model = Net(norm=Norm("rms"))
    optimizer = torch.optim.AdamW(model.parameters())
    loss, update = torch.compile(model), torch.compile(optimizer.step)
    for _ in range(4):
        optimizer.zero_grad()
        loss(*batch()).backward()
        update()


def broken_graph():
    model = Net()

    @torch.compile(backend="aot_eager")
    def step(ids, targets):
        logits = model(ids)
        print("a break")
        return loss_of(logits, targets)

    train(model, step)


def compiled_in_part():
    model = Net()
    model.up.compile()
    train(model)


def plain_when_scripted(x: torch.Tensor):
    if not torch.compiler.is_compiling():
        return x + 0
    return x


def scripted():
    """TorchScript asks whether a compiler runs, as PyTorch's distributed optimizers do."""
    model, plain = Net(), torch.jit.script(plain_when_scripted)
    train(model, lambda ids, targets: loss_of(plain(model(ids)), targets))


def square(attention=ByHand):
    """As many texts as tokens in each, so that activations have the sizes of scores."""
    model = Net(attention())
    train(model, lambda *_: model(*(torch.randint(0, V, (T, T)) for _ in range(2))))


def large():
    """More tokens than a chunk has."""
    model = Net()
    train(model, lambda *_: model(*(torch.randint(0, V, (80, T)) for _ in range(2))))


def large_autocast():
    model = Net()

    def step(*_):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*(torch.randint(0, V, (80, T)) for _ in range(2)))

    train(model, step)


def square_heads():
    """Heads as wide as a text is long, too."""
    square(Deep)


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    model = Net(ByHand())
    train(
        model,
        lambda ids, targets: loss_of(
            model.head(checkpoint(model.hidden, ids, use_reentrant=False)), targets
        ),
    )


class Dropped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.GELU(), nn.Dropout(0.1))


def forgetful(use_reentrant=False, preserve_rng_state=False):
    """Dropout whose masks aren't those of the forward pass when it is computed again."""
    from torch.utils.checkpoint import checkpoint

    model = Net(activation=Dropped())
    how = dict(use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)

    def step(ids, targets):
        x = model.norm(model.tokens(ids))
        return loss_of(model.head(checkpoint(model.activation, x, **how)), targets)

    train(model, step)


def forgetful_reentrant():
    forgetful(use_reentrant=True)


def remembering():
    forgetful(preserve_rng_state=True)


def memory_budget():
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = 0.5
    train(torch.compile(Net(activation=Dropped())))


@torch.jit.script
def scripted_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class ScriptedAttention(Fast):
    def attend(self, q, k, v):
        return scripted_attention(q, k, v)


class TiledLoss(torch.autograd.Function):
    """Head and loss of some tokens at a time, whose gradients are made in the forward pass."""

    @staticmethod
    def forward(context, x, weight, targets):
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = loss_of(x @ weight.T, targets)
        context.gradients = torch.autograd.grad(loss, (x, weight))
        return loss.detach()

    @staticmethod
    def backward(context, gradient):
        return *(gradient * one for one in context.gradients), None


def tiled_head():
    model = Net()
    train(
        model,
        lambda ids, targets: TiledLoss.apply(model.hidden(ids), model.head.weight, targets),
    )


def tiles():
    """As TRL and DeepSpeed have it."""
    model = Net(norm=Norm("rms"))

    def step(ids, targets):
        pairs = zip(model.hidden(ids).chunk(2), targets.chunk(2), strict=True)
        return sum(TiledLoss.apply(x, model.head.weight, target) for x, target in pairs)

    train(model, step)


class Labelled(nn.Module):
    """An image's patches with the embedding of its class, as fast-DiT has it."""

    def __init__(self):
        super().__init__()
        self.patches, self.labels, self.norm = nn.Linear(C, C), nn.Embedding(V, C), nn.LayerNorm(C)
        self.attention, self.last = Fast(), nn.Linear(C, C)

    def forward(self, patches, labels):
        x = self.patches(patches) + self.labels(labels)[:, None]
        return self.last(x + self.attention(self.norm(x)))


def labels():
    """Those that a model is given."""
    model = Labelled()
    x = torch.randn(B, T, C)
    train(model, lambda *_: F.mse_loss(model(x, torch.randint(0, V, (B,))), x))


def uneven_labels():
    """Those that it is to find, in micro-batches of unequal size."""
    model = nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, V))
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    for _ in range(4):
        for size in (4, 12):
            x, targets = torch.randn(size, C), torch.randint(0, V, (size,))
            (F.cross_entropy(model(x), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def packed():
    """A row of tokens, without a dimension for the batch."""
    model = Net()

    def step(ids, targets):
        x = model.tokens(ids[0])[None]
        return loss_of(model.head(x + model.attention(model.norm(x))), targets[:1])

    train(model, step)


def chunks():
    model = Net()

    def step(ids, targets):
        hidden = model.hidden(ids) + model.tokens(ids.flip(1))  # as T5 looks up two texts
        return sum(
            loss_of(model.head(one), other)
            for one, other in zip(hidden.chunk(2), targets.chunk(2), strict=True)
        )

    train(model, step)


def several_heads():
    """Each predicts another token, from all of the hidden states."""
    model = Net()
    model.others = nn.ModuleList(nn.Linear(C, V) for _ in range(3))

    def step(ids, targets):
        hidden = model.hidden(ids)
        return sum(loss_of(head(hidden), targets) for head in (model.head, *model.others))

    train(model, step)


def head_twice():
    """One head for two losses, each over all tokens, which are looked up twice."""
    model = Net()
    train(model, lambda ids, targets: model(ids, targets) + model(targets, ids))


def sampled():
    """As SASRec has it: an item's score is a product with its row of the table, and a loss compares
    that of the right one with that of another one."""
    model = Net()

    def step(ids, targets):
        hidden, others = model.hidden(ids), torch.randint(0, V, (B, T))
        right, wrong = ((hidden * model.tokens(items)).sum(-1) for items in (targets, others))
        return F.softplus(wrong - right).mean()

    train(model, step)


def adaptive():
    """A head of several matmuls, none of which is as wide as the vocabulary."""
    model = Net()
    model.loss = nn.AdaptiveLogSoftmaxWithLoss(C, V, [100])
    train(
        model,
        lambda ids, targets: model.loss(model.hidden(ids).flatten(0, 1), targets.flatten()).loss,
    )


class HiddenLoss(torch.autograd.Function):
    """Head and loss in a kernel that PyTorch doesn't see."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return torch.tensor(float((x.detach().numpy() @ weight.detach().numpy().T).mean()))

    @staticmethod
    def backward(context, gradient):
        return (*(gradient * torch.ones_like(tensor) for tensor in context.saved_tensors),)


def hidden_head():
    model = Net()
    train(model, lambda ids, targets: HiddenLoss.apply(model.hidden(ids), model.head.weight))


class Memory(nn.Module):
    """Rows that a softmax chooses, read by a matmul and written by outer products, as in a neural
    Turing machine."""

    def __init__(self):
        super().__init__()
        self.heads, self.last = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.register_buffer("begin", torch.randn(B, 8, C))

    def forward(self, x):
        memory = self.begin
        for one in x.unbind(1):
            key, erase, add = self.heads(one).chunk(3, -1)
            weights = F.softmax(F.cosine_similarity(memory, key[:, None], dim=-1), -1)
            erased = weights[:, :, None] @ erase.sigmoid()[:, None]
            memory = memory * (1 - erased) + weights[:, :, None] @ add[:, None]
        return self.last(weights[:, None] @ memory)


def written_memory():
    model = Memory()
    train(model, lambda *_: model(torch.randn(B, 3, C)).square().mean())


def distributed():
    """Each micro-batch reduces gradients. Under torchrun with its ranks, else alone."""
    alone = (
        {}
        if "RANK" in os.environ
        else dict(store=torch.distributed.HashStore(), rank=0, world_size=1)
    )
    torch.distributed.init_process_group("gloo", **alone)
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)

    def step(*pair):
        model(*pair).backward()
        return model(*pair)

    train(model, step)


def on_ranks(step_of, steps=4, optimizer_of=torch.optim.SGD):
    """Trains with DistributedDataParallel on the ranks of torchrun."""
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Net())
    train(model, step_of(model), steps, optimizer_of(model.parameters()))


def one_rank_fails():
    """In its second step, where the others wait for its gradients."""

    def step_of(model):
        def step(*pair):
            count[0] += 1
            if count[0] == 2 and torch.distributed.get_rank() == 1:
                raise ValueError("the real reason")
            return model(*pair)

        return step

    count = [0]
    on_ranks(step_of)


class LateOnce(torch.optim.SGD):
    """The first update takes the second rank longer, so that its clock starts later."""

    def step(self, closure=None):
        super().step(closure)
        if torch.distributed.get_rank() == 1 and not hasattr(self, "was_late"):
            self.was_late = time.sleep(0.5)


def one_rank_is_late():
    def step_of(model):
        def step(*pair):
            time.sleep(0.2)
            return model(*pair)

        return step

    on_ranks(step_of, steps=40, optimizer_of=LateOnce)


def accelerated():
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = Net()
    data = [batch() for _ in range(40)]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=None)
    )
    for pair in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(*pair))
            optimizer.step()
            optimizer.zero_grad()


def two_optimizers():
    """One for the head, one for the rest, both in each step."""
    model = Net()
    head, *others = reversed([*model.parameters()])
    optimizers = torch.optim.SGD([head], momentum=0.9), torch.optim.AdamW(others)
    for _ in range(4):
        model(*batch()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def probe():
    """One optimizer makes an update before the training, and never again."""
    model = Net()
    model(*batch()).backward()
    torch.optim.SGD([model.head.weight]).step()
    train(model, steps=40)


class FailsOnce(torch.optim.SGD):
    """An optimizer whose first update raises, as for want of memory."""

    has_failed = False

    def step(self, closure=None):
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("out of memory")
        return super().step(closure)


def update_fails():
    """The script skips an update that fails."""
    model = Net()
    optimizer = FailsOnce(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(*batch()).backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()


def workers():
    """Batches come from a process."""
    model = Net()
    pairs = iter(DataLoader([batch() for _ in range(8)], batch_size=None, num_workers=1))
    train(model, lambda *_: model(*next(pairs)))


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    model(torch.randn(4, 3, 16, 16))
    train(
        model,
        lambda *_: F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.randint(0, 10, (4,))),
    )


def penalty():
    """A root of a mean and an error function, neither of a norm nor of a GELU; a gradient that is
    asked for by keywords."""
    judge = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def step(*_):
        x = torch.randn(4, 8, requires_grad=True)
        y = judge(x)
        (slope,) = torch.autograd.grad(inputs=x, outputs=y.sum(), create_graph=True)
        return (slope.square().mean(-1) + 1e-6).sqrt().add(torch.erf(y).mean()).mean()

    train(judge, step)


def schedule_drawn():
    """Updates without gradients before the training, to see the learning rates."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(8):
        optimizer.step()
        schedule.step()
    train(model, optimizer=optimizer)


def no_matmuls():
    """The logits of each token are a row of a table, as in makemore's bigrams."""
    table = nn.Embedding(V, V)
    train(table, lambda ids, targets: loss_of(table(ids), targets))


def matmuls_in_evaluation():
    """Only what no gradient comes of multiplies matrices, between two updates."""
    table, head = nn.Embedding(V, V), nn.Linear(V, C)

    def loss(ids, targets):
        logits = table(ids)
        with torch.no_grad():
            head(logits)
        return loss_of(logits, targets)

    train(table, loss)


def uneven():
    """Means over micro-batches of unequal numbers of tokens, as issues of 2024 have it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    for _ in range(4):
        for size in (4, 12):
            ids, targets = batch()
            targets = targets.clone()
            targets[:, size:] = -100
            (model(ids, targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def indices():
    """A batch cut out at places drawn on the CPU; its loss is read back."""
    model, text = Net(), torch.randint(0, V, (500,))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        places = torch.randint(0, 400, (B,))
        ids = torch.stack([text[place : place + T] for place in places])
        loss = model(ids, ids)
        print(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def characters():
    model = Net(vocabulary=29)
    train(model, lambda ids, targets: model(ids % 29, targets % 29))


def bytes_of_text():
    """More of them than an activation is wide, but no more than the feed-forward layer makes."""
    model = Net(vocabulary=128)
    train(model, lambda ids, targets: model(ids % 128, targets % 128))


class Table(nn.Module):
    """An embedding by hand: a weight, indexed by tokens."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, C))

    def forward(self, ids):
        return self.weight[ids]


def indexed_table():
    model = Net()
    model.tokens = Table()
    train(model)


class OwnUpdate(torch.optim.Optimizer):
    """Reads and writes `.data`, without no_grad."""

    def __init__(self, parameters):
        super().__init__(parameters, dict(rate=0.1))

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data * -group["rate"])


def own_update():
    model = Net()
    train(model, optimizer=OwnUpdate(model.parameters()))


def pieces():
    """Free memory below a piece in use: malloc gives it again, but each step's goes to Linux."""
    torch.empty(7 * 2**20)
    last = [torch.empty(2**22) for _ in range(20)][-1]
    train(Net())
    del last


def sleeps():
    """It waits for something between its steps."""

    def step(*arguments):
        time.sleep(0.1)
        return model(*arguments)

    model = Net()
    train(model, step, steps=12)


def catches_all():
    """It trains on after whatever is raised, and saves."""
    model = Net()
    for _ in range(3):
        with contextlib.suppress(BaseException):
            train(model, steps=40)
    torch.save(model.state_dict(), "saved.pt")


def thread():
    training = threading.Thread(target=train, args=[Net()])
    training.start()
    training.join()


TOYS = dict(
    fast=of(),
    safe_softmax=of(attention=Dropping),
    stored_mask=of(attention=StoredMask),
    by_hand=of(attention=ByHand),
    masked_twice=of(attention=MaskedTwice),
    assigned=of(attention=Assigned),
    lower=of(attention=Lower),
    indexed=of(attention=Indexed),
    capped=of(attention=Capped),
    signed=of(attention=Signed),
    gated=of(attention=Gated),
    talking=of(attention=Talking),
    twice=of(attention=Twice),
    scaled=of(attention=Scaled),
    exponentials=of(attention=Exponentials),
    relative=lambda: fixed(Net(Relative())),
    relative_only=lambda: fixed(Net(RelativeOnly())),
    bias_and_mask=of(attention=BiasAndMask),
    apart=of(attention=Apart),
    query_apart=of(attention=QueryApart),
    cross=of(attention=Cross),
    scripted_attention=of(attention=ScriptedAttention),
    multihead=of(attention=Multihead),
    masked_multihead=of(attention=MaskedMultihead),
    linear=of(attention=Linear),
    tiled_head=tiled_head,
    std_norm=of(norm=lambda: Norm("std")),
    rms_norm=of(norm=lambda: Norm("rms")),
    normalized=of(norm=lambda: Norm("normalize")),
    own_rms_norm=of(norm=lambda: Norm("own"), activation=nn.ReLU),
    cubed=of(activation=Cubed),
    recurrent=of(attention=Recurrent),
    known_one_by_one=lambda: known(foreach=False),
    padded=of(vocabulary=lambda: 1024),
    tied=of(tied=lambda: True),
    short=lambda: train(Net(), steps=1),
    fails=lambda: 1 / 0,
    nothing=lambda: None,
)

if __name__ == "__main__":
    (globals() | TOYS)[sys.argv[1]]()
