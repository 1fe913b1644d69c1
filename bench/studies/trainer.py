"""What a user would pick instead: Hugging Face's Trainer."""

import re

from bench.catalogue import lacking
from bench.common import ROOT, trained_in
from bench.measure.plan import Plan
from bench.studies import Study


class Trainer(Study):
    """01, and the same training by Hugging Face's Trainer (peers/hf_trainer.py), from its defaults
    to its fastest settings."""

    title = "Hugging Face's Trainer"
    schedule = {130: None}

    def plans(self, setup):
        machine = setup.machine
        base = setup.scripts.stage("01").but(published=None)
        batch = ("--per_device_train_batch_size", "32" if machine["gpus"] else "8")  # as 01
        tf32 = ("--tf32", "True") if float(machine.get("capability") or 0) >= 8 else ()
        mixed, fastest = ("--bf16", *tf32), ("--dtype", trained_in(machine), "--torch_compile")
        settings = [(), mixed, (*mixed, "--torch_compile"), fastest]
        if not machine["gpus"]:
            settings.append((*fastest, "--huge_pages"))
        needs = "package transformers, package accelerate"
        runs = [base.but(
            name="-".join(["trainer", *re.findall(r"\w+", " ".join(options))]),
            label=" ".join(["Trainer", *options]), script=ROOT / "peers" / "hf_trainer.py",
            technique="Hugging Face's Trainer", loss="changes", options=batch + options,
            compared_to=base.name, stage=None,
            error=lacking(needs + ", bfloat16 units" * ("--bf16" in options), machine))
            for options in settings]
        yield Plan([base, *runs], **self.length(setup))
