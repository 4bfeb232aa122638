"""The process that forks: ``python -m tests.warm.server ADDRESS PROGRAM``, until its input ends."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import random
import runpy
import selectors
import shlex
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.frozen import freeze_heap
from tests.warm import RANKS

MODULES = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.nn.parallel", "torch._dynamo"),
    *("torch.testing", "numpy", "transformers", "transformers.models.auto.modeling_auto", "datasets", "peft"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.integrations.sdpa_attention", "tokenizers"),
    *("transformers.optimization", "transformers.trainer_pt_utils", "trl.data_utils", "trl.chat_template_utils"),
    *("trl.rewards", "torch.profiler._cupti_monitor", "torch.utils.serialization.config"),
    "tests.backends.megatron_preload",  # before what imports megatron: nothing of it is compiled in each fork
    *("rayhelper", "rayhelper.worker.host", "rayhelper.runtimes.torchrun.runtime"),
    # what Ray imports, but not Ray, which keeps the variables that it once read
    *("pydantic.v1", "pydantic.json_schema", "pydantic.networks", "requests", "jsonschema", "msgpack", "uvloop"),
    *("google.protobuf.json_format", "google.protobuf.timestamp_pb2", "starlette.datastructures", "logging.handlers"),
    *(f"trainers.{name}.trainer" for name in ("sft", "dpo", "kto", "cpo", "reward", "grpo", "gkd", "ppo")),
    *("trainers.backends.fsdp.backend", "trainers.backends.megatron.backend", "torch.distributed.run", "pytest"),
    # what vLLM imports, but not vLLM
    *("aiohttp", "fastapi", "openai.types.chat", "openai.types.responses", "zmq", "email_validator"),
    # what ranks of the backends need
    *("torch._dynamo.backends.inductor", "torch._dynamo.backends.distributed", "torch.export._trace"),
    *("torch._subclasses.schema_check_mode", "torch.fx.experimental.validator", "numpy.ctypeslib", "safetensors.torch"),
    *("transformers.models.qwen3_moe.modeling_qwen3_moe", "peft.utils.transformers_weight_conversion"),
    "huggingface_hub.hf_file_system",
    *(f"trainers.rollout.hf.{name}" for name in ("engine", "cache", "decoder", "graphs", "slots")),
)
SET_BY_IMPORTS: dict[str, str] = {}  # variables


@dataclass
class Asked:
    """What a program was called with."""

    arguments: list[str]
    folder: str
    environ: dict[str, str]
    streams: list[int]
    client: int  # the program's process

    @classmethod
    def receive(cls, client: socket.socket) -> Asked:
        size, streams, _, _ = socket.recv_fds(client, 4, 3)
        text = b""
        while len(text) < int.from_bytes(size, "big"):
            text += client.recv(1 << 20)
        process, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return cls(**json.loads(text), streams=streams, client=process)


@dataclass
class Server:
    """Forks for those who ask; what a fork leaves with is told to who asked, and it dies with them."""

    listener: socket.socket
    forks: dict[int, tuple[int, socket.socket]] = field(default_factory=dict)  # by descriptor of the process

    def serve(self) -> Asked | None:
        """In the server: None at the end. In a fork: what was asked."""
        with selectors.DefaultSelector() as events:
            events.register(self.listener, selectors.EVENT_READ)
            events.register(0, selectors.EVENT_READ)
            while True:
                for event, _ in events.select():
                    if event.fileobj == 0:
                        for process, _ in self.forks.values():
                            os.kill(process, signal.SIGKILL)
                        return None
                    if event.fileobj is self.listener:
                        if (asked := self._fork(events)) is not None:
                            return asked
                    elif event.data == "client":
                        self._client_left(event.fileobj)
                        events.unregister(event.fileobj)
                    else:
                        self._ended(event.fd, events)

    def _fork(self, events: selectors.BaseSelector) -> Asked | None:
        client, _ = self.listener.accept()
        asked = Asked.receive(client)
        process = os.fork()
        if process == 0:
            self.listener.close()
            client.close()
            for descriptor, (_, other) in self.forks.items():
                os.close(descriptor)
                other.close()
            return asked
        for stream in asked.streams:
            os.close(stream)
        descriptor = os.pidfd_open(process)
        self.forks[descriptor] = (process, client)
        client.sendall(process.to_bytes(4, "big"))
        events.register(descriptor, selectors.EVENT_READ)
        events.register(client, selectors.EVENT_READ, "client")
        return None

    def _client_left(self, client: Any) -> None:
        for process, other in self.forks.values():
            if other is client:
                os.kill(process, signal.SIGKILL)

    def _ended(self, descriptor: int, events: selectors.BaseSelector) -> None:
        process, client = self.forks.pop(descriptor)
        _, status = os.waitpid(process, 0)
        events.unregister(descriptor)
        os.close(descriptor)
        if client in (key.fileobj for key in events.get_map().values()):
            events.unregister(client)
            code = os.waitstatus_to_exitcode(status)
            client.sendall(code.to_bytes(4, "big", signed=True))
        client.close()


def use_threads() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def become(asked: Asked, program: str) -> None:
    """This process is as a new one that was called so, but for its imports."""
    import numpy as np

    for number, stream in enumerate(asked.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(SET_BY_IMPORTS | asked.environ)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.getppid = of_program(asked.client, os.getppid)
    random.seed()
    np.random.seed()
    use_threads()
    forget_the_cpu_of_megatron()
    if asked.arguments[0] == "-c":
        sys.argv = ["-c"]
        sys.path[:1] = ["", *filter(None, asked.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return
    script = Path(asked.arguments[0])
    if script.name != "default_worker.py" and RANKS not in asked.arguments:
        sys.executable = program  # what starts workers starts them as it was started itself
    if script.name == "setup_worker.py":
        os.execvp = stays_if_ray(os.execvp, program)  # type: ignore[assignment]
    sys.argv = asked.arguments
    folder = asked.folder if asked.arguments[0] == "-m" else str(script.parent)
    sys.path[:1] = [folder, *filter(None, asked.environ.get("PYTHONPATH", "").split(os.pathsep))]


def forget_the_cpu_of_megatron() -> None:
    """Who imports ``tests.megatron_on_cpu`` installs it, as in a process that has not imported megatron."""
    import tests

    del sys.modules["tests.megatron_on_cpu"], tests.megatron_on_cpu  # type: ignore[attr-defined]


def of_program(client: int, getppid: Callable[[], int]) -> Callable[[], int]:
    """``os.getppid`` of this fork: the parent is the program's, which ended where that is another."""
    fork = os.getpid()

    def parent() -> int:
        if os.getpid() != fork:
            return getppid()
        with contextlib.suppress(FileNotFoundError):
            return int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[1])
        return getppid()

    return parent


