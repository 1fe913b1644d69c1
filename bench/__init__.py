"""What the measuring tools share: plans, the runner, records, statistics, tables and pictures."""

import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036 (told here, before a module that needs it is imported)
    sys.exit(f"error: needs Python 3.11 or newer; this is {platform.python_version()}")
