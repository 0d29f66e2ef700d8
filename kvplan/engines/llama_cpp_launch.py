"""How `llama-server` is started with a setting."""

from kvplan.engines.commands import ini_text, shell_line
from kvplan.engines.engine import Launch, LaunchText
from kvplan.engines.llama_cpp import BATCH_TOKENS
from kvplan.engines.llama_cpp_formats import find_pair


def launch(setting: Launch) -> LaunchText:
    """Return the command `llama-server` and the same as the presets that its `--models-preset` reads.

    A batch is of `--batch-size` tokens and computed in passes of `--ubatch-size`, 512 where nothing is said; windows
    have cells for a pass (ggml-org/llama.cpp common/common.h and src/llama-kv-cache-iswa.cpp, 0c1e570).
    """
    key, value = find_pair(setting.format)
    values: dict[str, str | int] = {
        _source_flag(setting.model): setting.model,
        "ctx-size": setting.context_tokens * setting.sequences,
        "parallel": setting.sequences,
        "cache-type-k": key.name,
        "cache-type-v": value.name,
    }
    if value.quantized:
        values["flash-attn"] = "on"
    if setting.max_batched_tokens:
        values |= {
            "batch-size": setting.max_batched_tokens,
            "ubatch-size": min(setting.max_batched_tokens, BATCH_TOKENS),
        }
    if setting.pipeline_parallel > 1:
        values |= {"split-mode": "layer", "gpu-layers": "all"}
    file_text = ini_text(setting.model, values)
    return LaunchText(
        command=shell_line(["llama-server"], values),
        file_name="llama-server.ini" if file_text else "",
        file_text=file_text,
    )


def _source_flag(model: str) -> str:
    """Return the flag that names *model*: a file, or a repository that has GGUF files."""
    owner, _, name = model.partition("/")
    repository = name and "/" not in name and owner not in ("", ".", "..", "~") and not name.endswith(".gguf")
    return "hf-repo" if repository else "model"
