"""How fast is the continuous batching of transformers, beside vLLM and beside a decoding step without a host?

    python -m benchmarks.gpu.continuous_batching [--shapes smollm2-135m] [--tokens 256] [--limit_s 240] [--json FILE]

512 sequences (32 prompts of 16 tokens, 16 completions each) decode ``tokens`` tokens, no stop tokens, random weights,
bfloat16. A system that needs more than ``limit_s`` is a row too, with the seconds of the calls that it ended.
transformers: ``model.generate_batch`` with its log-probabilities, in the settings of ``SETTINGS``; the first call
captures CUDA graphs, the faster of two more is reported. vLLM: ``logprobs=0``, its own CUDA graphs, the same calls.
Reported: seconds, milliseconds for each decoding step, seconds of the first call, peak memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import saved_apart
from benchmarks.origin import origin

PROMPTS, SAMPLES, PROMPT_TOKENS = 32, 16, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "graphs, compiled": {"use_cuda_graph": True, "default_compile_level": 2},
    "graphs, asynchronous": {"use_cuda_graph": True, "use_async_batching": True},
    "no graphs": {"use_cuda_graph": False},
}


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


def of_transformers(folder: str, setting: str, tokens: int) -> dict[str, Any]:
    """Measures one of SETTINGS in this process."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    generation = GenerationConfig(max_new_tokens=tokens, do_sample=True, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(return_logprobs=True, **SETTINGS[setting])
    inputs = [ids for ids in prompts(model.config.vocab_size) for _ in range(SAMPLES)]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        outputs = model.generate_batch(inputs, generation, batching, persistent_manager=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        print("CALL", seconds[-1], flush=True)
    lengths = {len(output.generated_tokens) for output in outputs.values()}
    assert len(outputs) == PROMPTS * SAMPLES, f"{len(outputs)} completions"
    assert lengths == {tokens}, f"completions of {lengths} tokens"
    return {"seconds": min(seconds[1:]), "first_s": seconds[0], "attention": model.config._attn_implementation}


def of_vllm(folder: str, tokens: int) -> dict[str, Any]:
    import vllm

    engine = vllm.LLM(folder, dtype="bfloat16", max_model_len=512, max_num_seqs=512, gpu_memory_utilization=0.6)
    sampling = vllm.SamplingParams(
        n=SAMPLES, max_tokens=tokens, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
    )
    vocabulary = engine.model_config.get_vocab_size()
    inputs = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts(vocabulary)]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        print("CALL", seconds[-1], flush=True)
    assert sum(len(one.token_ids) for output in outputs for one in output.outputs) == PROMPTS * SAMPLES * tokens
    return {"seconds": min(seconds[1:]), "first_s": seconds[0], "attention": "vllm"}


def measured(folder: Path, system: str, tokens: int, limit_s: float) -> dict[str, Any]:
    """One system in a process of its own, with its peak memory; an error is a row too."""
    command = [sys.executable, "-m", "benchmarks.gpu.continuous_batching", "--one", system, str(folder)]
    try:
        done = subprocess.run([*command, "--tokens", str(tokens)], capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        calls = [line.split()[1] for line in (error.stdout or b"").decode().splitlines() if line.startswith("CALL ")]
        return {"system": system, "error": f"more than {limit_s:g} s; seconds of calls: {', '.join(calls) or 'none'}"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"system": system, "error": " ".join(done.stderr.split())[-600:]}
    return {"system": system, **json.loads(lines[-1].removeprefix("RESULT "))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "0.6b"])
    parser.add_argument("--systems", nargs="+", default=[*SETTINGS, "vllm"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit_s", type=float, default=240)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        system, folder = args.one
        found = of_vllm(folder, args.tokens) if system == "vllm" else of_transformers(folder, system, args.tokens)
        gc.collect()
        print("RESULT", json.dumps({**found, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            saved_apart(shape, Path(folder), shape)
            for system in args.systems:
                row = {"shape": shape, **measured(Path(folder) / shape, system, args.tokens, args.limit_s)}
                rows.append(row)
                if "error" in row:
                    print(f"{shape:14} {system:22} {row['error']}", flush=True)
                    continue
                step_ms = 1e3 * row["seconds"] / args.tokens
                print(
                    f"{shape:14} {system:22} {row['seconds']:6.2f} s   {step_ms:6.1f} ms a step   "
                    f"first {row['first_s']:5.1f} s   {row['peak_gib']:5.1f} GiB   {row['attention']}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({**origin(), "gpu": torch.cuda.get_device_name(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
