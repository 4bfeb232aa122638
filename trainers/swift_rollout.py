"""``swift rollout``: GPUs that wait for a run with ``vllm_mode: server``, and how its engines use them.

    CUDA_VISIBLE_DEVICES=6,7 rayhelper swift rollout --model M --vllm_data_parallel_size 2
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 NPROC_PER_NODE=6 rayhelper swift rlhf --vllm_mode server \
        --vllm_server_host 127.0.0.1 ...

Both commands stand in ms-swift's scripts. The first one starts no engine here: it answers at its port with its GPUs
and its keys of the engine. The second one runs on Ray with both: role train on its own GPUs, role rollout on those of
the first. So both must be on one node. Whoever can reach the port on this node can read these keys, and nothing else.

ms-swift plays turns with an environment in the first command. Here the run plays them, with these keys. It imports no
file that its own command does not name: another program may answer at the port.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rayhelper import ConfigError
from rayhelper.authenticated.own_files import is_alive
from trainers.configuration.others.ms_swift import is_placed
from trainers.configuration.others.other_names import ALIASES, ELSEWHERE
from trainers.configuration.reading.command_line import given_keys
from trainers.configuration.reading.given_keys import plain

PATH = "/rayhelper/rollout"
HERE = ("127.0.0.1", "localhost", "0.0.0.0")
PORT = 8000
WAIT_S = 240.0  # TRL's and ms-swift's vllm_server_timeout
RETRY_S = 0.5
VISIBLE = "CUDA_VISIBLE_DEVICES"
MODEL, SIZE, COPIES = "model", "vllm_tensor_parallel_size", "vllm_data_parallel_size"
OWN = ("host", "port")
PLUGINS, SCHEDULER = "external_plugins", "multi_turn_scheduler"
OF_TURNS = (PLUGINS, SCHEDULER, "max_turns", "use_gym_env", "gym_env", "enable_thinking", "max_length")
WITHOUT_EFFECT = ("vllm_use_async_engine", "infer_backend", "torch_dtype", "dtype", "log_level")  # engines are alike


@dataclass(frozen=True)
class Offer:
    """What one ``swift rollout`` has for a run."""

    model: str
    gpus: list[str]  # as in CUDA_VISIBLE_DEVICES; none on a machine without GPUs
    num_workers: int
    engine: dict[str, str]  # keys vllm_* of the engine
    turns: dict[str, str] = field(default_factory=dict)  # OF_TURNS: what the run shall play

    @classmethod
    def of(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Offer:
        """What a command line of ``swift rollout`` offers.

        Raises:
            ConfigError: a key that no engine reads, sizes that are none, or fewer GPUs than they need.
        """
        given = given_keys(arguments, [])[0]
        keys = dict(given.values)
        turns = {given.written[name]: keys.pop(name) for name in [*keys] if given.written.get(name) in OF_TURNS}
        if SCHEDULER in turns and not str(turns[SCHEDULER]).isidentifier():
            raise ConfigError(
                f"swift rollout: {SCHEDULER} {turns[SCHEDULER]} is not the name of a scheduler. Write one."
            )
        keys[COPIES] = keys.pop("data_parallel_size", keys.get(COPIES, 1))
        sizes = [plain(keys.get(name, 1)) for name in (SIZE, COPIES)]
        if not isinstance(keys.get(MODEL), str):
            raise ConfigError("swift rollout: --model must be given. Name the model that the run trains.")
        for name, size in zip((SIZE, COPIES), sizes, strict=True):
            if type(size) is not int or size < 1:
                raise ConfigError(f"swift rollout: {name} must be a whole number above 0, got {size!r}.")
        if str(keys.get("host", HERE[0])) not in HERE:
            raise ConfigError(f"swift rollout: host {keys['host']}: it answers on this node only. Remove it.")
        unknown = [
            name
            for name in keys
            if name not in (MODEL, COPIES, *OWN, *WITHOUT_EFFECT) and not name.startswith(("vllm_", "env"))
        ]
        if unknown:
            raise ConfigError(
                f"swift rollout: {', '.join(unknown)}: not a key of an engine. Write it in the training command, where "
                "it is read or refused."
            )
        num_workers, gpus = sizes[0] * sizes[1], _visible(environment)
        if gpus and len(gpus) < num_workers:
            raise ConfigError(
                f"swift rollout: {SIZE} {sizes[0]} x {COPIES} {sizes[1]} needs {num_workers} GPUs, and there are "
                f"{len(gpus)}: {','.join(gpus)} ({VISIBLE})."
            )
        engine = {
            name: str(value) for name, value in keys.items() if name.startswith("vllm_") and name not in WITHOUT_EFFECT
        }
        del engine[COPIES]
        said = {name: value if isinstance(value, str) else json.dumps(value) for name, value in turns.items()}
        return cls(_place(str(keys[MODEL])), gpus[:num_workers], num_workers, engine, said)


USAGE = (
    "usage: rayhelper swift rollout --model MODEL [--port 8000] [--vllm_tensor_parallel_size N] "
    "[--vllm_data_parallel_size N] [--vllm_...]\n"
    "Holds the GPUs of CUDA_VISIBLE_DEVICES for runs of this node with --vllm_mode server."
)


def serve(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Answers runs of this node with the offer of this command line, until it is interrupted.

    Raises:
        ConfigError: as ``Offer.of``; or the port is taken.
    """
    if {"--help", "-h"} & set(arguments):
        print(USAGE)
        return
    offer, port = Offer.of(arguments, environment), plain(given_keys(arguments, [])[0].values.get("port", PORT))
    if type(port) is not int or not 0 <= port < 2**16:
        raise ConfigError(f"swift rollout: port must be a whole number from 0 to 65535, got {port!r}.")
    try:
        server = answering(offer, port)
    except OSError as error:
        raise ConfigError(f"swift rollout: port {port} cannot be used: {error}. Write another --port.") from None
    places = f"GPUs {','.join(offer.gpus)}" if offer.gpus else f"places for {offer.num_workers} processes"
    print(
        f"holding {places} at 127.0.0.1:{server.server_port} for runs with vllm_mode: server. A run starts the "
        "engines; Ctrl-C ends this.",
        flush=True,
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def answering(offer: Offer, port: int) -> ThreadingHTTPServer:
    """A server on this node that gives the offer to one run at a time; ``port`` 0 is any that is free."""

    holding: list[int] = []  # the process id of the run that has the GPUs

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            asking = urllib.parse.parse_qs(query).get("pid", [""])[0]
            if path != PATH or not asking.isdecimal():
                self.send_error(404)
            elif holding not in ([], [int(asking)]) and is_alive(holding[0]):
                self.answer(409, {"held_by": holding[0]})
            else:
                if holding != [int(asking)]:
                    print(f"given to the run of process {asking}", flush=True)
                holding[:] = [int(asking)]
                self.answer(200, asdict(offer))

        def answer(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    return ThreadingHTTPServer((HERE[0], port), Handler)


def asked(port: int, wait_s: float) -> Offer:
    """The offer of the ``swift rollout`` at this port of this node, which may start within ``wait_s``.

    Raises:
        ConfigError: nobody answers in time, another program does, or another run has the GPUs.
    """
    where, deadline = f"127.0.0.1:{port}", time.monotonic() + wait_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    is_told = False
    while True:
        try:
            with opener.open(f"http://{where}{PATH}?pid={os.getpid()}", timeout=10) as reply:
                return Offer(**json.load(reply))
        except urllib.error.HTTPError as error:
            if error.code == 409:
                raise ConfigError(
                    f"vllm_mode server: the GPUs of {where} are in use by process {json.load(error)['held_by']}. Wait "
                    "for it to end, or start another swift rollout with another --port."
                ) from None
            raise ConfigError(_another(where)) from None
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError):
            raise ConfigError(_another(where)) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"vllm_mode server: no server answers at {where} ({error}). Start rayhelper swift rollout --model "
                    f"MODEL --port {port} first, on the GPUs of the engine."
                ) from None
            if not is_told:
                print(f"waiting up to {wait_s:g} s for swift rollout at {where}", file=sys.stderr, flush=True)
                is_told = True
            time.sleep(RETRY_S)


