"""Install llama.cpp's RPC server and tools, and the default pair in its format, into one folder.

    python -m ops.peer.install [--into .peer] [--jobs 2]

The source is the published package ``llama_cpp_python``, whose source distribution includes all of
llama.cpp; versions are pinned in ``ops/peer/constraints.txt``. Existing results are kept. Every
step has a time limit and a log; nothing is installed outside the folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.weights.directory import default_pair, open_directory
from ops.parser import Parser
from ops.peer.convert import convert

DEFAULT_FOLDER = Path(__file__).parents[2] / ".peer"
CONSTRAINTS = Path(__file__).parent / "constraints.txt"
PACKAGE = "llama_cpp_python"
#: Of the source distribution of the version in ``constraints.txt``.
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
#: A stage, plain decoding, speculative decoding, tokenization, quantisation, passes of several rows
#: and perplexity.
TOOLS = (
    *("ggml-rpc-server", "llama-completion", "llama-speculative-simple", "llama-tokenize"),
    *("llama-quantize", "llama-batched-bench", "llama-perplexity"),
)
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_RPC": "ON",
    "GGML_OPENMP": "OFF",  # its threads would spin on cores that other stages need
    "GGML_CCACHE": "OFF",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
_FETCH_SECONDS = 900.0
_CONFIGURE_SECONDS = 600.0
_BUILD_SECONDS = 3 * 3600.0
_REPORT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Peer:
    """An installed peer in ``folder``."""

    folder: Path = DEFAULT_FOLDER

    def tool(self, name: str) -> Path:
        """One of ``TOOLS``."""
        return self.folder / "build" / "bin" / name

    def model(self, name: str) -> Path:
        """``target`` or ``draft`` in GGUF."""
        return self.folder / f"{name}.gguf"

    @property
    def packages(self) -> Path:
        """The folder of the peer's own Python packages."""
        return (
            self.folder / "venv" / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
        )

    def missing(self) -> list[Path]:
        """Files of an installed peer that do not exist."""
        files = [*map(self.tool, TOOLS), self.model("target"), self.model("draft")]
        return [file for file in files if not file.is_file()]

    def check(self) -> None:
        """ConfigError if a file is missing."""
        if missing := self.missing():
            raise ConfigError(
                f"{missing[0]} does not exist: llama.cpp is not installed; run `make peer`"
            )


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the installation: its description, time limit in seconds, and log."""

    says: str
    seconds: float
    log: Path

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        """Run the command; ConfigError with the log's last line if it fails or times out."""
        print(f"{self.says} (log: {self.log})", flush=True)
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                self._wait(process)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            raise ConfigError(
                f"{self.says} failed with status {process.returncode}: {self._last()}; see "
                f"{self.log}"
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                process.wait(_REPORT_SECONDS)
                return
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{self.says} took more than {self.seconds:g} s and was stopped: "
                        f"{self._last()}; see {self.log}"
                    ) from None
                print(f"  {self._last()}", flush=True)

    def _last(self) -> str:
        """The log's last progress or error line, or else its last line."""
        lines = [
            line
            for line in self.log.read_text(errors="replace", encoding="utf-8").splitlines()
            if line.strip()
        ]
        marked = [
            line for line in lines if line.startswith(("[", "FAILED", "ERROR", "CMake Error"))
        ]
        return (marked or lines or ["no output"])[-1].strip()[:160]


def install(peer: Peer, jobs: int) -> None:
    """Install the missing parts of ``peer``; ConfigError if that is impossible."""
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} is not a number of compilers; expected 1 or more")
    if any(not peer.tool(tool).is_file() for tool in TOOLS):
        check_compiler()
    if not peer.missing():
        print(f"llama.cpp and the default pair are in {peer.folder}")
        return
    os.nice(10)
    peer.folder.mkdir(parents=True, exist_ok=True)
    environment = _packages(peer)
    if any(not peer.tool(tool).is_file() for tool in TOOLS):
        _compile(peer, _source(peer, environment), jobs, environment)
    for name, folder in zip(("target", "draft"), default_pair(), strict=True):
        convert(open_directory(folder), peer.model(name), peer.packages)
    peer.check()
    print(f"llama.cpp and the default pair are in {peer.folder}")


