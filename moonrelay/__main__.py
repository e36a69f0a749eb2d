"""`python -m moonrelay`."""

import sys

from moonrelay.cli import main

sys.exit(main())
