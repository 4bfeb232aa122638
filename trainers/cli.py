"""From a command line to a run: which trainer, where its roles run, and how a mistake ends.

    rayhelper grpo --config x.yaml --learning_rate 1e-5 --use_ray true
    rayhelper grpo --config x.yaml
    rayhelper rlhf --config x.yaml        # the file's rlhf_type says which
    rayhelper my_package.raft:RaftTrainer --config x.yaml

Which trainer a name stands for is ``commands.py``. Reading the configuration is
``configuration/reading/command_line.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rayhelper import ConfigError, DeviceGroups, PlacementError, RayHelper, RayHelperError, logs
from rayhelper.device_groups.keys import SHARE_KEY, SIZE_KEYS
from rayhelper.planning.role_kinds import RoleKind, declared_name, declared_roles, default_hosts
from rayhelper.text import nearest, parse_text
from trainers.commands import RLHF, Command, command_named, task_of
from trainers.configuration.completion import CompletionConfig
from trainers.configuration.mistakes import packages_fit
from trainers.configuration.reading.command_line import export_env, given_keys, load_config, read_config
from trainers.configuration.reading.given_keys import plain
from trainers.configuration.reading.secrets import masked
from trainers.configuration.reading.text import save_config
from trainers.configuration.shared import RunConfig, TrainConfig
from trainers.patches import notices_exit
from trainers.run.folder_lock import held
from trainers.run.going_on import going_on
from trainers.run.stopping import Stopped, ends_by_sigterm, ends_with_parent

TRACE = "trace.json.gz"
NO_BARS = frozenset({"TQDM_DISABLE", *logs.WITHOUT_PROGRESS})
TOLD_BY_FIRST_S = 10.0  # within which process 0 of torchrun finds a mistake that all of them find


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """Runs the trainer that ``name`` stands for; exits with 2 and one line on a mistake in name or configuration, with
    130 on Ctrl-C, and as ``Stopped`` says where a signal or a limit of time ended the run early."""
    is_of_torchrun = _num_processes() > 1
    parent = ends_with_parent() if is_of_torchrun else contextlib.nullcontext()
    with ends_by_sigterm(ends_process=is_of_torchrun), parent, _few_bars():
        _main(name, argv)


def _main(name: str, argv: Sequence[str] | None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        arguments = sys.argv[1:] if argv is None else argv
        with logs.apart(_log_level(arguments)), packages_fit():
            command = command_of(name, arguments)
            config, header = read_config(command.config_type, arguments, prog=f"{program_name()} {name}")
            _say_what_is_loaded(name, config)
            run(command.trainer, config, header)
    except (ConfigError, PlacementError) as error:
        _end(f"error: {error}", 2)
    except KeyboardInterrupt:
        _end("interrupted", 130)


def check_before_torchrun(name: str, arguments: Sequence[str], num_processes: int, *, is_first_node: bool) -> None:
    """Exits with 2 and one line on a mistake that each of the ``num_processes`` of torchrun would find.

    ``--help`` and ``--print_config`` print once and exit. What is only worth a warning, the processes say.
    """
    if not any(argument.startswith(("--help", "-h", "--print_config")) for argument in arguments):
        told = f"checking the configuration, before torchrun starts {num_processes} processes"
        print(told, file=sys.stderr, flush=True)
    as_process = {"TORCHELASTIC_RUN_ID": "none yet", "WORLD_SIZE": str(num_processes)}
    as_process["RANK"] = "0" if is_first_node else "1"  # which leaves output_dir to the first node
    before = {key: os.environ.get(key) for key in as_process}
    os.environ.update(as_process)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        command = command_of(name, arguments)
        config, _ = read_config(command.config_type, arguments, prog=f"{program_name()} {name}")
        os.environ.update({key: str(value) for key, value in config.env.items()})
        folder = getattr(config, "run_folder", None)
        with packages_fit(), contextlib.nullcontext() if folder is None else held(folder):
            _check_run(command.trainer, config, placement(command.trainer, config, num_processes))
    except (ConfigError, PlacementError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:
        logging.disable(level)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


@contextlib.contextmanager
def _few_bars() -> Iterator[None]:
    """Inside, only the first process shows progress; what the shell says holds. Of libraries ``logs`` decides."""
    hidden = NO_BARS - os.environ.keys() if _is_other_process() else frozenset()
    os.environ.update(dict.fromkeys(hidden, "1"))
    try:
        yield
    finally:
        for name in hidden:
            os.environ.pop(name, None)


def program_name() -> str:
    """How this process was started, as a usage line says it."""
    return "rayhelper" if os.path.basename(sys.argv[0]) == "rayhelper" else "python -m trainers"


def _say_what_is_loaded(name: str, config: Any) -> None:
    """The first line of a run, before anything large is imported."""
    if _is_other_process():
        return
    data = config.dataset if isinstance(config.dataset, str) else "as the file lists it"
    shown = masked({"model": config.model, "dataset": data})
    print(f"{name}: loading model {shown['model']}, data {shown['dataset']}", file=sys.stderr, flush=True)


def command_of(name: str, arguments: Sequence[str]) -> Command:
    """The trainer that the name stands for, once ``env`` is exported.

    Before torch is imported, and a module of a user's: libraries read OMP_NUM_THREADS, HF_HOME, ... then.
    """
    if name != RLHF and ":" not in name:
        found = command_named(name)  # which imports no torch, so that a misspelt name is told before the file is read
        export_env(arguments)
        task = task_of(given_keys(arguments, [])[0].values)
        return found if task is None else command_named(name, task_type=task)
    export_env(arguments)
    return command_named(name, plain(given_keys(arguments, [])[0].values.get("rlhf_type")))


def _log_level(arguments: Sequence[str]) -> str:
    """Before libraries are imported, some of which look once; what is wrong with it, the configuration says."""
    with contextlib.suppress(ConfigError):
        said = plain(given_keys(arguments, [])[0].values.get("log_level"))
        return said if isinstance(said, str) and said in logs.LEVELS else "passive"
    return "passive"


def uses_ray(arguments: Sequence[str]) -> bool:
    """Whether the arguments, or the file that they name, say ``use_ray``. Mistakes are reported by ``main``."""
    with contextlib.suppress(ConfigError):
        return plain(given_keys(arguments, [])[0].values.get("use_ray")) is True
    return False


def _end(message: str, code: int) -> NoReturn:
    """Writes the message and exits.

    Under torchrun process 0 tells what all would tell. The others wait for its end, at which torchrun ends them; who is
    not ended within a few seconds has something to tell that process 0 did not find.
    """
    if _is_other_process():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
        time.sleep(TOLD_BY_FIRST_S)
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)


def run(trainer: Any, config: Any, header: str | None = None) -> dict[str, float]:
    """The trainer's last metrics: in this process, or with its roles on device groups if ``use_ray`` or torchrun.

    It does the same as the command line: ``run(GRPOTrainer, GRPOConfig(..., use_ray=True))``. It checks the
    configuration, logs ``header``, starts the workers, trains, and stops the workers. With ``use_ray=False`` it is
    ``GRPOTrainer(config).train()`` after the checks.

    Raises:
        ConfigError: a mistake in the configuration, or another run in its ``output_dir``, found before anything starts.
        Stopped: a signal or ``save_before_s`` ended the run early; it is saved.
    """
    folder = getattr(config, "run_folder", None)
    with contextlib.nullcontext() if folder is None or _is_other_process() else held(folder):
        return _run(trainer, config, header)


def _run(trainer: Any, config: Any, header: str | None) -> dict[str, float]:
    os.environ.update({name: str(value) for name, value in config.env.items()})
    num_processes = _num_processes()
    keeping = _logging(config, f"rank-{os.environ['RANK']}" if num_processes > 1 else "driver")
    if config.use_ray and num_processes > 1:
        raise ConfigError(
            f"torchrun started {num_processes} processes, each of which would start the workers of use_ray. Start one "
            "process for Ray, or let torchrun's processes be the workers: --use_ray false"
        )
    if not config.use_ray and num_processes == 1:
        _check_run(trainer, config, None)
        limits, trace = _limits(trainer, config), _trace(config)
        if config.device_groups is not None:
            what = "is not used" if limits is None else "is used for timeout_s alone"
            logging.getLogger(__name__).info("device_groups %s, because use_ray is false", what)
        _tell(header)
        if limits is None and trace is not None:
            limits = placement(trainer, config)
        with keeping, contextlib.nullcontext() if limits is None else _session(limits, trace, runtime="off"):
            return _trained(trainer, config)
    groups = placement(trainer, config, num_processes)
    _check_run(trainer, config, groups)
    _tell(header)
    if num_processes > 1:
        with keeping, _session(groups, _trace(config), runtime="torchrun"):
            return _trained(trainer, config)

    def on_ray(config: Any) -> dict[str, float]:
        session = _session(groups, _trace(config), ray_address=config.ray_address)
        with session, ends_by_sigterm():  # Ray has put its own
            return _trained(trainer, config)

    with keeping:
        return going_on(config, on_ray)


@contextlib.contextmanager
def _logging(config: Any, process: str) -> Iterator[None]:
    """Inside, lines of logging go where ``log_level`` says, and into a file in the folder of the run."""
    folder = getattr(config, "run_folder", None)
    keeping = contextlib.nullcontext() if folder is None else logs.kept(folder / "logs", process)
    with logs.apart(config.log_level) if isinstance(config, RunConfig) else contextlib.nullcontext(), keeping:
        yield


def _trace(config: Any) -> Path | None:
    """The file of the timeline, in a folder that is there; None: none is asked for."""
    if not isinstance(config, RunConfig) or not config.trace:
        return None
    config.run_folder.mkdir(parents=True, exist_ok=True)
    return Path(config.run_folder) / TRACE


@contextlib.contextmanager
def _session(groups: DeviceGroups, trace: Path | None, **options: Any) -> Iterator[None]:
    """``RayHelper.session``, which tells where its timeline is."""
    with RayHelper.session(groups, trace=trace, **options):
        yield
    if trace is not None and not _is_other_process():
        told = "the timeline is in %s; rayhelper timeline %s --html timeline.html draws it"
        logging.getLogger(__name__).info(told, trace, trace)


def _limits(trainer: Any, config: Any) -> DeviceGroups | None:
    """With Ray off, the groups whose ``timeout_s`` holds for calls in this process; None: there is no such limit."""
    groups = None if config.device_groups is None else DeviceGroups.parse(config.device_groups)
    if config.timeout_s is None and (groups is None or not groups.have_limits):
        return None
    return placement(trainer, config)


def _trained(trainer: Any, config: Any) -> dict[str, float]:
    """The trainer's last metrics. Whatever calls sys.exit() or os._exit(0) meanwhile, the run has not ended well."""
    try:
        with notices_exit():
            return dict(trainer(config).train())
    except Stopped:
        raise
    except SystemExit as error:
        raise RuntimeError(
            f"something in the run called sys.exit({error.code!r}); the lines above show where"
        ) from error


