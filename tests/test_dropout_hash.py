"""The variant dropout-hash: its bits, its seeds, and that nothing is compiled again."""

import json
from itertools import combinations
from statistics import NormalDist

import pytest
import torch
from conftest import TINY, load, run_python, small, write_tokens
from test_checkpoints import KILLED, TWO, Trial
from test_model import SIZES, Losses, losses_of, model_of, windows_of
from test_variants import TRACED

from patches import stack

RATE = 0.1
NUMBERS = 2**20
# How likely a test would fail if the bits were random. Seeds are fixed: it always or never does.
CHANCE = 1e-3
UPDATE = "            backward_and_update(loss, optimizer)\n"
WRITES_SEEDS = """
            drawn = [int(m.seed) for m in model.modules() if isinstance(m, HashDropout)]
            path = Path(config.results_dir, f"seeds-{dist.get_rank()}")
            earlier = json.loads(path.read_text()) if path.exists() else []
            path.write_text(json.dumps([*earlier, drawn]))
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("dropout-hash") / "composed.py"
    path.write_bytes(stack.compose(["dropout-hash"]))
    return load(path)


@pytest.fixture
def dropped(script):
    """Returns which of `numbers` are dropped with a seed, as booleans."""

    def dropped(seed: int, rate: float = RATE, numbers: int = NUMBERS) -> torch.Tensor:
        layer = script.HashDropout(rate, torch.tensor(seed, dtype=torch.int32))
        return layer(torch.ones(numbers)) == 0

    return dropped


def seeds_of(count: int) -> list[int]:
    """Returns seeds as the script draws them."""
    drawn = torch.zeros(count, dtype=torch.int32)
    return drawn.random_(generator=torch.Generator().manual_seed(1)).tolist()


def bound(tests: int) -> float:
    """Returns how many standard deviations the largest of so many figures may be off."""
    return NormalDist().inv_cdf(1 - CHANCE / tests / 2)


def deviation(share: float, expected: float, count: int) -> float:
    """Returns by how many standard deviations a share of `count` numbers is off."""
    return abs(share - expected) / (expected * (1 - expected) / count) ** 0.5


def independence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the root of chi-square for the table of what two masks drop: with one degree of
    freedom, a number of standard deviations."""
    cells = torch.bincount(2 * one + other.int(), minlength=4).double().view(2, 2) / len(one)
    expected = torch.outer(cells.sum(1), cells.sum(0))
    return (len(one) * ((cells - expected).square() / expected).sum()).sqrt().item()


def triple32(x: int) -> int:
    """Returns the hash of 32 bits with which C. Wellons's hash-prospector mixes best."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 14


# ---- Its bits


def test_it_is_the_published_hash(dropped):
    """But for the last shift, which leaves the upper 14 bits as they are."""
    for seed in (0, 1, -1, 2**31 - 1, -(2**31), *seeds_of(3)):
        hashes = [triple32(position ^ seed % 2**32) for position in range(3000)]
        # As an int32 the smallest is that of 2**31.
        shares = torch.tensor([(value + 2**31) % 2**32 / 2**32 for value in hashes])
        mask = dropped(seed, numbers=3000)
        assert shares[mask].max() < RATE + 2**-14 and shares[~mask].min() > RATE - 2**-14


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.001, 1 / 3])
def test_the_rate_is_exact(dropped, rate):
    """Of 16 seeds, each and all together; and means stay right."""
    shares = [dropped(seed, rate).float().mean().item() for seed in seeds_of(16)]
    assert max(deviation(share, rate, NUMBERS) for share in shares) < bound(16)
    assert deviation(sum(shares) / 16, rate, 16 * NUMBERS) < bound(1)


def test_what_is_kept_is_scaled(script):
    layer = script.HashDropout(RATE, torch.tensor(7, dtype=torch.int32))
    x_BTC = torch.randn(3, 5, 7)
    y_BTC = layer(x_BTC)
    torch.testing.assert_close(y_BTC[y_BTC != 0], x_BTC[y_BTC != 0] / 0.9)
    assert layer.eval()(x_BTC) is x_BTC


def test_layers_steps_and_ranks_are_independent(dropped):
    """Of seeds as they are drawn, which is all that these differ in: 0.81 are kept by both."""
    masks = [dropped(seed) for seed in seeds_of(20)]
    pairs = list(combinations(masks, 2))
    assert max(independence(*pair) for pair in pairs) < bound(len(pairs))
    kept = sum((~(one | other)).float().mean().item() for one, other in pairs) / len(pairs)
    # As far off as the mean rate of all masks makes it.
    off = 2 * (1 - RATE) * (RATE * (1 - RATE) / NUMBERS / len(masks)) ** 0.5
    assert kept == pytest.approx(0.81, abs=bound(1) * off)


def test_seeds_that_are_near_are_as_good(dropped):
    """Which differ in one bit, or by a small number."""
    first = seeds_of(1)[0]
    others = [first ^ 1 << bit for bit in range(31)] + [first + step for step in range(1, 17)]
    mask = dropped(first)
    assert max(independence(mask, dropped(seed)) for seed in others) < bound(len(others))


def test_positions_are_independent(dropped):
    """Neighbours, rows of a width, windows of a context, and powers of two."""
    lags = [*range(1, 33), *(2**power for power in range(6, 19)), 768, 1024, 2304, 3072, 768 * 1024]
    chi = []
    for seed in seeds_of(8):
        mask = dropped(seed)
        chi += [independence(mask[lag:], mask[:-lag]) for lag in lags]
    assert max(chi) < bound(len(chi))


def test_a_rows_count_is_binomial(dropped):
    """Of 768 numbers each: their variance is that of independent ones."""
    counts = torch.cat([dropped(seed, numbers=768 * 1024).view(-1, 768) for seed in seeds_of(8)])
    counts = counts.sum(1).double()
    expected, rows = 768 * RATE * (1 - RATE), len(counts)
    chi_square = (counts - 768 * RATE).square().sum().item() / expected
    assert abs(chi_square - rows) / (2 * rows) ** 0.5 < bound(1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_drops_the_same(script, dtype):
    """An int32's overflow is none of C++'s; also where vectors end."""
    layer = script.HashDropout(RATE, torch.tensor(-3, dtype=torch.int32))
    compiled = torch.compile(layer, dynamic=False)
    for shape in ((3, 7, 33), (4, 64, 256), (1, 1, 5)):
        x_BTC = torch.randn(shape).to(dtype)
        assert torch.equal(layer(x_BTC), compiled(x_BTC))


# ---- Its seeds


class Drawn(Losses):
    """Keeps each step's seeds, and how many graphs the compiler had been given by then."""

    def __init__(self, script):
        super().__init__()
        self.script, self.seeds, self.graphs = script, [], []

    def start(self, model, data, config):
        super().start(model, data, config)
        self.layers = [m for m in model.modules() if isinstance(m, self.script.HashDropout)]

    def log(self, *figures):
        super().log(*figures)
        self.seeds.append([int(layer.seed) for layer in self.layers])
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def drawn_by(script, tokens, seed: int = 123, **settings) -> Drawn:
    """Returns what is drawn in 20 steps, after each of which a line is logged."""
    steps = dict(dropout=RATE, max_steps=20, eval_freq=1)
    model, config = model_of(script, **steps | settings)
    torch.manual_seed(seed)
    run = Drawn(script)
    losses_of(script, model, config, windows_of(script, tokens), run)
    return run


