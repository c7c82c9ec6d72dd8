"""Models of transformers that `ts.from_torch` imported, as HuggingFace folders."""

from __future__ import annotations

import json
from functools import partial
from math import prod
from typing import Any

from ..core.errors import UsageError
from ..lang.record.first_process import to_first
from .hf_files import Outgoing
from .torch_module import TorchModule


def of_torch(
    model: TorchModule, architecture: str | None
) -> tuple[dict[str, Outgoing], dict[str, Any]]:
    """(the tensors of the files by PyTorch's names, a tied one by its first; the content of
    config.json). Raises UsageError if the module has no config of transformers, or if another
    `architecture` is asked for."""
    exports = model.exports
    if not exports.config:
        raise UsageError(
            f"save_hf: {exports.name} is no model of transformers, as it has no config",
            fix="write its state with torch.save(ts.interop.to_torch(model.state_dict()), file)",
        )
    options = json.loads(exports.config)
    if architecture not in (None, options.get("model_type")):
        raise UsageError(
            f"save_hf: {exports.name} is written as {options.get('model_type')!r} alone",
            fix="leave out architecture=",
        )
    saved = model.saved()
    dtype = next((t.dtype.numpy.name for _, t in saved if t.dtype.is_float), "float32")
    options |= {"architectures": [exports.name], "dtype": dtype}
    out = {
        name: Outgoing(prod(t.shape) * t.dtype.numpy.itemsize, partial(to_first, t))
        for name, t in saved
    }
    return out, options
