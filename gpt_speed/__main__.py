"""`python -m gpt_speed` is `gpt-speed`, also for torchrun."""

import sys

from gpt_speed.cli import main

sys.exit(main())
