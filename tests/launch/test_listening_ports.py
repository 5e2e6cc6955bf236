"""On which addresses the ranks of one machine listen."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from runner.engine.device.distributed import LOOPBACK, RENDEZVOUS_ENV, listen_on_loopback

RANK = """
import dataclasses, sys
from runner.config.compose import compose_config
from runner.engine.device.distributed import init_distributed
config = compose_config(["distributed=ddp", "distributed.nproc=2", "device=cpu"]).distributed
dist = init_distributed(config, "cpu")
assert dist.all_reduce_sum([1.0]) == [2.0]
print("joined", flush=True)
sys.stdin.read()
"""


def listening_addresses(pid: int) -> set[str]:
    """The IPv4 addresses, and the IPv6 ones in hexadecimal, on which a process listens."""
    links = (os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.islink(entry.path))
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address = fields[1].partition(":")[0]
                found.add(socket.inet_ntoa(struct.pack("<I", int(address, 16))) if name == "tcp" else address)
    return found


def addresses_of_ranks(folder: Path, **environment: str) -> set[str]:
    variables = {
        name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE")
    }
    variables |= {
        RENDEZVOUS_ENV: f"file://{folder / 'rendezvous'}",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    } | environment
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["joined\n", "joined\n"]
        return {address for rank in ranks for address in listening_addresses(rank.pid)}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
def test_ranks_of_one_machine_listen_on_the_loopback_interface_only(tmp_path: Path) -> None:
    assert addresses_of_ranks(tmp_path) == {"127.0.0.1"}


@pytest.mark.slow
def test_ranks_listen_on_the_interface_that_the_user_names(tmp_path: Path) -> None:
    others = [name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))]
    if not others:
        pytest.skip("this machine has no network interface")
    assert not any(address.startswith("127.") for address in addresses_of_ranks(tmp_path, GLOO_SOCKET_IFNAME=others[0]))


@pytest.mark.parametrize(
    ("rendezvous", "local_ranks", "given", "expected"),
    [
        ("file:///tmp/x", None, None, LOOPBACK),
        ("file:///tmp/x", None, "eth1", "eth1"),
        ("torchrun:1", "2", None, LOOPBACK),
        ("torchrun:1", "1", None, None),  # two machines
    ],
)
def test_interface_of_gloo(
    rendezvous: str, local_ranks: str | None, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GLOO_SOCKET_IFNAME", given), ("LOCAL_WORLD_SIZE", local_ranks)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    listen_on_loopback(rendezvous, 2)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
