"""What verl tells the engine that completes prompts, in ours."""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import OF_ENGINE, ROLLOUT


def engine(theirs: Theirs, ours: Ours) -> None:
    """The engine, how it samples, and its memory."""
    name = theirs.take(f"{ROLLOUT}.name")
    if name not in ("vllm", "sglang", "trtllm", "hf"):
        ours.refuse(f"{ROLLOUT}.name", f"{name!r} is no engine that is known here (vllm, hf)")
        return
    note = "" if name in ("vllm", "hf") else f"{name} is not implemented; vLLM completes instead"
    if "data.video_key" in theirs and name != "hf":
        name, note = "hf", f"{name} takes no videos here. The policy completes prompts itself"
    ours.say("rollout_engine", "hf" if name == "hf" else "vllm", theirs, f"{ROLLOUT}.name", note=note)
    if note:
        ours.without[f"{ROLLOUT}.name: {name}"] = note
    ours.say("temperature", theirs.take(f"{ROLLOUT}.temperature"), theirs, f"{ROLLOUT}.temperature")
    ours.say("top_p", float(theirs.take(f"{ROLLOUT}.top_p")), theirs, f"{ROLLOUT}.top_p")
    ours.say("top_k", max(0, theirs.take(f"{ROLLOUT}.top_k")), theirs, f"{ROLLOUT}.top_k", note="0: all tokens")
    if theirs.take(f"{ROLLOUT}.do_sample", True) is False:
        ours.refuse(f"{ROLLOUT}.do_sample", "completions are drawn in training. Write true")
    if theirs.take(f"{ROLLOUT}.ignore_eos"):
        ours.say("generation_kwargs", {"ignore_eos": True}, theirs, f"{ROLLOUT}.ignore_eos")
    greedy = not theirs.take(f"{ROLLOUT}.val_kwargs.do_sample")
    heat = 0.0 if greedy else theirs.take(f"{ROLLOUT}.val_kwargs.temperature")
    ours.say("eval_temperature", heat, theirs, f"{ROLLOUT}.val_kwargs.temperature", note="0: greedy")
    draws = theirs.take(f"{ROLLOUT}.val_kwargs.n")
    if ours.trainer == "grpo":
        ours.say("num_generations_eval", draws, theirs, f"{ROLLOUT}.val_kwargs.n")
    elif draws != 1:
        ours.refuse(f"{ROLLOUT}.val_kwargs.n", "PPO evaluates one completion of each prompt. Write 1")
    theirs.taken.add(f"{ROLLOUT}.val_kwargs.temperature")
    ours.drop(
        theirs,
        [f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.top_k"],
        "evaluation draws with top_p and top_k of training",
    )
    if name == "hf":
        beginnings = tuple(f"{ROLLOUT}.{one}" for one in OF_ENGINE)
        ours.drop(
            theirs, [one for one in theirs.left() if one.startswith(beginnings)], "the engine hf does not read it"
        )
        return
    share = f"{ROLLOUT}.gpu_memory_utilization"
    ours.say("vllm_gpu_memory_utilization", theirs.take(share), theirs, share)
    for key in ("max_model_len", "max_num_seqs", "enforce_eager", "enable_prefix_caching"):
        if (value := theirs.take(f"{ROLLOUT}.{key}")) is not None:
            ours.say(f"vllm_{key}", value, theirs, f"{ROLLOUT}.{key}")
    further = {}
    for key in ("max_num_batched_tokens", "enable_chunked_prefill", "disable_log_stats"):
        if (value := theirs.take(f"{ROLLOUT}.{key}")) is not None:
            further[key] = (value, f"{ROLLOUT}.{key}")
    for key, value in theirs.below(f"{ROLLOUT}.engine_kwargs.vllm.").items():
        if key == "disable_mm_preprocessor_cache":
            ours.without[f"{ROLLOUT}.engine_kwargs.vllm.{key}"] = "a language model has no images"
        else:
            further[key] = (value, f"{ROLLOUT}.engine_kwargs.vllm.{key}")
    if further:
        values = {key: value for key, (value, _) in further.items()}
        ours.say("vllm_engine_kwargs", values, theirs, *(source for _, source in further.values()))
    sleeps = theirs.take(f"{ROLLOUT}.free_cache_engine")
    ours.say("sleep_level", 1 if sleeps else 0, theirs, f"{ROLLOUT}.free_cache_engine")
