"""Runs one rank of a training job: torchrun --nproc-per-node 2 train.py --config debug_vlm.toml"""

import sys

from mmtrain.commands.cli import train_main
from mmtrain.launch.processes import leave

if __name__ == "__main__":
    leave(train_main(sys.argv[1:]))
