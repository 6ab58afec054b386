"""`sluice up --replicas N` and `sluice cluster …`, as processes."""

import asyncio
import os
import signal
from pathlib import Path

from sluicemq.cli.replicas import Child, etcd_child, etcd_is_healthy, free_ports


async def test_an_etcd_that_is_killed_comes_back_with_its_data(tmp_path: Path) -> None:
    port, peer_port = free_ports(2)
    etcd = etcd_child(tmp_path / "etcd", port, peer_port)
    await etcd.start()
    try:
        assert await etcd_is_healthy(port)
        os.kill(process_id(etcd), signal.SIGKILL)
        async with asyncio.timeout(10):
            while not await etcd_is_healthy(port):
                await asyncio.sleep(0.05)
    finally:
        await etcd.close()
    assert not await etcd_is_healthy(port)
    assert (tmp_path / "etcd" / "member").is_dir()


def process_id(child: Child) -> int:
    process = child._process
    assert process is not None
    return process.pid