def test_every_layer_has_a_seed_and_every_step_new_ones(script, tokens):
    """Two of a block and the embedding's; by --seed, so that a run can be repeated."""
    run = drawn_by(script, tokens)
    layers = 2 * SIZES["layers"] + 1
    assert len(run.layers) == layers
    assert len({seed for seeds in run.seeds for seed in seeds}) == 20 * layers
    again, other = drawn_by(script, tokens), drawn_by(script, tokens, seed=124)
    assert (again.seeds, again.rows) == (run.seeds, run.rows)
    assert other.seeds != run.seeds and other.rows != run.rows


def test_evaluation_draws_no_seeds(script):
    """Which would depend on how often one logs; nor does it drop anything."""
    model, config = model_of(script, dropout=RATE)
    script.use_hash_dropout(model, model, config)
    model.dropout.seed.fill_(7)
    x_BT = torch.randint(256, (2, 9))
    assert torch.equal(model.eval()(x_BT), model(x_BT)) and model.dropout.seed == 7
    model.train()(x_BT)
    assert model.dropout.seed != 7


@pytest.mark.slow
def test_new_seeds_compile_nothing_again(script, tokens, monkeypatch):
    """They are tensors. Each step has others, which the compiled graph doesn't draw."""
    monkeypatch.setattr(torch, "compile", TRACED)
    torch._dynamo.reset()
    run = drawn_by(script, tokens, compile=True)
    assert len({*map(tuple, run.seeds)}) == 20
    assert run.graphs[0] > 0 and run.graphs[-1] == run.graphs[0]


@pytest.mark.slow
def test_a_resumed_run_has_the_masks_of_one_that_was_never_killed(tmp_path):
    trial = Trial(tmp_path)
    for results, how in (("whole", dict()), ("killed", dict(how=KILLED, step=24))):
        program = trial.script("01", "dropout-hash", **how)
        for _ in range(1 + len(how) // 2):
            done = trial.run(program, results, "--resume", "auto", saved=f"saved-{results}")
        assert done.returncode == 0, done.stderr
    assert "Resuming after step" in done.stdout
    assert len(trial.losses("whole")) == 42
    assert trial.losses("killed") == trial.losses("whole")


@pytest.mark.slow
def test_each_rank_has_seeds_of_its_own(tmp_path):
    """Though DDP sends a model's buffers from rank 0 to all."""
    text = small(stack.compose(["dropout-hash"], base=stack.DDP).decode())
    program, results = tmp_path / "composed.py", tmp_path / "results"
    assert text.count(UPDATE) == 1
    program.write_text(text.replace(UPDATE, UPDATE + WRITES_SEEDS))
    options = ["--data", write_tokens(tmp_path / "data"), "--results-dir", results]
    options += ["--device", "cpu", "--dtype", "float32", "--no-compile"]
    options += ["--dropout", RATE, "--max-steps", 3]
    done = run_python(*TWO, program, *TINY, *options)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((results / f"seeds-{rank}").read_text()) for rank in range(2)]
    seeds = [seed for steps in ranks for step in steps for seed in step]
    assert len({*seeds}) == len(seeds) == 2 * 3 * 3
