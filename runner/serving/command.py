"""serve.py: load a model and answer HTTP requests until Ctrl-C."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from pathlib import Path
from types import FrameType
from typing import Optional

from common.errors import UserError, print_note
from common.settings import CheckedSettings, at_least, one_of, settings_class, within
from runner.inference.load import load_trained

API_KEY = "RUNNER_API_KEY"  # environment variable: the token that clients must send
MAX_CONNECTIONS = 1024  # more are refused with status 503


@settings_class
class ServeConfig(CheckedSettings):
    run: str  # run directory, Hugging Face or PEFT folder, sweep (its best job), or last: the newest finished run
    # address to listen on; other machines reach it only if it is not a loopback address, which needs RUNNER_API_KEY
    host: str
    port: int = within("[0, 65535]", 8000)  # TCP port; 0: a free one, which is printed
    name: Optional[str]  # name of the model for clients; null: that of the folder
    max_batch: int = at_least(1, 8)  # answers that are generated together
    max_waiting: int = at_least(1, 1000)  # answers that may wait; a request beyond gets status 503
    max_new_tokens: int = at_least(1, 256)  # length of an answer (tokens) where a request gives none
    device: str  # auto (a GPU if there is one), cpu, cuda, cuda:<number> or mps (GPU of a Mac)
    # auto (bf16 on a GPU that computes it, else fp32), fp32, bf16 or fp16: the model is rounded to it
    dtype: str = one_of("auto", "fp32", "bf16", "fp16")


def serve(cfg: ServeConfig, folder: Path) -> None:
    """Raises UserError if the address cannot be listened on, or if others could reach it without a key."""
    try:
        import uvicorn

        from runner.serving.app import GenerationQueue, create_app
        from runner.serving.guard import HeaderDeadlineProtocol
    except ModuleNotFoundError as error:
        raise UserError(
            f"serve.py needs the package {error.name}",
            "python runner/serve.py",
            'pip install "lm-runner[serve]", or pip install starlette pydantic uvicorn',
        ) from error

    key = _read_key()
    listener = _listen(cfg, key)
    host, port = listener.getsockname()[:2]
    generation = GenerationQueue(load_trained(folder, cfg.device).compute_in(cfg.dtype), cfg.max_batch, cfg.max_waiting)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            generation.is_stopping = True  # answers end at the next token
            super().handle_exit(sig, frame)

    name = cfg.name or (folder.parent.name if folder.name == "model" else folder.name)
    app = create_app(generation, name, cfg.max_new_tokens, key, allowed_hosts=_allowed_hosts(host))
    print_note(
        f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 ({'with' if key else 'without'} a key); Ctrl-C stops"
    )
    # The messages of uvicorn and asyncio about single connections are left out: any process that connects could fill
    # the log.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=HeaderDeadlineProtocol,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=3,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    try:
        Server(config).run(sockets=[listener])
    finally:
        generation.close()


def _read_key() -> str | None:
    key = os.environ.get(API_KEY) or None
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise UserError(
            "the key has a space, a line break or a character that is not ASCII: clients cannot send it",
            API_KEY,
            f"export {API_KEY}=$(openssl rand -hex 16)",
        )
    return key


def _listen(cfg: ServeConfig, key: str | None) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"host is no address of this machine: {error}", f"host={cfg.host}", "host=127.0.0.1") from error
    family, kind, _, _, address = addresses[0]
    if not ipaddress.ip_address(str(address[0])).is_loopback and not key:
        raise UserError(
            f"without a key other machines could use the model at {cfg.host}",
            f"host={cfg.host}",
            f"set the environment variable {API_KEY}, or host=127.0.0.1",
        )
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(MAX_CONNECTIONS)  # now: two sockets that only have the same address would both be accepted
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {cfg.host}:{cfg.port}: {error.strerror}",
            f"port={cfg.port}",
            "choose another port, or port=0 for a free one",
        ) from error
    return listener


def _allowed_hosts(host: str) -> list[str] | None:
    """Return the names under which a loopback server is addressed: a web page that resolves its own name to 127.0.0.1
    is refused. None: any.
    """
    if not ipaddress.ip_address(host).is_loopback:
        return None
    return ["localhost", "127.0.0.1", "::1", host]
