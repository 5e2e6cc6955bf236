"""Process of one local rank: `python runner/launch/worker.py CONFIG_FILE PARENT_PID`.

CONFIG_FILE is in the run directory.
"""

import os
import sys

if not __package__:  # started by path: replace runner/launch/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../../..")

import json
import signal
import threading
from pathlib import Path

from common.errors import INTERRUPTED, STOP_SIGNALS, ignore_broken_pipe, run_then_hard_exit
from common.filesystem import read_bounded
from runner.config.compose import restore_hydra_config
from runner.engine.device.distributed import RENDEZVOUS_DONE
from runner.engine.device.heartbeat import start_heartbeat
from runner.engine.device.signals import StopFlag, handled_signals
from runner.launch.supervisor import write_stacks_at_a_crash
from runner.launch.train_process import config_from_json, train_as_rank
from runner.run_dir.contents import MAX_JSON_BYTES
from runner.run_dir.metadata import RunMetadata

PARENT_POLL_SECONDS = 0.2


def main(config_file: Path, parent: int) -> int:
    ignore_broken_pipe()
    write_stacks_at_a_crash()
    start_heartbeat()
    for number in handled_signals():
        # StopFlag restores it: a signal during shutdown does not change the exit code
        signal.signal(number, lambda number, frame: None)
    with StopFlag() as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # deliver what arrived since the launcher blocked them
        return run_rank(config_file, parent, stop)


def _exit_while_ranks_meet(parent: int, stop: StopFlag) -> None:
    """Exit if the launcher dies, or if a stop is requested, while this rank waits for the others: the wait hears no
    signal, and there is nothing to save.
    """
    while not RENDEZVOUS_DONE.wait(PARENT_POLL_SECONDS):
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
        if stop():
            os._exit(INTERRUPTED)


def run_rank(config_file: Path, parent: int, stop: StopFlag) -> int:
    with RunMetadata.attach(config_file.parent, int(os.environ["RANK"])) as metadata:
        # the launcher died before this rank held its lock: another launch may own the folder
        if os.getppid() != parent:
            return 128 + signal.SIGTERM
        restore_hydra_config()
        threading.Thread(target=_exit_while_ranks_meet, args=(parent, stop), daemon=True).start()
        return train_as_rank(
            config_from_json(json.loads(read_bounded(config_file, MAX_JSON_BYTES)), config_file), metadata, stop
        )


if __name__ == "__main__":
    run_then_hard_exit(lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