def check_compiler() -> None:
    """ConfigError unless there is a C and a C++ compiler."""
    for language, variable, names in (
        ("C", "CC", ("cc", "gcc", "clang")),
        ("C++", "CXX", ("c++", "g++", "clang++")),
    ):
        wanted = (
            [os.environ[variable].split()[0]] if os.environ.get(variable, "").strip() else names
        )
        if not any(map(shutil.which, wanted)):
            raise ConfigError(
                f"no {language} compiler found (looked for {', '.join(wanted)}); llama.cpp is "
                "compiled from source: "
                "install one, for example with `apt install build-essential`, or name it in "
                f"{variable}"
            )


def version() -> str:
    """The pinned version of the package."""
    (line,) = [
        line
        for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"{PACKAGE}==")
    ]
    return line.partition("==")[2]


def _packages(peer: Peer) -> dict[str, str]:
    """Install build tools and ``gguf`` into the folder's own venv; variables for its commands."""
    folder = peer.folder / "venv"
    if not (folder / "bin" / "cmake").is_file() or not (peer.packages / "gguf").is_dir():
        venv.create(folder, with_pip=True, clear=True)
        tools = ["cmake", "ninja", "gguf", "scikit-build-core"]
        Step("installing build tools", _FETCH_SECONDS, peer.folder / "tools.log").run(
            [folder / "bin" / "pip", "install", "--constraint", CONSTRAINTS, *tools], os.environ
        )
    return {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}


def _source(peer: Peer, environment: Mapping[str, str]) -> Path:
    """llama.cpp's source, unpacked from the package's verified source distribution."""
    source = peer.folder / f"source-{version()}"
    if source.is_dir():
        return source
    archive = peer.folder / f"{PACKAGE}-{version()}.tar.gz"
    if not archive.is_file():
        Step(
            f"downloading {PACKAGE} {version()}, 77 MB",
            _FETCH_SECONDS,
            peer.folder / "download.log",
        ).run(
            [
                peer.folder / "venv" / "bin" / "pip",
                "download",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                PACKAGE,
                "--dest",
                peer.folder,
                f"{PACKAGE}=={version()}",
            ],
            environment,
        )
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        archive.unlink()
        raise ConfigError(
            f"{archive} is not the file that was pinned and was removed; run again to download it "
            "anew"
        )
    return unpack(archive, f"{PACKAGE}-{version()}/vendor/llama.cpp/", source)


def unpack(archive: Path, prefix: str, folder: Path) -> Path:
    """Extract the members of ``archive`` below ``prefix`` to ``folder``, atomically."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.startswith(prefix)]
        for member in members:
            member.name = member.name.removeprefix(prefix)
        if not members:
            raise ConfigError(
                f"{archive} has nothing below {prefix}; it is not the expected package"
            )
        tar.extractall(partial, members, filter="data")
    partial.rename(folder)
    return folder


def _compile(peer: Peer, source: Path, jobs: int, environment: Mapping[str, str]) -> None:
    build = peer.folder / "build"
    options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
    Step("configuring llama.cpp", _CONFIGURE_SECONDS, peer.folder / "configure.log").run(
        ["cmake", "-S", source, "-B", build, "-G", "Ninja", *options], environment
    )
    Step(
        f"compiling llama.cpp with {jobs} jobs, 5 to 20 minutes",
        _BUILD_SECONDS,
        peer.folder / "build.log",
    ).run(["ninja", "-C", build, "-j", str(jobs), *TOOLS], environment)


def main() -> None:
    parser = Parser()
    parser.add_argument("--into", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    try:
        install(Peer(given.into.absolute()), given.jobs)
    except FlowSpecError as error:
        sys.exit(f"peer: {error}")
    except KeyboardInterrupt:
        sys.exit("peer: stopped; run again to go on")


if __name__ == "__main__":
    main()
