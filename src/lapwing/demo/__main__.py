"""The demo as a script: `python -m lapwing.demo --out out/demo`."""

import argparse
from pathlib import Path

from lapwing.demo.run import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m lapwing.demo")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the pictures and the page")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the network and its training")
    run(**vars(parser.parse_args()))
