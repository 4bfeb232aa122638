"""Writes steps.json: what ms-swift itself logs for the first steps of its own example commands.

python -m venv FOLDER && FOLDER/bin/pip install torch==2.13.0 transformers==5.17.0 \
    -r benchmarks/real/swift-requirements.txt
FOLDER/bin/python -m tests.golden.ms_swift.record_steps PATH_TO_MS_SWIFT > tests/golden/ms_swift/steps.json

Each command is a script of ms-swift's ``examples``, changed in model, data, devices, precision and number of steps
alone (``CHANGED``). Adapters and heads begin as ours do, because two generators of random numbers draw otherwise. Rows
keep their order; where ms-swift shuffles all the same, each step has all rows. GRPO gets ``completions``. A process of
its own runs each command, on the CPU; ``sdpa`` stands in for FlashAttention.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ms_swift_commands.shell import commands_of, launched
from benchmarks.tiny.text import tiny_model, tiny_tokenizer

Row = dict[str, Any]
NUM_STEPS = 4
MOST_ACCUMULATED = 4
WHOLE = 5  # rows: 4 in each step, whatever their order, and one to evaluate
CHANGED: dict[str, list[str]] = {  # of every command
    "torch_dtype": ["float32"],
    "max_steps": [str(NUM_STEPS)],
    "logging_steps": ["1"],
    "dataset_shuffle": ["false"],
    "train_dataloader_shuffle": ["false"],
    "dataloader_num_workers": ["0"],
    "dataset_num_proc": ["1"],
    "eval_steps": ["2"],
    "save_steps": [str(NUM_STEPS)],
    "report_to": ["none"],
}
SECONDS = ("_runtime", "per_second", "step_time")  # which no two runs share
ONLY_ON_GPUS = ("deepspeed", "attn_impl", "use_liger_kernel", "output_dir")
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
CHAT_TEMPLATE = (  # as Qwen2.5's: a system turn of its own stands before conversations that have none
    "{%- if messages[0]['role'] != 'system' -%}{{- '<|im_start|>system\\n" + SYSTEM + "<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
WORDS = "one two three four five six seven eight nine ten".split()


GRPO = "grpo/internal/transformers.sh"
GIVEN: dict[str, list[str]] = {  # of GRPO with ``completions``
    "system": ["Think."],
    "max_completion_length": ["64"],
    "learning_rate": ["1e-3"],
}
OF_GRPO: dict[str, dict[str, list[str]]] = {  # whose loss is that of the script but for these
    "beta": {"beta": ["0.5"]},
    "bnpo": {"loss_type": ["bnpo"]},
    "dr_grpo": {"loss_type": ["dr_grpo"]},
    "cispo": {"loss_type": ["cispo"], "epsilon_high": ["5"]},
    "sapo": {"loss_type": ["sapo"], "tau_pos": ["1.0"], "tau_neg": ["1.05"]},
    "gspo": {"importance_sampling_level": ["sequence"], "epsilon": ["3e-4"], "epsilon_high": ["4e-4"], "beta": ["0"]},
    "iterations": {"num_iterations": ["2"]},
    "padding_free": {"padding_free": ["true"]},
    "full": {"tuner_type": ["full"], "beta": ["0.5"]},
    "packing": {"packing": ["true"], "max_steps": ["3"]},
    "quantile": {"top_entropy_quantile": ["0.5"], "num_iterations": ["2"]},
}
GKD = "rlhf/gkd/full.sh"
TWICE = {"beta": ["0.5"], "num_iterations": ["2"]}
FAST = {"learning_rate": ["1e-3"], "gradient_accumulation_steps": ["1"], "max_steps": ["3"]}
ALL_ROWS = FAST | {"per_device_train_batch_size": ["4"]}  # in each step
TWO_AND_TWO = FAST | {"per_device_train_batch_size": ["2"], "gradient_accumulation_steps": ["2"], "max_steps": ["2"]}
LOSSES = {
    "loss_type": "hinge nca_pair sppo_hard apo_zero apo_down exo_pair robust sigmoid".split(),
    "loss_weights": "1 2 0.1 1 1 1 1 0.5".split(),
    "label_smoothing": ["0.1"],
}
SORTED = {
    "max_steps": ["2"],
    "loss_type": ["aot", "aot_unpaired"],
    "loss_weights": ["1", "0.5"],
    "label_smoothing": ["0.1"],
}
MIXED = {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": ["0.8", "0.2"]}
UNSPLIT = {"split_dataset_ratio": ["0"]}
WEIGHTS = {"desirable_weight": ["2"], "undesirable_weight": ["0.5"], "beta": ["0.3"], **UNSPLIT}


@dataclass(frozen=True)
class Case:
    """A command: ``script`` below ``examples/train``, the kind of its rows, and what else is ``changed``."""

    script: str
    rows: str
    changed: Mapping[str, list[str]] = field(default_factory=dict)
    number: int = 40  # rows
    environment: Mapping[str, str] = field(default_factory=dict)

    def words(self, ms_swift: Path) -> list[str]:
        """The command, with {model} and {data} where its own stood."""
        script = (ms_swift / "examples/train" / self.script).read_text(encoding="utf-8")
        command = next(found for one in commands_of(script) if (found := launched(one)))
        options: dict[str, list[str]] = {}
        for word in command.words[2:]:
            if word.startswith("--"):
                options[word[2:]] = []
            else:
                options[next(reversed(options))].append(word)
        for name in ONLY_ON_GPUS:
            options.pop(name, None)
        options.pop("num_train_epochs", None)
        options |= {"model": ["{model}"], "dataset": ["{data}"], **CHANGED}
        if "teacher_model" in options:
            options["teacher_model"] = ["{teacher}"]
        if options.get("tuner_type", ["lora"]) == ["lora"]:
            options["lora_dropout"] = ["0"]
        cut = min(int(options.get("gradient_accumulation_steps", ["1"])[0]), MOST_ACCUMULATED)
        options["gradient_accumulation_steps"] = [str(cut)]
        options |= self.changed
        return [*command.words[:2], *(word for name, values in options.items() for word in (f"--{name}", *values))]


CASES = {
    "sft_lora": Case("lora_sft.sh", "alpaca"),
    "sft_full": Case("full/train.sh", "alpaca"),
    "sft_dft": Case("full/dft.sh", "messages", {"gradient_accumulation_steps": ["2"]}),
    "sft_scale": Case("agent/loss_scale/train.sh", "calls"),
    "sft_padding_free": Case("padding_free/sft.sh", "messages"),
    "sft_packed": Case("packing/llm.sh", "alpaca", {"max_length": ["256"]}, number=9),
    "pretrain": Case("pretrain/train.sh", "pt", {"max_length": ["128"]}, number=200),
    "cls": Case("seq_cls/qwen2_5/sft.sh", "cls"),
    "embedding": Case(
        "embedding/qwen3/qwen3_emb.sh",
        "embedding",
        {"split_dataset_ratio": ["0.2"]},
        environment={"INFONCE_TEMPERATURE": "0.1"},
    ),
    "dpo_lora": Case("rlhf/dpo/lora.sh", "pairs"),
    "dpo_full": Case("rlhf/dpo/full.sh", "pairs"),
    "dpo_packed": Case("packing/dpo.sh", "pairs", {"max_length": ["256"]}),
    "kto": Case("rlhf/kto.sh", "kto", {"gradient_accumulation_steps": ["2"], "split_dataset_ratio": ["0"]}, number=2),
    "orpo": Case("rlhf/orpo.sh", "pairs", number=WHOLE),
    "cpo": Case("rlhf/cpo.sh", "pairs", number=WHOLE),
    "simpo": Case("rlhf/simpo.sh", "pairs", number=WHOLE),
    "rm": Case("rlhf/rm/train.sh", "pairs", number=WHOLE),
    "grpo": Case(GRPO, "prompts", {"system": ["Think."], "max_completion_length": ["64"]}, number=1),
    **{f"grpo_{name}": Case(GRPO, "prompts", GIVEN | changed, number=1) for name, changed in OF_GRPO.items()},
    "grpo_chunks": Case(GRPO, "prompts", GIVEN | {"steps_per_generation": ["2"], "beta": ["0.1"]}, number=2),
    **{
        f"grpo_{name}": Case(GRPO, "prompts", GIVEN | TWICE | {"advantage_estimator": [name]}, number=1)
        for name in ("rloo", "reinforce_plus_plus")
    },
    "gkd": Case("rlhf/gkd/full.sh", "messages", {"lmbda": ["0"]}, number=WHOLE),
    "gkd_topk": Case(GKD, "messages", FAST | {"lmbda": ["0"], "gkd_logits_topk": ["5"], "beta": ["0.3"]}, WHOLE),
    "gkd_sft": Case(
        GKD, "messages", FAST | {"lmbda": ["0"], "sft_alpha": ["0.5"], "beta": ["1"], "temperature": ["0.5"]}, WHOLE
    ),
    "dpo_losses": Case("rlhf/dpo/full.sh", "pairs", TWO_AND_TWO | LOSSES, WHOLE),
    "dpo_sorted": Case("rlhf/dpo/full.sh", "pairs", ALL_ROWS | SORTED, WHOLE),
    "dpo_mixed": Case("rlhf/dpo/lora.sh", "pairs", ALL_ROWS | MIXED | UNSPLIT, 4),
    "kto_weights": Case("rlhf/kto.sh", "kto", FAST | {"gradient_accumulation_steps": ["2"]} | WEIGHTS, 2),
    "kto_apo": Case("rlhf/kto.sh", "kto", ALL_ROWS | {"loss_type": ["apo_zero_unpaired"], **UNSPLIT}, 4),
    "rm_centred": Case("rlhf/rm/train.sh", "margins", ALL_ROWS | {"center_rewards_coefficient": ["0.1"]}, WHOLE),
}


def counted(i: int, times: int) -> str:
    return " ".join(WORDS[: 1 + times * i % 7])


def rows_of(kind: str, number: int) -> list[Row]:
    """Rows in a form that ms-swift reads for commands of that kind."""
    rows: list[Row] = []
    for i in range(number):
        good, bad, question = counted(i, 5), counted(i, 3), f"Count to {i}."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": good}]
        if kind == "alpaca":
            rows.append({"instruction": question, "input": "Aloud." * (i % 3 == 0), "output": good})
        elif kind == "messages":
            rows.append({"messages": turns})
        elif kind == "calls":
            call = f'<tool_call>\n{{"name": "count", "arguments": {{"to": {i}}}}}\n</tool_call>'
            answer = {"role": "assistant", "content": f"{good}. {call}" if i % 2 else good}
            rows.append({"messages": [turns[0], answer, turns[0], turns[1]]})
        elif kind == "pt":
            rows.append({"messages": [{"role": "assistant", "content": counted(3, 3)}]})  # alike, in any order
        elif kind == "pairs":
            rows.append({"messages": turns, "rejected_response": f"{bad}!"})
        elif kind == "margins":
            rows.append({"messages": turns, "rejected_response": f"{bad}!", "margin": i % 3 / 2})
        elif kind == "kto":
            rows.append({"messages": turns, "label": i % 3 != 0})
        elif kind == "cls":
            rows.append({"messages": turns[:1], "label": i % 2})
        elif kind == "embedding":
            rows.append({"messages": turns[:1], "positive_messages": [[{"role": "user", "content": good}]]})
        elif kind == "prompts":
            rows.append({"messages": turns[:1], "solution": str(i)})
    return rows


def completions(number: int) -> list[str]:
    """Answers to "Count to 0.", some right, some in the form that is asked for."""
    tags = [f"<think>{counted(k, 2)}</think> <answer>{k % 2}</answer>" for k in range(number)]
    return [text if k % 3 else f"It is \\boxed{{{k % 2}}}" for k, text in enumerate(tags)]


def prepare(case: Case, folder: Path) -> dict[str, str]:
    """Writes model, teacher and rows; the values of {model}, {teacher} and {data}."""
    named = {"model": folder / "Qwen2.5-7B-Instruct", "teacher": folder / "teacher/Qwen2.5-7B-Instruct"}
    for seed, path in enumerate(named.values()):
        tiny_model(seed, family="qwen2").save_pretrained(path)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(path)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(case.rows, case.number)), encoding="utf-8")
    return {"data": str(data), **{name: str(path) for name, path in named.items()}}


def filled(words: list[str], named: Mapping[str, str]) -> list[str]:
    return [word.format(**named) if word[:1] == "{" and word[1:-1] in named else word for word in words]


def run_theirs(words: list[str], output: Path) -> list[Row]:
    """What ms-swift logs, in this process."""
    import swift.pipelines
    from swift.arguments import SftArguments
    from swift.callbacks import TrainerCallback, callbacks_map
    from swift.infer_engine.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
        RolloutOutput,
        UsageInfo,
    )
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

    from trainers.backends.fresh_weights import adapter_a, value_head

    class Begun(TrainerCallback):
        def __init__(self, args: Any, trainer: Any) -> None:
            self.trainer = trainer

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            model = self.trainer.model
            for name, weight in model.named_parameters():
                if "lora_A" in name:
                    ours = name.replace(".default.", ".")
                    if "embedding" in words:  # the model without its head
                        ours = ours.replace("base_model.model.model.", "base_model.model.")
                    weight.data.copy_(adapter_a(ours, tuple(weight.shape), args.seed))
                elif name.endswith(("score.weight", "score.modules_to_save.default.weight")):
                    head = value_head(weight.shape[1], model.config.initializer_range, args.seed, weight.shape[0])
                    weight.data.copy_(head)

    def packs(self: Any) -> None:  # without FlashAttention: transformers' sdpa keeps documents apart by positions too
        self.padding_free = self.padding_free or self.packing

    def rollout(self: Any, samples: list[Any], *_: Any) -> list[Any]:
        texts = completions(len(samples))
        ended = [self.processing_class(text)["input_ids"] + [self.processing_class.eos_token_id] for text in texts]
        said = [ChatMessage(role="assistant", content=text) for text in texts]
        choices = [
            ChatCompletionResponseChoice(0, one, "stop", token_ids=ids) for one, ids in zip(said, ended, strict=True)
        ]
        return [RolloutOutput(response=ChatCompletionResponse("tiny", [one], UsageInfo(0, 0, 0))) for one in choices]

    RolloutTrainerMixin._colocate_rollout = rollout
    callbacks_map["begun"] = Begun
    SftArguments._check_padding_free = packs
    main = getattr(swift.pipelines, {"pt": "pretrain_main"}.get(words[1], f"{words[1]}_main"))
    main([*words[2:], "--output_dir", str(output), "--add_version", "false", "--callbacks", "begun"])
    lines = (output / "logging.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def logged_by(case: Case, words: list[str]) -> Row:
    """What ms-swift logs of these words, in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if not child:
            try:
                os.environ.update(case.environment)
                os.dup2(2, 1)
                found = run_theirs(filled(words, prepare(case, folder)), folder / "output")
                (folder / "found.json").write_text(json.dumps(found))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    steps = [line for line in found[-1]["log_history"] if "train_loss" not in line]
    logged = [{name: value for name, value in line.items() if not name.endswith(SECONDS)} for line in steps]
    return {"words": words, "environment": dict(case.environment), "logged": logged}


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    import swift.pipelines  # noqa: F401 - once, before the processes part

    ms_swift, chosen = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    print(json.dumps({name: logged_by(CASES[name], CASES[name].words(ms_swift)) for name in chosen}))


if __name__ == "__main__":
    main()
