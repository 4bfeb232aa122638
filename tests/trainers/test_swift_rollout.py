"""``swift rollout`` gives its GPUs and its engine's keys to the run that asks, and to one run at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhelper import ConfigError
from rayhelper.device_groups import DeviceGroups
from tests import warm
from trainers import swift_rollout
from trainers.cli import load_config
from trainers.grpo.config import GRPOConfig
from trainers.swift_rollout import Offer, answering, asked, engine_of_server

ROOT = Path(__file__).resolve().parents[2]
TWO = {"CUDA_VISIBLE_DEVICES": "6,7"}
SERVER = {"use_vllm": "true", "vllm_mode": "server", "vllm_server_host": "127.0.0.1", "model": "m"}
SIX = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5", "NPROC_PER_NODE": "6"}


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_offer_is_read_as_ms_swift_reads_the_command() -> None:
    words = ["--model", "m", "--vllm_tensor_parallel_size", "2", "--vllm_max_model_len", "512", "--port", "1"]
    assert Offer.of(words, TWO) == Offer(
        "m", ["6", "7"], 2, {"vllm_tensor_parallel_size": "2", "vllm_max_model_len": "512"}
    )
    assert Offer.of(["--model", "m", "--vllm_use_async_engine", "true"], TWO) == Offer("m", ["6"], 1, {})
    for name in ("vllm_data_parallel_size", "data_parallel_size"):
        assert Offer.of(["--model", "m", f"--{name}", "2"], TWO).num_workers == 2
    assert Offer.of(["--model", "m"], {}).gpus == []  # none on this machine


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "--model must be given"),
        (["--model", "m", "--vllm_data_parallel_size", "3"], "needs 3 GPUs, and there are 2: 6,7"),
        (["--model", "m", "--vllm_tensor_parallel_size", "0"], "must be a whole number above 0"),
        (["--model", "m", "--lora_rank", "8", "--template", "t"], "lora_rank, template: not a key of an engine"),
        (["--model", "m", "--multi_turn_scheduler", "os:system"], "os:system is not the name of a scheduler"),
        (["--model", "m", "--host", "10.0.0.1"], "answers on this node only"),
    ],
)
def test_what_no_engine_reads_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Offer.of(words, TWO)


def test_a_run_plays_the_turns_of_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ms-swift's frozen_lake_server.sh: the server's command says the turns. Files are those of the run alone."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text("")
    words = f"--model m --multi_turn_scheduler gym_scheduler --gym_env lake --max_turns 10 --external_plugins {plugin}"
    offer = Offer.of(words.split(), TWO)
    assert offer.engine == {}
    with serving(answering(offer, 0)) as port:
        assert asked(port, 0) == offer
    with_offers(monkeypatch, at8000=offer)
    with pytest.raises(ConfigError, match=r"Write external_plugins: .* in the training command"):
        engine_of_server(SERVER, SIX)
    named = SERVER | {"external_plugins": str(plugin)}
    arguments, _ = engine_of_server(named | {"max_turns": "10"}, SIX)
    assert arguments[4:] == ["--multi_turn_scheduler", "gym_scheduler", "--gym_env", "lake"]
    with pytest.raises(ConfigError, match="has max_turns 10, and this run 9"):
        engine_of_server(named | {"max_turns": "9"}, SIX)


def test_one_run_at_a_time_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    offer, mine = Offer("m", ["6"], 1, {"vllm_max_model_len": "9"}), os.getpid()
    with serving(answering(offer, 0)) as port:
        assert asked(port, 0) == offer
        assert asked(port, 0) == offer  # the same run
        another = os.getppid()
        monkeypatch.setattr(swift_rollout.os, "getpid", lambda: another)
        with pytest.raises(ConfigError, match=f"in use by process {mine}"):
            asked(port, 0)


def test_it_waits_for_a_run_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with serving(answering(Offer("m", ["6"], 1, {}), 0)) as port:
        with monkeypatch.context() as patch:
            patch.setattr(swift_rollout.os, "getpid", lambda: ended.pid)
            asked(port, 0)
        assert asked(port, 0).gpus == ["6"]


class Another(BaseHTTPRequestHandler):
    """A server of another kind, as ms-swift's own is."""

    said = b"[]"

    def do_GET(self) -> None:
        self.send_response(200 if self.said else 404)
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.parametrize("said", [b"", b"[]", b'{"detail": 1}', b"\xff", b"hello"])
def test_another_program_at_the_port_is_named(said: bytes) -> None:
    handler = type("Says", (Another,), {"said": said})
    with (
        serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port,
        pytest.raises(ConfigError, match=f"127.0.0.1:{port} is not rayhelper swift rollout"),
    ):
        asked(port, 0)


def test_nobody_at_the_port_ends_after_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"Start rayhelper swift rollout --model MODEL --port {port}"):
        asked(port, 0.01)
    assert f"waiting up to 0.01 s for swift rollout at 127.0.0.1:{port}" in capsys.readouterr().err


def with_offers(monkeypatch: pytest.MonkeyPatch, **offers: Offer) -> None:
    monkeypatch.setattr(swift_rollout, "asked", lambda port, wait_s: offers[f"at{port}"])


