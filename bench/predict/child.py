"""Starts bench.predict.trace, unless this is another PyTorch than the one whose private names that
imports.

    python -m bench.predict.child REQUESTS  # see there
"""

import sys

import torch

PYTORCH = "2.13"  # the version whose compiler and optimizers the trace knows from within


def main() -> None:
    if not torch.__version__.startswith(f"{PYTORCH}."):
        sys.exit(
            f"error: predictions can be made again with PyTorch {PYTORCH}, not with"
            f" {torch.__version__}; stored ones work with any"
        )
    from bench.predict import trace  # only now: in another version its imports may fail

    trace.main()


if __name__ == "__main__":
    main()
