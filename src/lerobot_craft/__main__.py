"""`python -m lerobot_craft`, which is also what `accelerate launch -m lerobot_craft` runs on every rank."""

import sys

from lerobot_craft.cli import main

if __name__ == "__main__":
    sys.exit(main())