def _another(where: str) -> str:
    return (
        f"vllm_mode server: the server at {where} is not rayhelper swift rollout. Start that command, which "
        "gives its GPUs to the run, instead of the server of ms-swift or TRL."
    )


def engine_of_server(keys: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables with which a run has the engine of its ``swift rollout``, on Ray; none for any other.

    ``keys``: of file and command line, as written.

    Raises:
        ConfigError: as ``asked``; the offers do not fit together, or do not fit the run.
    """
    said = {name: plain(value) for name, value in keys.items()}
    if said.get("vllm_mode") != "server" or said.get("use_vllm") is not True or is_placed(keys, environment):
        return [], {}
    ports = _ports(said)
    if not ports:
        return [], {}  # engines on other nodes: refused with what to write
    wait_s = said.get("vllm_server_timeout", WAIT_S)
    offers = [asked(port, float(wait_s) if isinstance(wait_s, int | float) else WAIT_S) for port in ports]
    first, mine = offers[0], environment.get("NPROC_PER_NODE", "1")
    for offer in offers:
        if _place(offer.model) != _place(str(said.get(MODEL))):
            raise ConfigError(
                f"vllm_mode server: swift rollout has model {offer.model}, and this run trains {said.get(MODEL)}. "
                "Start it with the model of the run."
            )
        if (offer.engine, offer.turns) != (first.engine, first.turns):
            raise ConfigError(
                f"vllm_mode server: the servers' keys differ: {first.engine | first.turns} and "
                f"{offer.engine | offer.turns}. Start them alike."
            )
    theirs = [gpu for offer in offers for gpu in offer.gpus]
    own = _visible(environment) if VISIBLE in environment else [str(number) for number in range(int(mine or 1))]
    count = len(own) if not mine.isdecimal() else int(mine)  # NPROC_PER_NODE=gpu
    if theirs and (both := sorted(set(own) & set(theirs))):
        raise ConfigError(
            f"vllm_mode server: GPUs {','.join(both)} are in {VISIBLE} of this run and of its swift rollout. Give "
            "each its own."
        )
    device = "gpus" if theirs else "cpus"
    groups = {"train": {device: count}, "rollout": {device: sum(offer.num_workers for offer in offers)}}
    arguments = ["--use_ray", "true", "--device_groups", json.dumps(groups)]
    for name, value in (first.engine | _turns(first.turns, said)).items():
        arguments += [f"--{name}", value] if name not in said else []
    return arguments, {VISIBLE: ",".join([*own, *theirs])} if theirs else {}


def _turns(theirs: Mapping[str, str], said: Mapping[str, Any]) -> dict[str, str]:
    """The keys of turns that a run lacks.

    Raises:
        ConfigError: the run says something else, or does not name a plugin.
    """
    own = said.get(PLUGINS) or []
    known = {_place(str(file)) for files in (own if isinstance(own, list) else [own]) for file in str(files).split()}
    named = theirs.get(PLUGINS, "").split()
    if missing := [file for file in named if _place(file) not in known]:
        raise ConfigError(
            f"vllm_mode server: swift rollout has {PLUGINS} {', '.join(missing)}, which this run does not name. Write "
            f"{PLUGINS}: {' '.join([*map(str, known), *missing])} in the training command too."
        )
    found = {}
    for name, value in theirs.items():
        meant = ALIASES.get(name, ELSEWHERE.get(name, name))
        if name != PLUGINS and meant in said and said[meant] != plain(value):
            raise ConfigError(
                f"vllm_mode server: swift rollout has {name} {value}, and this run {said[meant]}. Write the same."
            )
        if name != PLUGINS and meant not in said:
            found[name] = value
    return found


def _place(model: str) -> str:
    """The folder of a model, or a file, whichever way it is written; a name of the hub as it is."""
    return str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model


def _ports(said: Mapping[str, Any]) -> list[int]:
    """The ports of the servers, if all of them are on this node; otherwise none."""
    if url := said.get("vllm_server_base_url"):
        parts = [urllib.parse.urlsplit(str(one)) for one in (url if isinstance(url, list) else [url])]
        hosts: list[Any] = [part.hostname for part in parts]
        ports: list[Any] = [part.port or PORT for part in parts]
    else:
        host, port = said.get("vllm_server_host"), said.get("vllm_server_port", PORT)
        hosts = host if isinstance(host, list) else [host]
        ports = port if isinstance(port, list) else [port] * len(hosts)
    ports = [plain(port) for port in ports]
    is_here = all(host in HERE for host in hosts) and all(type(port) is int for port in ports)
    return ports if is_here and len(ports) == len(hosts) else []


def _visible(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a command may use, as it was told, or all of the node."""
    if VISIBLE in environment:
        return [gpu.strip() for gpu in environment[VISIBLE].split(",") if gpu.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
