"""`python -m ds_trainer` is `ds-trainer`: launchers that start modules can start it."""

import sys

from ds_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