def _num_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def _is_other_process() -> bool:
    """Whether this is one of torchrun's processes, and not the first."""
    return _num_processes() > 1 and int(os.environ["RANK"]) > 0


def _tell(header: str | None) -> None:
    if header is not None and not _is_other_process():
        logging.getLogger(__name__).info(header)


def _check_run(trainer: Any, config: Any, groups: DeviceGroups | None) -> None:
    """Lets the trainer say what is wrong before anything starts. One without ``check`` has that of the shared keys."""
    if hasattr(trainer, "check"):
        trainer.check(config, groups)
    else:
        _check_shared(trainer, config, groups)
    if isinstance(config, TrainConfig):
        from trainers.parts.model_checks import check_weights

        check_weights(config, groups)


def _check_shared(trainer: Any, config: Any, groups: DeviceGroups | None) -> None:
    from trainers.parts import check_before_start, check_completions, check_rewards

    if isinstance(config, TrainConfig):
        check_before_start(config, groups)
    if isinstance(config, CompletionConfig) and {"train", "rollout"} <= set(trainer.__rayhelper_roles__):
        check_completions(config, groups)
        if functions := getattr(config, "reward_funcs", None):
            check_rewards(config, functions)


def placement(trainer: Any, config: Any, num_processes: int = 1) -> DeviceGroups:
    """The device groups of a run: those of the configuration, or all roles in one group of ``num_processes`` workers.

    ``timeout_s`` and ``env`` of the configuration hold for every group that does not say otherwise, ``timeout_s`` also
    for the driver (reward functions).

    Raises:
        ConfigError: a mistake in them, a role of the trainer that no group hosts, or a group that nobody would use.
    """
    roles = trainer.__rayhelper_roles__
    if config.device_groups is not None:
        hosts = default_hosts(trainer)
        named = with_our_roles(config.device_groups, roles, declared_roles(trainer))
        groups = DeviceGroups.parse(named, known_roles=[role for role in roles if role not in hosts])
        groups = groups.with_default_hosts(hosts)
        idle = [role for role in groups.roles if role not in roles]
        if idle and not config.external_plugins:  # classes of plugins may have roles too
            raise ConfigError(
                f"device_groups hosts {', '.join(map(repr, idle))}, but {trainer.__name__} has only the roles "
                f"{', '.join(roles)}{nearest(idle[0], roles)}. The devices would be idle: remove it."
            )
        for group in groups.groups:
            if num_processes > 1 and (group.env or group.restarts):
                raise ConfigError(
                    f"group {group.name!r} has {'env' if group.env else 'restarts'}, which torchrun's processes cannot "
                    "have: they are started already. Remove it (env at the top level holds for all), or use Ray."
                )
    else:
        import torch

        groups = DeviceGroups.single(roles, "GPU" if torch.cuda.is_available() else "CPU", num_processes)
    shared = {name: str(value) for name, value in config.env.items()}
    completed = [
        dataclasses.replace(
            group,
            timeout_s=config.timeout_s if group.timeout_s is None else group.timeout_s,
            env=tuple((shared | dict(group.env)).items()),
        )
        for group in groups.groups
    ]
    driver = config.timeout_s if groups.driver_timeout_s is None else groups.driver_timeout_s
    return dataclasses.replace(groups, groups=tuple(completed), driver_timeout_s=driver)


