"""TRL's own vLLM server, `trl vllm-serve`, in a process of its own with its worker, and its client."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.harness import unpacked
from tests.harness.forkserver import VLLM, Level

RELEASE = "1.7.1"
"""With a server of its own; which later ones leave to vLLM."""


def levels(release: str = RELEASE) -> tuple[Level, ...]:
    """With a release's server; of `RELEASE` with the trainers that ask it, too."""
    load = "trl_with_its_server" if release == RELEASE else "trl_vllm_serve"
    return (*VLLM, Level(f"tests.harness.loading:{load}", unpacked.folders(f"trl=={release}")))


class Communicator:
    """Stands in for vLLM's `PyNcclCommunicator`, which needs GPUs: the same group, and tensors go over its store."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group

    def broadcast(self, tensor: Any, src: int) -> None:
        """From one of the group; the others' tensors get its values."""
        sent = self.group.broadcast_obj(tensor.cpu() if self.group.rank == src else None, src)
        tensor.copy_(sent)


def _without_a_gpu() -> None:
    """In a process with clients; the server is started before, whose torch keeps its own."""
    import torch

    torch.cuda.current_device = lambda: 0  # asked for by some releases, for the client's group
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="none")
    torch.accelerator.current_accelerator = lambda *_, **__: SimpleNamespace(type="cpu")


def open_port() -> int:
    """Nobody else's now. A client's group needs one, too: TRL's 51216 can be another test's."""
    from vllm.utils import network_utils

    return network_utils.get_open_port()


def send_weights() -> None:
    """Let clients update the server's weights, over a `Communicator`."""
    from trl.generation import vllm_client

    _without_a_gpu()
    vllm_client.PyNcclCommunicator = Communicator


def send_no_weights() -> None:
    """Let clients go without a group: the server has the checkpoint's weights."""
    from trl.generation import vllm_client

    _without_a_gpu()
    client: Any = vllm_client.VLLMClient
    client.init_communicator = client.close_communicator = client.update_named_param = lambda *_, **__: None


def _serve(settings: dict[str, Any]) -> None:
    """It leads a group, which ends with it. Its tokenizer is the checkpoint's, not one of Qwen's with its words."""
    from transformers.models.auto import tokenization_auto
    from trl.scripts import vllm_serve
    from vllm.distributed.device_communicators import pynccl

    pynccl.PyNcclCommunicator = Communicator
    tokenization_auto.TOKENIZER_MAPPING_NAMES["qwen2"] = "TokenizersBackend"
    os.setpgid(0, 0)
    vllm_serve.main(vllm_serve.ScriptArguments(host="127.0.0.1", enforce_eager=True, log_level="error", **settings))


@contextlib.contextmanager
def serving(model: str, **settings: Any) -> Iterator[tuple[int, int]]:
    """Yields the server's port and its process's number as soon as it answers.

    Args:
        model: the checkpoint's folder.
        settings: of its command line.
    """
    port = open_port()
    given = {"model": model, "port": port, **settings}
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(given,))
    server.start()
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/", timeout=4).close()
                break
            except OSError:  # refused, or not answered in time where much else runs
                assert server.is_alive()
                time.sleep(0.1)
        yield port, server.pid or 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid or 0, signal.SIGKILL)
        server.join()
