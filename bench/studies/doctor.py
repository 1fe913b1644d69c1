"""What works on this machine, what is missing, and what to type next."""

import importlib.util
import json

from bench import processes
from bench.common import REFERENCE, ROOT, relative
from bench.lengths import fitting
from bench.predictions import kept
from bench.speed import CARDS, card_of
from bench.study import Study

EXTRAS = "accelerate", "bitsandbytes", "safetensors", "transformers"


class Doctor(Study):
    """One screen about this machine: GPU, free memory, bfloat16, compiler, tokens, the batch size
    that fits, what is missing with the line that gets it, and the next command."""

    runs_scripts = False
    in_report = ()

    def answer(self, setup):
        machine, works = setup.machine, processes.ask_machine("works")
        lines = [("PyTorch", f"{machine['torch']}, Python {machine['python']}, {machine['os']}"),
                 ("CPU", f"{machine['cpu']}, {machine['threads']} threads")]
        if machine["gpus"]:
            free = processes.ask_machine("free_memory")
            lines += [
                ("GPU", f"{machine['gpus']} × {machine['name']}, compute capability"
                        f" {machine['capability']}, driver {machine['driver'] or 'unknown'}"),
                ("free memory", ", ".join(f"{mib / 1024:.1f} GB" for mib in free))]
        lines += [("bfloat16", "in hardware" if works["bfloat16"] else
                   "not in hardware, so 01 may be slower than 00"),
                  ("torch.compile", "doesn't work" if works["compile_error"] else "works")]
        batches = {}
        meta = setup.data / "meta.json"
        lines.append(("tokens", f"none yet in {relative(setup.data)}: the scripts make them"))
        if meta.exists():
            try:
                count = int(json.loads(meta.read_text(encoding="utf-8"))["tokens"]["train"])
                lines[-1] = "tokens", f"{count:,} to train on, in {relative(setup.data)}"
            except (ValueError, LookupError, TypeError):
                lines[-1] = "tokens", f"{relative(meta)} is damaged: run data/prepare.py"
        if machine["gpus"]:
            batches = fitting(setup)
            lines.append(("batch size", ", ".join(
                f"{batch} in place of {theirs}" for theirs, batch in batches.items())
                or "8 and 32, as published"))
            if not works["compile_error"]:
                lines += expected(setup, batches.get("32", 32))
        packages = [name for name in EXTRAS if not importlib.util.find_spec(name)]
        if packages:
            works["missing"].append(f"{', '.join(packages)}, for some variants:"
                                    " `pip install -r requirements-extras.txt`")
        lines += [("missing", thing) for thing in works["missing"]]
        measured = [*setup.results.glob("*.jsonl")]
        following = "make report" if measured else "make bench"
        if not (ROOT / ".venv").exists():  # make would install another environment
            first = f"python 00_orig.py --batch-size {batches['8']}" if batches else (
                "python 00_orig.py")
            following = "python measure.py report" if measured else first
        lines.append(("next", following))
        return "\n".join(f"{name:15}{text}" for name, text in lines)


def expected(setup, batch: int) -> list[tuple[str, str]]:
    """What 01 should do on this card, if it is a known one."""
    card, script = card_of(setup.machine["name"]), setup.scripts.stage("01").script
    known = kept(setup.scripts, script, ["--model", "gpt2"], REFERENCE)
    if not card or not known:
        return []
    told = known.speed_range(batch, CARDS[card])
    return [("expected", f"01 at batch {batch}: {told} thousand tok/sec on each GPU, by prediction"
                         " (docs/predictions.md)" if known.tok_per_sec(batch, CARDS[card]) else
             "no speed is predicted for 01: this card has no bfloat16")]
