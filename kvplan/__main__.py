"""Run the command line as `python -m kvplan`."""

import sys

from kvplan.cli import main

sys.exit(main())