class Stays(BaseException):  # nothing failed
    """This process runs the script itself which it was about to start a Python for."""


def stays_if_ray(execvp: Callable[[str, list[str]], None], program: str) -> Callable[[str, list[str]], None]:
    """``os.execvp`` where Ray sets up a worker: the same process becomes the worker, a third of what one costs.

    Not where its variables are others than before: Ray is imported now, and has read them.
    """
    before = variables_of_ray()

    def stay(file: str, args: list[str]) -> None:
        words = shlex.split(args[-1])
        if file == "bash" and words[:2] == ["exec", program] and variables_of_ray() == before:
            raise Stays(*[word for word in words[2:] if word != "-u"])
        execvp(file, args)

    return stay


def variables_of_ray() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def main() -> None:
    address, program = sys.argv[1:]
    before = dict(os.environ)
    never, sys.dont_write_bytecode = sys.dont_write_bytecode, False  # for those that start cold
    for name in MODULES:
        importlib.import_module(name)
    sys.dont_write_bytecode = never
    # compiles 650 patterns, of all models: half a second of the first model that a process reads
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
    write_no_configurations()
    SET_BY_IMPORTS.update(set(os.environ.items()) - set(before.items()))
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) - threads.count("jemalloc_bg_thd") > 1:  # pyarrow's, which a fork starts again
        raise RuntimeError(f"a fork has one thread, here are {threads}")
    freeze_heap()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)
        os.write(1, b"ready\n")
        asked = Server(listener).serve()
    if asked is None:
        return
    become(asked, program)
    end(run(asked))


def write_no_configurations() -> None:
    """transformers makes a line of its log of each configuration that it reads: two thirds of what reading costs."""
    from transformers import PreTrainedConfig

    PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]


def run(asked: Asked) -> int:
    """Runs it as ``__main__``: the exit code, or a signal's number below zero. Errors are told as always."""
    try:
        if asked.arguments[0] == "-c":
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(asked.arguments[1], vars(sys.modules["__main__"]))
        elif asked.arguments[0] == "-m":
            sys.argv = asked.arguments[1:]
            runpy.run_module(asked.arguments[1], run_name="__main__", alter_sys=True)
        else:
            try:
                runpy.run_path(asked.arguments[0], run_name="__main__")
            except Stays as stays:
                logging.getLogger("ray").handlers.clear()
                use_threads()
                sys.argv = list(stays.args)
                runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> None:
    """As the interpreter ends, but that it does not take every module apart, which costs a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
