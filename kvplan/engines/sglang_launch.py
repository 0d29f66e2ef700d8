"""How `sglang serve` is started with a setting."""

from typing import Final

from kvplan.engines.commands import shell_line, yaml_text
from kvplan.engines.engine import (
    Launch,
    LaunchText,
)

_FLAG_VALUES: Final = {"fp16": "auto"}
"""There is no word for fp16: `auto` is the type that the model runs in."""


def launch(setting: Launch) -> LaunchText:
    """Return the command `sglang serve` and the same as the YAML that its `--config` reads.

    The flags are those of sglang 0.5.23 (srt/arg_groups/fields, 2026-10-30). `mem-fraction-static` is the part of what
    is free before loading that weights and pools take; SGLang chooses it from the device where it is left out.
    """
    values: dict[str, str | int | float | bool] = {
        "kv-cache-dtype": _FLAG_VALUES.get(setting.format, setting.format),
        "page-size": setting.block_tokens,
        "context-length": setting.context_tokens,
        "max-running-requests": setting.sequences,
        "mem-fraction-static": round(setting.memory_utilization, 4),
    }
    if setting.blocks:
        values["max-total-tokens"] = setting.blocks * setting.block_tokens
    if setting.max_batched_tokens:
        values["chunked-prefill-size"] = setting.max_batched_tokens
    if setting.tensor_parallel > 1:
        values["tp-size"] = setting.tensor_parallel
    if setting.pipeline_parallel > 1:
        values["pp-size"] = setting.pipeline_parallel
    flags, said = [], {"model-path": setting.model, **values}
    if setting.prefix_caching is False:
        flags, said["disable-radix-cache"] = ["--disable-radix-cache"], True
    command = shell_line(["sglang", "serve", "--model-path", setting.model], values, flags)
    return LaunchText(command=command, file_name="sglang.yaml", file_text=yaml_text(said))
