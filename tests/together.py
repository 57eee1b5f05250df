"""What processes that start cold do, and torchrun's program: apart from the tests, so that they import little."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from compressor import artifact, world
from compressor.errors import CompressorError, ConfigError
from compressor.world import World, launch

MADE = "made"


def write_rank(world: World, folder: Path) -> None:
    """Leave a file that says what this process knows of the others."""
    told, total = (
        world.broadcast(f"from {world.rank}"),
        world.sum(np.array([[1.5, 2.0 * world.rank]], dtype=np.float32)),
    )
    world.barrier()
    known = f"{world.size} {world.is_leader} {told} {total.tolist()} {total.dtype} {torch.get_num_threads()}"
    (folder / str(world.rank)).write_text(known)


def fail_on_rank_1(world: World) -> None:
    """Raise in one process while the other waits for it."""
    if world.rank == 1:
        raise ConfigError("the second cannot go on; change something")
    world.barrier()


def end_rank_1(world: World) -> None:
    """Die as a process dies whose memory is taken, while the other waits."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def main(work: str, out: Path) -> None:
    """Write an artifact together, and come to no end."""
    vars(world).update(LOST_PATIENCE_S=1.0)
    try:
        with artifact.write(out, "thing", key="k", section={}, parents={}, together=True):
            launch({"fail": fail_on_rank_1, "kill": end_rank_1}[work], device="cpu")
        sys.stdout.write(f"{MADE}\n")
    except CompressorError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