def with_our_roles(device_groups: Any, roles: Sequence[str], declared: Mapping[str, RoleKind]) -> Any:
    """The same groups, other names of roles replaced by the trainer's: ``rlhf:default``, ``default``, ``ref``."""
    groups = parse_text(device_groups, "device_groups") if isinstance(device_groups, str) else device_groups
    if not isinstance(groups, Mapping):
        return device_groups
    if "device_groups" in groups:
        return {**groups, "device_groups": with_our_roles(groups["device_groups"], roles, declared)}

    def ours(role: Any) -> Any:
        if not isinstance(role, str):
            return role
        bare = role.rpartition(":")[2]
        return next((name for name in (role, bare, declared_name(bare, declared)) if name in roles), role)

    named: dict[Any, Any] = {}
    for name, section in groups.items():
        if isinstance(section, Mapping) and "workers" in section:
            workers = section["workers"]
            workers = [ours(role) for role in workers] if isinstance(workers, list) else ours(workers)
            named[name] = {**section, "workers": workers}
        elif isinstance(section, Mapping) and SHARE_KEY in section:
            named[ours(name)] = {**section, SHARE_KEY: ours(section[SHARE_KEY])}
        elif isinstance(section, Mapping) and any(key in section for key in SIZE_KEYS):
            named[ours(name)] = section
        elif name == "colocate_groups" and isinstance(section, list):
            named[name] = [[ours(role) for role in group] if isinstance(group, list) else group for group in section]
        else:
            named[name] = section
    return named


__all__ = ["RayHelperError", "load_config", "main", "placement", "run", "save_config"]
