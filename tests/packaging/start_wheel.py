"""Start an installed wheel where neither the development tools nor torch are there; run by `make wheel`."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(sys.executable).parent / "kvplan"
WORKLOAD = """\
schema: 1
model: demo
memory: 1GiB
target: {concurrency: 4}
buckets: [{name: chat, prompt: 512, generate: 64, share: 100%}]
"""


def run(*arguments: str, status: int = 0) -> str:
    """Return what kvplan prints; stop where its exit status is another than *status*."""
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != status or "Traceback" in done.stderr:
        raise SystemExit(f"kvplan {' '.join(arguments)} exited {done.returncode}, not {status}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Run each light command, and one that needs the missing part."""
    for absent in ("torch", "transformers", "pytest", "ruff"):
        if importlib.util.find_spec(absent):
            raise SystemExit(f"{absent} is installed here: this says nothing about the wheel alone")
    for command in ("--help", "--version"):
        run(command)
    size = json.loads(run("size", "demo", "-f", "bf16", "-f", "int4", "--json"))
    allocated = [result["allocated"]["bytes_per_sequence"] for result in size["results"]]
    if not allocated[0] > 3 * allocated[1]:
        raise SystemExit(f"int4 is no fourth of bf16: {allocated}")
    run("formats")
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder, "w.yaml")
        workload.write_text(WORKLOAD)
        run("recommend", str(workload), "--json")
        run("recommend", str(Path(folder, "none.yaml")), status=2)
        run("profile", "demo", "-o", str(Path(folder, "p.json")), status=3)
        run("quality", "demo", status=3)
    sys.stdout.write("the wheel starts without torch: ok\n")


if __name__ == "__main__":
    main()