def test_a_run_has_the_devices_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Offer("m", ["6", "7"], 2, {"vllm_tensor_parallel_size": "2", "vllm_max_model_len": "512"})
    with_offers(monkeypatch, at8000=offer)
    arguments, variables = engine_of_server(SERVER | {"vllm_max_model_len": "99"}, SIX)
    assert variables == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    words = ["--model", "m", "--dataset", "d", "--reward_funcs", "exact_answer", "--vllm_max_model_len", "99"]
    words += [word for name, value in SERVER.items() if name != "model" for word in (f"--{name}", value)]
    config = load_config(GRPOConfig, [*words, *arguments, "--defaults", "ms-swift", "--max_completion_length", "9"])
    groups = DeviceGroups.parse(config.device_groups)
    assert config.use_ray
    assert config.rollout_engine == "vllm"
    assert (config.vllm_tensor_parallel_size, config.vllm_max_model_len) == (2, 99)
    assert (groups.group_of("train").num_workers, groups.group_of("rollout").num_workers) == (6, 2)
    assert not groups.share_devices("train", "rollout")


def test_several_servers_are_one_role(monkeypatch: pytest.MonkeyPatch) -> None:
    with_offers(monkeypatch, at1=Offer("m", ["6"], 1, {}), at2=Offer("m", ["7"], 1, {}))
    keys = SERVER | {"vllm_server_host": ["127.0.0.1", "localhost"], "vllm_server_port": ["1", "2"]}
    arguments, variables = engine_of_server(keys, SIX)
    assert '"rollout": {"gpus": 2}' in arguments[3]
    assert variables["CUDA_VISIBLE_DEVICES"].endswith("5,6,7")
    urls = SERVER | {"vllm_server_base_url": ["http://localhost:1", "http://127.0.0.1:2"]}
    assert engine_of_server(urls, SIX) == (arguments, variables)
    with_offers(monkeypatch, at1=Offer("m", ["6"], 1, {}), at2=Offer("m", ["7"], 1, {"vllm_max_model_len": "1"}))
    with pytest.raises(ConfigError, match="the servers' keys differ"):
        engine_of_server(keys, SIX)


def test_without_gpus_roles_have_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_offers(monkeypatch, at8000=Offer("m", [], 1, {}))
    arguments, variables = engine_of_server(SERVER, {})
    assert arguments[3] == '{"train": {"cpus": 1}, "rollout": {"cpus": 1}}'
    assert variables == {}


def test_one_folder_may_be_written_in_several_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with_offers(monkeypatch, at8000=Offer.of(["--model", "model"], {"CUDA_VISIBLE_DEVICES": "7"}))
    assert engine_of_server(SERVER | {"model": str(tmp_path / "model")}, SIX)[0]
    with pytest.raises(ConfigError, match="and this run trains"):
        engine_of_server(SERVER | {"model": str(tmp_path / "other")}, SIX)


def test_what_does_not_fit_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_offers(monkeypatch, at8000=Offer("m", ["5"], 1, {}))
    with pytest.raises(ConfigError, match="GPUs 5 are in CUDA_VISIBLE_DEVICES of this run and of its swift rollout"):
        engine_of_server(SERVER, SIX)
    with pytest.raises(ConfigError, match="swift rollout has model m, and this run trains other"):
        engine_of_server(SERVER | {"model": "other"}, SIX)


@pytest.mark.parametrize(
    ("keys", "environment"),
    [
        ({"vllm_mode": "colocate"}, {}),
        ({"use_vllm": "false"}, {}),
        ({"use_ray": "true"}, {}),
        ({"device_groups": "{}"}, {}),
        ({"vllm_server_host": "10.0.0.1"}, {}),
        ({"vllm_server_host": ["127.0.0.1", "10.0.0.1"]}, {}),
        ({"vllm_server_base_url": "http://node-7:8000"}, {}),
        ({}, {"NNODES": "2"}),
        ({}, {"TORCHELASTIC_RUN_ID": "r"}),
    ],
)
def test_other_engines_ask_nobody(keys: dict[str, Any], environment: dict[str, str]) -> None:
    assert engine_of_server(SERVER | keys, SIX | environment) == ([], {})


def test_a_server_is_a_device_group_of_role_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "model: m\ndataset: d\nreward_funcs: [exact_answer]\nuse_vllm: true\nuse_ray: true\nvllm_mode: server\n"
    text += "vllm_server_host: 10.0.0.1\n"
    path = tmp_path / "x.yaml"
    path.write_text(text + "device_groups: {train: {gpus: 2}, rollout: {gpus: 1}}")
    with caplog.at_level(logging.INFO):
        load_config(GRPOConfig, ["--config", str(path)])
    assert "vllm_mode, vllm_server_host (role rollout has its own device group)" in caplog.text
    colocated = "device_groups: {colocate_groups: [[train, rollout]], train: {gpus: 2}, rollout: {gpus: 2}}"
    for groups in ("", colocated):
        path.write_text(text + groups)
        with pytest.raises(ConfigError, match="vllm_mode and vllm_server_host are not supported"):
            load_config(GRPOConfig, ["--config", str(path)])


def test_both_commands_meet(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    start = [warm.python(), "-m", "trainers"]
    words = ["swift", "rollout", "--model", "m", "--port", "0", "--vllm_max_model_len", "64"]
    server = subprocess.Popen([*start, *words], env=environment | TWO, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("holding GPUs 6 at 127.0.0.1:")
        port = line.partition("127.0.0.1:")[2].split()[0]
        run = ["swift", "rlhf", "--rlhf_type", "grpo", "--dataset", "d", "--reward_funcs", "accuracy"]
        run += ["--vllm_server_port", port, "--max_completion_length", "8", "--print_config"]
        run += [word for name, value in SERVER.items() for word in (f"--{name}", value)]
        done = subprocess.run([*start, *run], capture_output=True, text=True, env=environment | SIX, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    finally:
        server.terminate()
        server.communicate()
    config = yaml.safe_load(done.stdout)
    assert (config["use_ray"], config["device_groups"]["rollout"]) == (True, {"gpus": 1})
    assert config["vllm_max_model_len"] == 64
    assert "with the devices of swift rollout" in done.stderr
